"""The servers of a run: those that it starts, those that it attaches to, and those that a file lists.

Starts them, watches them, starts its own again, and says who joins and who leaves with the next publish. Knows nothing
of how versions reach them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from inflight.contracts import InferenceEndpoint
from inflight.engines.kinds import connect_endpoint
from inflight.errors import ConfigError, EndpointError
from inflight.pipeline.actor import Actor
from inflight.pipeline.config import RunConfig
from inflight.pipeline.fleet import connect_fleet, sequence_limits
from inflight.pipeline.journal import Journal
from inflight.pipeline.messages import Members
from inflight.pipeline.processes import Server, start_servers
from inflight.pipeline.run_directory import RunDirectory
from inflight.pipeline.server_list import Arrival, ServerList

_LOOK_AGAIN_S = 0.5
"""Pause between two looks at the list of servers."""
_MAX_FAILURES = 3
"""A server that ended so often before it held a version is not started again."""
_RESTART_PAUSE_S = 1.0
"""Pause before a server is started again; it grows by as much with each failure."""
REAP_S = 0.5
"""How long a server's process may take to end after its connections broke."""


@dataclass(eq=False)
class Servers:
    """The fleet of one run. ``actor`` learns of every endpoint, and ``note`` takes what a person should know."""

    config: RunConfig
    token: str
    vocab_size: int
    actor: Actor
    journal: Journal
    note: Callable[[str], None]
    own: list[Server] = field(default_factory=list)
    urls: tuple[str, ...] = ()
    """Of those that take part from the start."""
    endpoints: list[InferenceEndpoint] = field(default_factory=list)
    departed: list[InferenceEndpoint] = field(default_factory=list)
    """Those that are listed no more; their connections are closed at the end."""
    listed: ServerList | None = None
    next_members: Members = field(default_factory=Members)
    """Who joins and leaves with the next publish."""
    num_given_up: int = 0
    """Own servers that are not started again."""

    async def start(self, directory: RunDirectory) -> None:
        """Start the run's own servers or attach to others. Raises `ConfigError` if one cannot take part."""
        config = self.config
        if not config.servers.urls:
            self.own = await start_servers(config, directory, self.token)
        self.urls = config.servers.urls or tuple(server.url for server in self.own)
        limits = [server.max_concurrent for server in self.own] or [config.servers.max_concurrent] * len(self.urls)
        self.endpoints = connect_fleet(config, self.urls, self.token)
        wanted = dict(zip(self.endpoints, limits, strict=True))
        for endpoint, limit in (await sequence_limits(config, self.vocab_size, wanted)).items():
            self.actor.add(endpoint, limit)
        if config.servers.urls_file is not None:
            names = [endpoint.name for endpoint in self.endpoints]
            self.listed = ServerList(config.servers.urls_file, config, self.vocab_size, self.token, names, self.note)
            for arrival in await self._first_arrivals(self.listed):
                self._add(arrival)
                self.urls = (*self.urls, arrival.url)

    def watching(self) -> list[Coroutine[Any, Any, None]]:
        """Return calls that keep the run's own servers running and follow the list of others, until cancelled.

        One of them raises `EndpointError` once all own servers are given up and no other may come.
        """
        calls = [self._keep_running(server) for server in self.own]
        return calls if self.listed is None else [*calls, self._follow(self.listed)]

    def members(self) -> Members:
        """Return who joins, leaves and may be back with the publish that is asked for now."""
        members, self.next_members = self.next_members, Members()
        return members

    def served(self, names: Collection[str]) -> None:
        """Note who holds a version."""
        for server in self.own:
            server.has_served |= server.url in names

    async def tell_dead(self) -> None:
        """Say how those of our servers ended that did: a broken connection is seen before the end of its process."""
        waiting = [asyncio.ensure_future(server.process.wait()) for server in self.own]
        if waiting:
            _, pending = await asyncio.wait(waiting, timeout=REAP_S)
            for task in pending:
                task.cancel()
        for server in self.own:
            if server.process.returncode is not None and not server.end_is_told:
                self.note(server.how_it_ended())

    async def stop(self) -> None:
        """Close the connections and end the run's own servers."""
        endpoints = (*self.endpoints, *self.departed)
        await asyncio.gather(*(endpoint.aclose() for endpoint in endpoints), return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self.own))

    # ----------------------------------------------------------------------------------------------- our own servers

    async def _keep_running(self, server: Server) -> None:
        """Start a server again whenever its process ends, until it has ended several times and held no version."""
        num_failures = 0
        while True:
            await server.process.wait()
            num_failures = 1 if server.has_served else num_failures + 1
            server.has_served = False
            how = server.how_it_ended()
            self.note(how)
            server.end_is_told = True
            self.actor.lose(server.url, how)
            if num_failures >= _MAX_FAILURES:
                break
            await asyncio.sleep(_RESTART_PAUSE_S * num_failures)
            with contextlib.suppress(ConfigError):  # its process has ended, which is told at the beginning of the loop
                await server.restart(self.config.run.start_timeout_s)
                self.note(f"{server.name} was started again, and takes part after the next update")
                server.end_is_told = False
                self.next_members = self.next_members.model_copy(update={"ask_all": True})
        self.note(f"{server.name} is given up: it ended again and again before it held a version")
        self.num_given_up += 1
        if self.num_given_up == len(self.own) and self.listed is None:
            raise nobody_left(self.actor)

    # ----------------------------------------------------------------------------------------- servers of the list

    def _add(self, arrival: Arrival) -> None:
        self.endpoints.append(arrival.endpoint)
        self.actor.add(arrival.endpoint, arrival.max_concurrent)

    async def _first_arrivals(self, servers: ServerList) -> list[Arrival]:
        """Return who of the list takes part from the start; waits for the first one if there is nobody else."""
        deadline = time.monotonic() + self.config.run.start_timeout_s
        while True:
            arrivals, _ = await servers.look()
            if arrivals or self.endpoints:
                return arrivals
            if time.monotonic() > deadline:
                path = str(self.config.servers.urls_file)
                raise ConfigError(
                    f"no server of servers.urls_file {path!r} could take part within "
                    f"{self.config.run.start_timeout_s:g} s; run.start_timeout_s is the limit"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _follow(self, servers: ServerList) -> None:
        """Let servers join and leave as the list says, with the publish that comes next."""
        while True:
            arrivals, left = await servers.look()
            for arrival in arrivals:
                self._add(arrival)
                self.next_members = self.next_members.model_copy(
                    update={"join": (*self.next_members.join, arrival.url)}
                )
                self.note(f"{arrival.endpoint.name} joins with the next update")
            for name in left:
                self.note(f"{name} is listed no more: it finishes what it runs and leaves")
                self.actor.retire(name, functools.partial(self._left, servers, name))
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _left(self, servers: ServerList, name: str) -> None:
        """A server that is listed no more has finished what it ran."""
        join = tuple(url for url in self.next_members.join if connect_endpoint(url).name != name)
        self.next_members = self.next_members.model_copy(
            update={"join": join, "leave": (*self.next_members.leave, name)}
        )
        self.departed += [endpoint for endpoint in self.endpoints if endpoint.name == name]
        self.endpoints = [endpoint for endpoint in self.endpoints if endpoint.name != name]
        servers.forget(name)
        now, version = time.time(), self.journal.version
        nothing: dict[str, list[str]] = {"restored": [], "joined": [], "removed": [], "changes": []}
        self.journal.event("fleet", now, now, version=version, left=[name], **nothing)


def nobody_left(actor: Actor) -> EndpointError:
    """Return the error that says how every endpoint was lost."""
    causes = "; ".join(f"{lost}: {why}" for lost, why in actor.lost.items())
    return EndpointError(f"no inference server is left ({causes})")
