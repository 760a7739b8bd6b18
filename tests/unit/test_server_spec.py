"""What one server is started with, and its command line."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.contracts import DEFAULT_MAX_CONCURRENT, EngineOptions
from inflight.engines.embedded.loading import load_endpoint
from inflight.errors import ConfigError
from inflight.http.server_spec import JoinOptions, ListenOptions, ServerSpec, add_server_arguments

PATHS = st.text(min_size=1).filter(lambda text: "\0" not in text).map(Path)
FLOATS = st.floats(allow_nan=False)


def values_of(kind: type) -> st.SearchStrategy[Any]:
    """Return values of a dataclass, each field of which may have any value of its type."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{it.name: strategy_of(hints[it.name], it) for it in dataclasses.fields(kind)})


def strategy_of(hint: Any, it: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(hint):
        return values_of(hint)  # type: ignore[arg-type]
    if "choices" in it.metadata:
        return st.none() | st.sampled_from(it.metadata["choices"])
    return st.from_type(hint)


st.register_type_strategy(Path, PATHS)
st.register_type_strategy(float, FLOATS)


@given(values_of(ServerSpec))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_command_line_starts_the_server_that_it_was_written_for(spec: ServerSpec) -> None:
    assert ServerSpec.from_argv(spec.to_argv()) == spec


def test_the_arguments_of_a_server_that_has_every_default_are_its_model_only() -> None:
    assert ServerSpec(EngineOptions(Path("models/tiny"))).to_argv() == ["models/tiny"]


def test_options_are_written_as_people_write_them() -> None:
    options = EngineOptions(Path("m"), max_concurrent=8, compile=True, arguments=("--tp", "2"))
    spec = ServerSpec(options, "vllm", ListenOptions(port=0, lease_s=5.0), JoinOptions("http://head:8100"))
    assert " ".join(spec.to_argv()) == (
        "m --max-concurrent 8 --compile --engine-arg=--tp --engine-arg=2 --engine vllm --port 0 --lease 5.0 "
        "--join http://head:8100"
    )


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("50kB", 50_000), ("2GB", 2 * 10**9), ("1.5mb", 1_500_000), ("7B", 7)]
)
def test_a_size_is_written_with_its_unit(text: str, size_bytes: int) -> None:
    assert ServerSpec.from_argv(["m", "--kv-cache", text]).options.kv_cache_bytes == size_bytes


def test_a_size_without_a_meaning_is_refused() -> None:
    with pytest.raises(ConfigError, match="'many' is not a size"):
        ServerSpec.from_argv(["m", "--kv-cache", "many"])


def test_the_help_says_how_many_sequences_a_server_decodes_at_a_time() -> None:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    assert f"(default: {DEFAULT_MAX_CONCURRENT})" in parser.format_help()


def test_the_embedded_engine_takes_every_option_but_those_of_its_process() -> None:
    parameters = dict(inspect.signature(load_endpoint).parameters)
    del parameters["path"]
    options = {it.name: it.default for it in dataclasses.fields(EngineOptions)}
    options["max_concurrent"] = EngineOptions(Path("m")).num_slots
    assert {name: it.default for name, it in parameters.items()} == {
        name: default for name, default in options.items() if name not in ("model", "threads", "arguments")
    }
