"""The servers of a run, whether the run starts them, attaches to them, reads them from a file, or lets them join.

This module starts, watches and restarts the run's own servers, and selects the servers of the next publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.base.backoff import Backoff
from inflight.base.tasks import finish_all, run_together
from inflight.errors import ConfigError, EndpointError
from inflight.http.tls import server_tls
from inflight.launchers import Launcher
from inflight.run.config import RunConfig
from inflight.run.machines.placement import GpuPlacement, place_extra
from inflight.run.machines.processes import ServerProcess, start_joining_server, start_servers
from inflight.run.ranks.messages import Members
from inflight.run.record.journal import Journal
from inflight.run.record.run_directory import RunDirectory
from inflight.run.sampling.actor import Actor
from inflight.run.servers.joining import JoinServer
from inflight.run.servers.listed import ListedServers
from inflight.run.servers.membership import FleetMembership
from inflight.run.servers.scaling import Scaling

_MAX_PAUSE_S = 30.0
_MAX_FAILURES = 3
"""A server that ends this many times in a row without holding a version is not restarted."""
_RESTART_PAUSE_S = 1.0
"""First pause before a server is restarted."""
REAP_S = 0.5
"""How long a server's process may take to end after its connections have broken."""


@dataclass(eq=False, kw_only=True)
class Servers:
    """The fleet of one run. Every endpoint is added to ``actor``, and ``note`` shows messages to the user."""

    config: RunConfig
    token: str
    vocab_size: int
    actor: Actor
    journal: Journal
    note: Callable[[str], None]
    placements: Sequence[GpuPlacement]
    """Name and GPUs of each server that the run starts."""
    launcher: Launcher
    is_training: Callable[[], bool]
    """Returns whether the ranks are training; otherwise they wait for samples."""
    own: list[ServerProcess] = field(default_factory=list)
    extra: list[ServerProcess] = field(default_factory=list)
    """Servers that ``servers.scaling`` has started because training waited, and that have joined."""
    scaling: Scaling | None = None
    num_abandoned: int = 0
    """The number of own servers that will not be restarted."""
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while the trainers hold the memory that a server needs to start."""
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by `kill`; from then on, servers are not restarted, and how they end is not reported."""

    def __post_init__(self) -> None:
        self.may_start.set()
        self.membership = FleetMembership(
            config=self.config, token=self.token, vocab_size=self.vocab_size, actor=self.actor, journal=self.journal
        )
        self.listed = ListedServers(self.config, self.membership, self.note)

    def take_over(self, before: Servers) -> None:
        """Continue with the servers that an earlier incarnation of the run has started."""
        self.own, self.extra = before.own, before.extra

    async def start(self, directory: RunDirectory) -> None:
        """Start the run's own servers, or attach to others. Raises `ConfigError` if one cannot take part.

        Own servers that are already running are kept. Those that have ended are restarted later.
        """
        servers = self.config.servers
        self.membership.run_id = directory.run_id
        running = [server for server in self.own if server.process.ended is None]
        if not servers.attach.urls and not running and not self.launcher.port:
            await finish_all(*(server.stop() for server in self.own))
            self.own = await start_servers(self.config, directory, self.token, self.placements, self.launcher)
        limits = {server.url: server.spec.options.num_slots for server in running or self.own}
        await self.membership.attach(limits | dict.fromkeys(servers.attach.urls, servers.slots_of_attached))
        if servers.attach.join is not None:
            files = servers.attach.tls
            tls = None if files is None else server_tls(files.certificate, files.key, files.client_ca)
            at = await self.listed.open(JoinServer(servers.attach.join, self.token, directory.run_id, tls=tls))
            self.note(f"servers may join at {at}")
            self.scaling = self._scaling(directory, at)
        if servers.attach.others_may_come:
            await self.listed.wait_for_the_first()

    def _scaling(self, directory: RunDirectory, join_url: str) -> Scaling | None:
        """Return the scaling of servers that join at a URL; None without ``servers.scaling``."""
        settings = self.config.servers.scaling
        if settings is None:
            return None
        member = settings.server

        async def start_one(name: str) -> ServerProcess:
            where = place_extra(name, self.config, member, self.launcher.num_gpus)
            return await start_joining_server(
                self.config, member, directory, self.token, where, self.launcher, join_url
            )

        def note(text: str) -> None:
            if not self.killed.is_set():
                self.note(text)

        return Scaling(settings, self.extra, start_one, self._load, self.journal, note)

    def watching(self) -> list[Coroutine[Any, Any, None]]:
        """Return coroutines that keep the run's own servers running and follow the list until cancelled.

        One of them raises `EndpointError` once all own servers are abandoned and no others can join.
        """
        following = [self.listed.follow()] if self.config.servers.attach.others_may_come else []
        scaling = [] if self.scaling is None else [self.scaling.run()]
        return [*map(self._keep_running, self.own), *following, *scaling]

    def members(self) -> Members:
        """Return the servers of the next publish; call it once for each publish.

        If a server has joined or been restarted since the last call, this publish retries every server that was left
        out.
        """
        return self.membership.take_members()

    def served(self, names: Collection[str]) -> None:
        """Record which of the run's own servers have held a version since their processes began."""
        for server in self.own:
            server.has_served |= server.url in names

    async def report_ended_servers(self) -> None:
        """Report how the run's own servers ended, after waiting briefly: connections break before a process ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                await run_together(*(server.process.wait() for server in self.own))
        for server in self.own:
            if server.process.ended is not None and not server.is_end_reported:
                self.note(server.how_it_ended())

    def kill(self) -> None:
        """Kill the servers that the run has started."""
        self.killed.set()
        for server in (*self.own, *self.extra):
            server.process.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        try:
            await self.disconnect()
        finally:
            await finish_all(*(server.stop() for server in (*self.own, *self.extra)))

    async def disconnect(self) -> None:
        """Close the connections to all servers; those that the run started keep running."""
        await self.listed.close()
        await self.membership.disconnect()

    def _load(self) -> tuple[bool, int, int]:
        """Return whether training waits, the slots of the servers that take work, and how many of them are free."""
        return not self.is_training(), *self.actor.dispatcher.endpoints.count()

    async def _keep_running(self, server: ServerProcess) -> None:
        """Restart a server whenever its process ends, until it ends repeatedly without having held a version."""
        backoff, num_failures = Backoff(_RESTART_PAUSE_S, _MAX_PAUSE_S), 0
        while True:
            await server.process.wait()
            if self.killed.is_set():
                return
            if server.has_served:
                backoff.reset()
                num_failures = 0
            num_failures += 1
            server.has_served = False
            how = server.how_it_ended()
            self.note(how)
            server.is_end_reported = True
            self.actor.lose(server.url, how)
            if num_failures >= _MAX_FAILURES:
                break
            await asyncio.sleep(backoff.next(time.monotonic()))
            await self.may_start.wait()
            if self.killed.is_set():
                return
            before = server.url
            with contextlib.suppress(ConfigError):  # its process has ended, which the loop reports
                await server.restart(self.config.run.start_timeout_s, same_port=num_failures == 1)
                await self._move_endpoint(before, server)
                self.note(f"{server.name} was restarted and takes part after the next update")
                server.is_end_reported = False
                self.membership.has_new_servers = True
        self.note(
            f"{server.name} will not be restarted: it ended {_MAX_FAILURES} times in a row before it held a version"
        )
        self.num_abandoned += 1
        if self.num_abandoned == len(self.own) and not self.config.servers.attach.others_may_come:
            raise no_server_left(self.actor)

    async def _move_endpoint(self, before: str, server: ServerProcess) -> None:
        """Replace the old address of a restarted server with its new one. Raises `ConfigError`."""
        if server.url in self.membership.taking_part.values():
            return
        endpoint = self.membership.connect(server.url)
        can = await self.membership.check(endpoint)
        for old in [old for old, url in self.membership.taking_part.items() if url == before]:
            self.membership.retire(old.name)
        self.membership.add(endpoint, server.url, server.spec.options.num_slots, can)


def no_server_left(actor: Actor, news: Collection[str] = ()) -> EndpointError:
    """Return the error that states how every endpoint was lost, with later ``news`` about the endpoints."""
    causes = "; ".join(f"{lost}: {why}" for lost, why in actor.dispatcher.endpoints.lost.items())
    since = f". Since then: {'; '.join(news)}" if news else ""
    return EndpointError(f"no inference server is left ({causes}){since}")
