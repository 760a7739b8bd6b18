"""Calls to an engine that continue even if their callers are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from inflight.base.tasks import cancel_and_wait, start
from inflight.errors import InflightError

T = TypeVar("T")


class AttachOnce(Generic[T]):
    """Holds the result of ``attach``, which runs for the first caller, and again if it has failed or was cancelled."""

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
            self._task = start(self._attach())
        return await asyncio.shield(self._task)

    async def aclose(self) -> None:
        """Cancel ``attach``, if it is running."""
        if self._task is not None:
            await cancel_and_wait(self._task)


async def ignore_engine_errors(call: Awaitable[object]) -> None:
    """Await a call, and ignore the error if the engine refuses the call or no longer answers."""
    with contextlib.suppress(InflightError):
        await call
