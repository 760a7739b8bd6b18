"""The table of backends that PipelineRL's announcement and the papers name: what works, what is certified since when.

Whether a backend is certified is read from the certificates. Only what no file specifies is written here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.tables.kept import ROOT

CERTIFICATES = ROOT / "docs" / "certificates"


@dataclass(frozen=True)
class Backend:
    """One row. ``files`` is the glob of its certificates, and ``entry`` its entry point: group and name.

    The entry of a protocol that ``inflight dialect`` speaks to a trainer is ``dialects`` and its name.
    """

    name: str
    side: str
    files: str = ""
    entry: tuple[str, str] = ("", "")
    why_not: str = ""
    """Why it is not certified, or has no adapter."""
    has_run: bool = True
    """Whether the adapter has run on the real thing, and not only with a stand-in."""


BACKENDS = (
    Backend("vLLM", "generation", "vllm-*.json", ("engines", "vllm")),
    Backend("SGLang", "generation", "sglang-*.json", ("engines", "sglang")),
    Backend(
        "PipelineRL's servers",
        "generation",
        "pipelinerl-*.json",
        ("engines", "pipelinerl"),
        "they need GPUs, and inflight does not join their NCCL group",
        has_run=False,
    ),
    Backend(
        "PipelineRL's servers in fast-llm mode",
        "generation",
        "fast_llm-*.json",
        ("engines", "fast_llm"),
        "they need GPUs and Fast-LLM, inflight does not join their NCCL group, and they never answer an update",
        has_run=False,
    ),
    Backend(
        "Nvidia Dynamo",
        "generation",
        "dynamo-*.json",
        ("engines", "dynamo"),
        "needs GPUs, and depends on a package that is not on PyPI",
        has_run=False,
    ),
    Backend("TensorRT-LLM", "generation", why_not="needs CUDA, so nothing could be tested"),
    Backend("FSDP2", "training", "fsdp-*.json", ("workers", "fsdp")),
    Backend("TorchTitan", "training", "torchtitan-*.json", ("workers", "torchtitan")),
    Backend("DeepSpeed", "training", "deepspeed-*.json", ("workers", "deepspeed")),
    Backend(
        "Fast-LLM",
        "training",
        entry=("dialects", "fast_llm"),
        why_not="not on PyPI, and needs flash-attn and Triton; the kit can check only trainers that implement the "
        "contract's worker interface",
        has_run=False,
    ),
    Backend("Megatron-Core", "training", "megatron-*.json", ("workers", "megatron")),
)


def backends_table() -> str:
    """Return one row for each backend."""
    lines = [
        "| backend | side | state | how to select it | certified | why it is not certified |",
        "|---|---|---|---|---|---|",
    ]
    for backend in BACKENDS:
        releases = certified_since(_certificates(backend.files)) if backend.files else {}
        named = _how(*backend.entry)
        state = _state(backend, bool(releases), bool(named))
        since = "<br>".join(f"{release}: since {date}" for release, date in releases.items())
        why = "" if releases else backend.why_not
        lines.append(f"| {backend.name} | {backend.side} | {state} | {named} | {since} | {why} |")
    return "\n".join(lines)


def _state(backend: Backend, is_certified: bool, is_installed: bool) -> str:
    if is_certified:
        return "works, certified"
    if is_installed:
        return "works, not certified" if backend.has_run else "works with a stand-in, not certified"
    return "no adapter yet"


def certified_since(certificates: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the day of the first kept certificate of each release without a failure, newest release first.

    A release of a trainer is that of the library that its certificate names.
    """
    found: dict[str, str] = {}
    for certificate in certificates:
        outcomes = {verdict["outcome"] for verdict in certificate["verdicts"]}
        if certificate["problem"] or outcomes - {"passed", "skipped", "expected failure"}:
            continue
        release, day = _release(certificate), certificate["started_at"][:10]
        found[release] = min(day, found.get(release, day))
    return dict(sorted(found.items(), key=lambda item: _numbers(item[0]), reverse=True))


def _release(certificate: Mapping[str, Any]) -> str:
    if certificate["kind"] == "endpoint":
        return str(certificate["implementation_version"])
    environment = certificate["environment"]
    for library in ("deepspeed", "torchtitan", "megatron-core"):
        if library.partition("-")[0] in certificate["implementation"].lower():
            return str(environment.get(library) or "release not named")
    return f"torch {environment['torch'].split('+')[0]}"


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split()[-1].split(".") if part.isdigit()]


def _certificates(files: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(CERTIFICATES.glob(files))]


def _how(group: str, name: str) -> str:
    """Return what a user writes, if the entry point or the command exists."""
    if group == "dialects":
        module = ROOT / "src" / "inflight" / "commands" / f"dialect_{name}.py"
        return f"`inflight dialect {name}`" if module.exists() else ""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    if name not in entries.get(f"inflight.{group}", {}):
        return ""
    return f"`{name}+http://`" if group == "engines" else f'`trainer = "{name}"`'
