"""Assumptions about how vLLM is started: its command line, its configuration and its environment variables."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from inflight.contracts import EngineOptions
from inflight_vllm import KIND, flags
from inflight_vllm import kind as kind_module
from tests.engines.vllm_sources.assumption import Assumption, Check, field_problem, has_constant
from tests.engines.vllm_sources.reading import Definition, Sources, constants_in


def starting_assumptions() -> Iterator[Assumption]:
    """Yield the assumptions about starting vLLM, some of them several times."""
    yield from _options()
    yield from _variables()


def _command_words() -> list[tuple[str, str | None]]:
    """Return the options that the adapter starts vLLM with, or looks for, with their values."""
    model = Path("M")
    everything = EngineOptions(
        model=model, device="cpu", dtype="float32", max_model_len=1, max_concurrent=1, drafts="history", threads=1
    )
    words = [*KIND.command(everything, "127.0.0.1", 7000), *flags.RELEASE_ARGUMENTS]
    found = [
        (word, None if index + 1 == len(words) or words[index + 1].startswith("-") else words[index + 1])
        for index, word in enumerate(words)
        if word.startswith("--")
    ]
    read = {
        str(it)
        for it in constants_in(ast.parse(Path(kind_module.__file__).read_text()))
        if isinstance(it, str) and it.startswith("--") and it[2:].replace("-", "").isalnum()
    }
    return [*found, *((word, None) for word in sorted(read - {word for word, _ in found}))]


def _options() -> Iterator[Assumption]:
    for word, value in _command_words():
        yield Assumption("option", word, _option(word.removeprefix("--")))
        field = word.removeprefix("--").replace("-", "_")
        for key, inner in json.loads(value).items() if value is not None and value.startswith("{") else ():
            yield Assumption("option value", f"{word} {key}", _config_field(field, key, inner))
        if field in ("logprobs_mode", "dtype", "distributed_executor_backend", "per_request_spec_decode_metrics"):
            assert value is not None
            yield Assumption("option value", f"{word} {value}", _config_value(field, value))


def _option(name: str) -> Check:
    def problem(sources: Sources) -> str | None:
        names = {f"--{name}", *([f"--{name.removeprefix('no-')}"] if name.startswith("no-") else [])}
        tree = sources.module("vllm.engine.arg_utils")
        for node in ast.walk(tree) if tree is not None else ():
            match node:
                case ast.Call(func=ast.Attribute(attr="add_argument"), args=args):
                    if names & {it.value for it in args if isinstance(it, ast.Constant)}:
                        return None
        for module in sources.modules_under("vllm.entrypoints"):
            arguments = sources.find(f"{module}.FrontendArgs") if module.endswith(".cli_args") else None
            if arguments is not None and name.replace("-", "_") in sources.fields(arguments):
                return None
        return f"there is no option --{name}"

    return problem


def _config_fields(sources: Sources, name: str) -> Iterator[Definition]:
    """Yield the fields of this name in vLLM's configuration classes."""
    for module in sources.modules_under("vllm.config"):
        if name not in sources.text_of(module):
            continue
        tree = sources.module(module)
        for cls in tree.body if tree is not None else ():
            if isinstance(cls, ast.ClassDef) and name in (fields := sources.fields(Definition(module, cls))):
                yield fields[name]


def _config_value(name: str, value: str) -> Check:
    def problem(sources: Sources) -> str | None:
        allowed: set[str] = set()
        for field in _config_fields(sources, name):
            assert isinstance(field.node, ast.AnnAssign)
            allowed |= sources.literals_in(field.module, field.node.annotation)
        return None if value in allowed else f"{name} is one of {sorted(allowed)}, not {value!r}"

    return problem


def _config_field(name: str, key: str, value: object) -> Check:
    def problem(sources: Sources) -> str | None:
        for field in _config_fields(sources, name):
            if field_problem(sources, field, key) is None:
                is_choice = key == "method"
                return _config_value(key, str(value))(sources) if is_choice else None
        return f"the configuration {name} has no field {key}"

    return problem


def _variables() -> Iterator[Assumption]:
    options = EngineOptions(model=Path("M"), device="cpu", threads=1)
    for name in (it for it in KIND.environment(options) if it.startswith("VLLM_")):
        yield Assumption("environment variable", name, has_constant("vllm.envs", name))
