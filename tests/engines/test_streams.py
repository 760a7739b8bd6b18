"""The chunks of an engine's stream."""

from __future__ import annotations

import asyncio

from inflight.engines.streams import TokenStream
from inflight.wire import GenerateRequest


def test_a_stream_that_nobody_reads_starts_nothing() -> None:
    started = []

    async def sample() -> None:
        started.append(True)

    async def leave() -> None:
        stream = TokenStream(GenerateRequest(request_id="left", prompt_token_ids=(1,)), lambda: 0)
        await stream.read(sample).aclose()

    asyncio.run(leave())
    assert started == []
