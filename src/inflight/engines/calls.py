"""Calls on an engine that do not end with those who wait for them. Knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from inflight.errors import InflightError

T = TypeVar("T")


class Attaching(Generic[T]):
    """What ``attach`` returns. It is called for the first caller, and again after it failed or was cancelled."""

    def __init__(self, attach: Callable[[], Awaitable[T]]) -> None:
        self._attach = attach
        self._task: asyncio.Future[T] | None = None

    @property
    def has_succeeded(self) -> bool:
        """Whether the engine was attached to."""
        task = self._task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    async def result(self) -> T:
        """Return what was found. A caller that is cancelled leaves the others waiting."""
        if self._task is None or (self._task.done() and not self.has_succeeded):
            self._task = asyncio.ensure_future(self._attach())
        return await asyncio.shield(self._task)


class BackgroundCalls:
    """Calls that go on when those who wait for them are cancelled. Belongs to one event loop."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Future[Any]] = set()

    def start(self, call: Awaitable[None]) -> asyncio.Future[None]:
        """Begin a call and return it; its failure is of interest to those only who wait for it."""
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def aclose(self, wait_s: float) -> None:
        """Wait for the calls that are under way, then cancel what is left of them."""
        if self._calls:
            _, late = await asyncio.wait(self._calls, timeout=wait_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def quietly(call: Awaitable[object]) -> None:
    """Await a call, and pass over what the engine refuses or no longer answers."""
    with contextlib.suppress(InflightError):
        await call
