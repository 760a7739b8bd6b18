"""Kinds of engines as they are installed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inflight.base.extensions import find_entry_points
from inflight.contracts import EngineOptions
from inflight.engines.launch import start_engine
from inflight.errors import ConfigError
from inflight.http.kinds import load_engine_kind
from inflight.wire import Capabilities


@pytest.mark.parametrize("name", ["dynamo", "embedded", "fast_llm", "pipelinerl", "sglang", "vllm"])
def test_a_kind_has_the_name_under_which_it_is_installed(name: str) -> None:
    assert load_engine_kind(name).name == name
    assert name in find_entry_points("engines")


def test_the_embedded_engine_loads_what_its_options_say(model_dir: Path) -> None:
    kind = load_engine_kind("embedded")

    async def capabilities(options: EngineOptions) -> Capabilities:
        endpoint = kind.load(options)
        try:
            return await endpoint.capabilities()
        finally:
            await endpoint.aclose()

    can = asyncio.run(capabilities(EngineOptions(model_dir, name="letters", device="cpu", max_concurrent=3, threads=1)))
    assert (can.engine, can.model, can.max_concurrent_sequences) == ("embedded", "letters", 3)
    assert asyncio.run(capabilities(EngineOptions(model_dir, device="cpu"))).max_concurrent_sequences == 64


@pytest.mark.parametrize("name", ["dynamo", "embedded", "fast_llm", "pipelinerl"])
def test_an_engine_that_is_never_a_process_of_its_own_is_not_started_as_one(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"not start embedded|starts its own|does not start PipelineRL|are started by PipelineRL"
    ):
        start_engine(load_engine_kind(name), EngineOptions(Path("model")))


@pytest.mark.parametrize(("name", "where"), [("embedded", "anywhere"), ("vllm", "on_gpu"), ("dynamo", "never")])
def test_a_kind_says_where_its_servers_release_their_memory(name: str, where: str) -> None:
    assert load_engine_kind(name).releases_memory == where
