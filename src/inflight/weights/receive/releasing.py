"""Releasing and restoring one endpoint's memory, one call at a time."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Protocol

from inflight.base.tasks import TaskOwner
from inflight.errors import BusyError
from inflight.weights.receive.states import UpdateStateMachine
from inflight.wire import EndpointState

IDLE_S = 10.0
"""How long, in seconds, other clients' requests to an engine may take to end before a release is refused."""


class ReleasableEngine(Protocol):
    """The engine's side of a `MemoryRelease`. During its calls, nothing is sampled and no update is open."""

    @abstractmethod
    async def free_memory(self) -> None:
        """Release the memory of the weights and the KV cache, and keep the weights elsewhere.

        If a request is running or waiting in the engine, raises `BusyError` and changes nothing. After any other error,
        `take_memory` must be able to restore the memory.
        """

    @abstractmethod
    async def take_memory(self) -> None:
        """Reacquire the memory, so that the engine can sample. After an error, this may be called again."""


class MemoryRelease:
    """Releases and restores the memory of an engine, whose state is in ``session``.

    Cancelling a call does not cancel the operation.
    """

    def __init__(self, engine: ReleasableEngine, session: UpdateStateMachine) -> None:
        self._engine = engine
        self._session = session
        self._turn = asyncio.Lock()
        self._calls = TaskOwner()

    async def release(self) -> None:
        """Release the memory. Requests and updates are refused as soon as this is called.

        Raises the errors that `ReleasingEndpoint` specifies.
        """
        await asyncio.shield(self._calls.start(self._release()))

    async def restore(self) -> None:
        await asyncio.shield(self._calls.start(self._restore()))

    async def _release(self) -> None:
        async with self._turn:
            if self._session.state is EndpointState.RELEASED:
                return
            self._session.begin_release()
            try:
                await self._engine.free_memory()
            except BusyError:
                self._session.note_restored()
                raise
            except BaseException:
                self._session.note_released()
                raise
            self._session.note_released()

    async def _restore(self) -> None:
        async with self._turn:
            if self._session.state is not EndpointState.RELEASED:
                return
            self._session.begin_restore()
            try:
                await self._engine.take_memory()
            except BaseException:
                self._session.note_released()
                raise
            self._session.note_restored()
