"""Futures: results of calls that a client retrieves later, possibly more than once because an answer may be lost."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from inflight.base.tasks import TaskOwner
from inflight.errors import InflightError, InvalidRequestError, UnsupportedError

Result = dict[str, Any] | bytes
"""The result of a call: JSON, or a protobuf message."""
HOLD_S = 30.0
"""How long, in seconds, a retrieval waits for a result. The SDK abandons a retrieval after 45 s, and immediately
repeats one that is answered as pending."""
KEPT_AFTER_RETRIEVAL_S = 120.0
"""How long, in seconds, a result is kept after its retrieval, because the answer may have been lost."""
ABANDONED_S = 120.0
"""How long, in seconds, a repeatable call keeps running if its client does not retrieve it. The SDK always has a
retrieval open, unless its process is suspended or has been killed."""
KEPT_S = 3600.0
"""How long, in seconds, a result is kept if no client retrieves it."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that failed permanently. ``category`` states who caused it: ``user`` or ``server``."""

    error: str
    category: str

    @classmethod
    def of(cls, error: Exception) -> FailedCall:
        """Return the failure of a call that raised ``error``."""
        by_user = isinstance(error, InvalidRequestError | UnsupportedError | NotFoundError)
        text = str(error) if isinstance(error, InflightError | NotFoundError) else f"{type(error).__name__}: {error}"
        return cls(text, "user" if by_user else "server")


class NotFoundError(Exception):
    """Something that a request names does not exist."""


class GoneError(Exception):
    """No future has this id: its result was retrieved or abandoned long ago, or the server was restarted."""


@dataclass(eq=False, slots=True)
class _Entry:
    is_repeatable: bool
    done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Result | FailedCall | None = None
    task: asyncio.Task[None] | None = None
    num_waiting: int = 0
    """Number of retrievals that wait for the outcome."""
    removal: asyncio.TimerHandle | None = None


class Futures:
    """The futures of a server. Belongs to one event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._tasks = TaskOwner()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def start(self, call: Callable[[], Awaitable[Result]], *, is_repeatable: bool = False) -> str:
        """Run a call in the background, and return the id of its future.

        A repeatable call is one that clients send again if its future no longer exists. If no client has waited for the
        result for `ABANDONED_S`, the call is cancelled and its future is removed.
        """
        request_id = uuid.uuid4().hex
        entry = self._entries[request_id] = _Entry(is_repeatable)

        async def run() -> None:
            try:
                entry.outcome = await call()
            except Exception as error:  # the client receives any failure
                entry.outcome = FailedCall.of(error)
            entry.done.set()
            self._remove_after(request_id, entry, KEPT_S)

        entry.task = self._tasks.start(run())
        if is_repeatable:
            self._remove_after(request_id, entry, ABANDONED_S)
        return request_id

    async def retrieve(self, request_id: str, hold_s: float = HOLD_S) -> Result | FailedCall | None:
        """Return the outcome of a call, or None if it has none after ``hold_s``. Raises `GoneError`."""
        entry = self._entries.get(request_id)
        if entry is None:
            raise GoneError(request_id)
        if entry.removal is not None and not entry.done.is_set():
            entry.removal.cancel()
        entry.num_waiting += 1
        try:
            async with asyncio.timeout(hold_s):
                await entry.done.wait()
        except TimeoutError:
            return None
        finally:
            entry.num_waiting -= 1
            if entry.is_repeatable and not (entry.done.is_set() or entry.num_waiting):
                self._remove_after(request_id, entry, ABANDONED_S)
        if entry.outcome is not None:  # None if all futures are being closed
            self._remove_after(request_id, entry, KEPT_AFTER_RETRIEVAL_S)
        return entry.outcome

    def _remove_after(self, request_id: str, entry: _Entry, seconds: float) -> None:
        if entry.removal is not None:
            entry.removal.cancel()
        entry.removal = asyncio.get_running_loop().call_later(seconds, self._remove, request_id)

    def _remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.task is not None:
            entry.task.cancel()  # a call that has ended is not changed by this

    async def aclose(self) -> None:
        """Cancel the running calls, and discard all results; a waiting retrieval returns None."""
        await self._tasks.aclose(0.0)
        for entry in self._entries.values():
            entry.done.set()
            if entry.removal is not None:
                entry.removal.cancel()
        self._entries.clear()
