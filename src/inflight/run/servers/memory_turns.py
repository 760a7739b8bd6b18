"""Passes GPU memory between servers, which hold it while they sample, and trainers, which hold it while they train.

A server that fails to release or restore its memory is left out, like any other server that fails, until a publish
reaches it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from inflight.base.clock import unix_time
from inflight.base.tasks import run_together
from inflight.contracts import InferenceEndpoint, ReleasingEndpoint
from inflight.errors import BusyError, InflightError, UnsupportedError
from inflight.observe.trace import events
from inflight.run.servers.servers import Servers

_IDLE_S = 10.0
"""How long a server may take to notice that its last clients have disconnected."""
_ASK_AGAIN_S = 0.1


@dataclass(eq=False)
class MemoryTurns:
    """Asks every server to release or to restore its memory, all at the same time, each within ``timeout_s``."""

    servers: Servers
    timeout_s: float

    async def to_trainers(self) -> None:
        """Return once every server has released its memory or is left out. No server is started before `to_servers` is
        called.
        """
        self.servers.may_start.clear()
        await self._ask_all("memory_released", "release", _release, list(self.servers.membership.taking_part))

    async def to_servers(self) -> None:
        """Return once every server has its memory again or is left out."""
        await self._restore(list(self.servers.membership.taking_part))

    async def end(self) -> None:
        """Return once servers that outlive the run have their memory again. Call this after the trainers have ended."""
        if not self.servers.may_start.is_set():
            own = {server.url for server in self.servers.own}
            await self._restore(
                [endpoint for endpoint, url in self.servers.membership.taking_part.items() if url not in own]
            )

    async def _restore(self, endpoints: Sequence[InferenceEndpoint]) -> None:
        await self._ask_all("memory_restored", "restore", lambda endpoint: endpoint.restore_memory(), endpoints)
        self.servers.may_start.set()

    async def _ask_all(
        self,
        kind: str,
        what: str,
        ask: Callable[[ReleasingEndpoint], Awaitable[object]],
        endpoints: Sequence[InferenceEndpoint],
    ) -> None:
        started = unix_time()
        problems = await run_together(*(self._ask(endpoint, ask) for endpoint in endpoints))
        done = [endpoint.name for endpoint, why in zip(endpoints, problems, strict=True) if why is None]
        self.servers.journal.event(events.MemoryMoved, (started, unix_time()), kind=kind, servers=tuple(done))
        for endpoint, why in zip(endpoints, problems, strict=True):
            if why is not None and endpoint.name not in self.servers.actor.dispatcher.endpoints.lost:
                self.servers.note(f"{endpoint.name} did not {what} its memory and is left out: {why}")
                self.servers.actor.lose(endpoint.name, f"the server did not {what} its memory: {why}")

    async def _ask(
        self, endpoint: InferenceEndpoint, ask: Callable[[ReleasingEndpoint], Awaitable[object]]
    ) -> str | None:
        """Return None if the call succeeded, or else the reason why it failed."""
        try:
            if not isinstance(endpoint, ReleasingEndpoint):
                raise UnsupportedError(f"{type(endpoint).__name__} has no release_memory")
            async with asyncio.timeout(self.timeout_s):
                await ask(endpoint)
        except TimeoutError:
            return f"no answer within {self.timeout_s:g} s"
        except InflightError as error:
            return str(error).removeprefix(f"{endpoint.name}: ")
        return None


async def _release(endpoint: ReleasingEndpoint) -> None:
    """Release the memory of an endpoint; retries while requests of disconnected clients are still running."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        try:
            await endpoint.release_memory()
        except BusyError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_ASK_AGAIN_S)
        else:
            return
