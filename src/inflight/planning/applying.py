"""Writes a configuration into a copy of a run's TOML file, line by line, so that comments are preserved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.base.toml import read_toml
from inflight.errors import ConfigError
from inflight.planning.candidates import Candidate


def settings_of(candidate: Candidate, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``run.toml`` that select a configuration, by dotted key.

    ``run`` is the current content of the file. The tokens of a step are divided by the run's number of ranks.
    """
    num_ranks = run.get("train", {}).get("num_ranks", 1)
    conventional = {"run.conventional_steps": candidate.conventional_steps} if candidate.conventional_steps else {}
    return {
        "run.mode": "conventional" if candidate.conventional_steps else "pipeline",
        **conventional,
        "sampling.group_size": candidate.group_size,
        "servers.count": candidate.num_endpoints,
        "servers.max_concurrent": candidate.max_concurrent,
        "train.tokens_per_worker": round(candidate.tokens_per_step / num_ranks),
        "rollouts.max_lag": candidate.max_lag,
        "rollouts.scheduler": candidate.scheduler,
    }


def apply(candidate: Candidate, source: Path, target: Path) -> dict[str, Any]:
    """Write a copy of ``source`` with the settings of a configuration to ``target``; return the settings.

    Raises `ConfigError` if ``source`` is not the file of a run or configures a mixed fleet, or if ``target`` exists.
    """
    values = read_toml(source, "configuration")
    servers = values.get("servers", {})
    if servers.get("fleet") or servers.get("attach"):
        raise ConfigError(f"{source} configures a mixed fleet: a plan sets servers.count, which does not apply to it")
    settings = settings_of(candidate, values)
    text = source.read_text(encoding="utf-8")
    for key, value in settings.items():
        section, _, name = key.partition(".")
        text = _with(text, section, name, value)
    try:
        with target.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{target} already exists: remove it, or choose another file with --output") from error
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    return settings


def _with(text: str, section: str, name: str, value: Any) -> str:
    """Return the TOML text with one value set in its section. A comment after the old value is kept."""
    line = f"{name} = {json.dumps(value)}"
    header = re.search(rf"^\[{section}\][^\n]*\n?", text, re.MULTILINE)
    if header is None:
        return f"{text.rstrip()}\n\n[{section}]\n{line}\n"
    following = re.search(r"^\[", text[header.end() :], re.MULTILINE)
    end = header.end() + following.start() if following else len(text)
    body = text[header.end() : end]
    found = re.search(rf"^{name}\s*=\s*(\"[^\"\n]*\"|[^\s#]+)", body, re.MULTILINE)
    body = f"{line}\n{body}" if found is None else body[: found.start()] + line + body[found.end() :]
    start = text[: header.end()] if text[: header.end()].endswith("\n") else text[: header.end()] + "\n"
    return start + body + text[end:]
