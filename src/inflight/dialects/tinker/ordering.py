"""Executes the calls of one model in the order of their numbers, regardless of the order in which they arrive.

The SDK numbers the calls of a model 1, 2, 3, ... without gaps, sends the first part of a large call last, and repeats a
call whose answer was lost.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from inflight.dialects.tinker.futures import Futures, Result
from inflight.errors import DeadlineError, InvalidRequestError

WAIT_S = 600.0
"""How long, in seconds, a call waits for the previous call to arrive."""
NUM_REMEMBERED = 4096
"""Number of most recent calls that are remembered, so that repeated calls are recognized."""


@dataclass(eq=False, slots=True)
class _Call:
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    request_id: str = ""
    digest: bytes = b""


class OrderedCalls:
    """The calls of one model. Belongs to one event loop."""

    def __init__(self, futures: Futures) -> None:
        self._futures = futures
        self._calls: dict[int, _Call] = {}
        self._num_forgotten = 0
        self.num_open = 0
        """Number of calls that have arrived and not ended."""

    def submit(self, seq_id: int, content: bytes, execute: Callable[[], Awaitable[Result]]) -> str:
        """Execute a call after the previous one; return the id of its future, which a repeated call shares.

        Raises `InvalidRequestError` if a different call has used this number.
        """
        newest = max(self._calls, default=self._num_forgotten)
        if not self._num_forgotten < seq_id <= newest + NUM_REMEMBERED:
            raise InvalidRequestError(
                f"seq_id is {seq_id}, but the next call of this model is {newest + 1}; calls are numbered from 1, "
                f"and those up to {self._num_forgotten} ended long ago"
            )
        call, digest = self._call(seq_id), hashlib.sha256(content).digest()
        if call.request_id:
            if call.digest != digest:
                raise InvalidRequestError(f"seq_id {seq_id} was used for another call")
            return call.request_id
        before = self._call(seq_id - 1) if seq_id > self._num_forgotten + 1 else None

        async def in_turn() -> Result:
            try:
                if before is not None:
                    await self._wait_for(before, seq_id)
                return await execute()
            finally:
                self.num_open -= 1
                call.ended.set()
                self._forget_before(seq_id - NUM_REMEMBERED)

        call.request_id, call.digest = self._futures.start(in_turn), digest
        call.arrived.set()
        self.num_open += 1
        return call.request_id

    async def _wait_for(self, before: _Call, seq_id: int) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await before.arrived.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"call {seq_id} was not executed: call {seq_id - 1} did not arrive within {WAIT_S:g} s"
            ) from error
        await before.ended.wait()

    def _call(self, seq_id: int) -> _Call:
        return self._calls.setdefault(seq_id, _Call())

    def _forget_before(self, seq_id: int) -> None:
        while self._num_forgotten < seq_id:  # at most a few: numbers that are far ahead are refused
            self._num_forgotten += 1
            self._calls.pop(self._num_forgotten, None)
