"""Calls on an engine that go on when their callers are cancelled. Knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from inflight.errors import InflightError

T = TypeVar("T")


class Attaching(Generic[T]):
    """The result of ``attach``, which runs for the first caller, and again after it failed or was cancelled."""

    def __init__(self, attach: Callable[[], Awaitable[T]]) -> None:
        self._attach = attach
        self._task: asyncio.Future[T] | None = None

    @property
    def has_succeeded(self) -> bool:
        task = self._task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    async def result(self) -> T:
        """Return the result of ``attach``. Cancelling one caller does not affect the others."""
        if self._task is None or (self._task.done() and not self.has_succeeded):
            self._task = asyncio.ensure_future(self._attach())
        return await asyncio.shield(self._task)


class BackgroundCalls:
    """Calls that go on when their callers are cancelled. Belongs to one event loop."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Future[Any]] = set()

    def start(self, call: Awaitable[None]) -> asyncio.Future[None]:
        """Begin a call and return its future. A failure that nobody waits for is ignored."""
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def aclose(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` seconds for the calls under way, then cancel the rest."""
        if self._calls:
            _, late = await asyncio.wait(self._calls, timeout=wait_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def quietly(call: Awaitable[object]) -> None:
    """Await a call, and ignore that the engine refuses it or no longer answers."""
    with contextlib.suppress(InflightError):
        await call
