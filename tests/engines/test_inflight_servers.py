"""Adapters of engines that are pointed at a server of the contract say so."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from inflight.errors import ConfigError
from inflight.http.kinds import connect_endpoint
from inflight_sglang.flags import missing_routes
from tests.servers import TOKEN, ServerProcess


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_inflight_server_is_named_as_such(engine: str, shared_server: ServerProcess) -> None:
    async def attach() -> None:
        async with aclosing(connect_endpoint(f"{engine}+{shared_server.url}", token=TOKEN)) as endpoint:
            await endpoint.capabilities()

    with pytest.raises(ConfigError, match=f"is an inflight server, .*: use the URL {shared_server.url}"):
        asyncio.run(attach())


def test_missing_routes_are_counted_where_they_are_many() -> None:
    problem = missing_routes({})
    assert problem is not None and "/pause_generation' and 15 others" in problem.text
