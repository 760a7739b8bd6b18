"""Holds up an endpoint's event loop, so that its engine is ahead of what the endpoint has recorded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from inflight.conformance.endpoint.subject import EndpointSubject

_BLOCKED_S = 0.01
"""How long the event loop is blocked each time: longer than a step of a small model."""
_NUM_CALLERS = 64
"""Number of concurrent calls that hold up a server."""


@contextlib.asynccontextmanager
async def held_up(subject: EndpointSubject) -> AsyncIterator[None]:
    """Hold up the endpoint's event loop during the block.

    The loop of a server is held up by many calls at once. An endpoint in this process shares this process's loop, which
    is blocked repeatedly. The engine may then sample from new weights before the endpoint has recorded that they are
    served; answers must still be correct.
    """
    endpoint, is_over = subject.endpoint, False

    async def block() -> None:
        while not is_over:
            time.sleep(_BLOCKED_S)  # noqa: ASYNC251 - to block the event loop
            await asyncio.sleep(0)

    async def call() -> None:
        while not is_over:
            await endpoint.weight_version()

    if subject.opened.url is None:
        tasks = [subject.begin(block())]
    else:
        tasks = [subject.begin(call()) for _ in range(_NUM_CALLERS)]
        await asyncio.sleep(_BLOCKED_S)
    try:
        yield
    finally:
        is_over = True
        await asyncio.gather(*tasks)
