"""Scales the fleet by a rule: the run starts additional servers, which join like any other server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

from inflight.errors import ConfigError
from inflight.observe.trace import events
from inflight.rollouts.scaling import ScaleRule
from inflight.run.fleet_config import ScalingSection
from inflight.run.machines.processes import ServerProcess
from inflight.run.record.journal import Journal

_LOOK_S = 0.25
_LEAVE_S = 120.0
"""How long a server that leaves may take to end, including its grace period for handing on requests."""


class StartServer(Protocol):
    """Starts one more server with the given name, and waits until it answers."""

    async def __call__(self, name: str) -> ServerProcess:
        """Return the server. Raises `ConfigError` if it could not be started."""


class Scaling:
    """Starts and stops the servers in ``running`` as the rule requires, one at a time.

    ``load`` returns whether training waits, the slots of the fleet, and how many of them are free.
    """

    def __init__(
        self,
        settings: ScalingSection,
        running: list[ServerProcess],
        start: StartServer,
        load: Callable[[], tuple[bool, int, int]],
        journal: Journal,
        note: Callable[[str], None],
    ) -> None:
        self._most = settings.most
        self._rule = ScaleRule(settings.window_s, settings.wait_share, settings.free_share)
        self._running = running
        self._start = start
        self._load = load
        self._journal = journal
        self._note = note
        self._num_started = 0

    async def run(self) -> None:
        """Follow the rule until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._forget_ended()
            is_waiting, num_slots, num_free = self._load()
            change = self._rule.note(clock(), is_waiting=is_waiting, num_slots=num_slots, num_free=num_free)
            if change == "grow" and len(self._running) < self._most:
                await self._grow()
            elif change == "shrink" and self._running:
                await self._shrink()
            else:
                continue
            servers = tuple(server.url for server in self._running)
            self._journal.event(events.FleetScaled, change=change, servers=servers)
            self._rule.begin(clock())

    async def _grow(self) -> None:
        self._num_started += 1
        name = f"extra-{self._num_started}"
        self._note(f"training waits for samples while all slots are in use: starting {name}")
        try:
            self._running.append(await self._start(name))
        except ConfigError as error:
            self._note(f"{name} could not be started: {error}")

    async def _shrink(self) -> None:
        server = self._running.pop()
        self._note(f"slots are free: stopping {server.name} at {server.url}")
        server.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_LEAVE_S):
                await server.process.wait()
        except TimeoutError:
            self._note(f"{server.name} has not ended within {_LEAVE_S:g} s: killing it")
        finally:
            await server.stop()

    async def _forget_ended(self) -> None:
        for server in [server for server in self._running if server.process.ended is not None]:
            self._running.remove(server)
            self._note(server.how_it_ended())
            await server.stop()
