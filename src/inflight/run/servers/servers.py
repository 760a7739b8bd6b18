"""The servers of a run: those that it starts, attaches to or reads from a file, and those that join by themselves.

This module starts, watches and restarts the run's own servers, and selects the servers of the next publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.base.backoff import Backoff
from inflight.base.tasks import finish_all, run_together
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError, EndpointError, InflightError
from inflight.http.kinds import connect_endpoint
from inflight.launchers import Launcher
from inflight.run.config import RunConfig
from inflight.run.machines.placement import GpuPlacement, place_extra
from inflight.run.machines.processes import ServerProcess, start_joining_server, start_servers
from inflight.run.ranks.messages import Members
from inflight.run.record.journal import Journal
from inflight.run.record.run_directory import RunDirectory
from inflight.run.sampling.actor import Actor
from inflight.run.servers.checks import check_endpoint, read_server_list
from inflight.run.servers.joining import JoinServer
from inflight.run.servers.scaling import Scaling
from inflight.wire import Capabilities

_LOOK_AGAIN_S = 0.5
"""How often the list of servers is read."""
_ASK_S = 2.0
"""How long a newly listed server may take to answer, and the first pause before the next attempt."""
_MAX_PAUSE_S = 30.0
_MAX_FAILURES = 3
"""A server that ends this many times in a row without holding a version is not restarted."""
_RESTART_PAUSE_S = 1.0
"""First pause before a server is restarted."""
REAP_S = 0.5
"""How long a server's process may take to end after its connections have broken."""


@dataclass(slots=True)
class _Line:
    url: str
    backoff: Backoff = field(default_factory=lambda: Backoff(_ASK_S, _MAX_PAUSE_S))
    takes_part: bool = False


@dataclass(eq=False)
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
    """Whether the ranks are training; otherwise they wait for samples."""
    own: list[ServerProcess] = field(default_factory=list)
    extra: list[ServerProcess] = field(default_factory=list)
    """Servers that ``servers.scaling`` has started because training waited, and that have joined."""
    scaling: Scaling | None = None
    run_id: str | None = None
    """Known once `start` is called."""
    taking_part: dict[InferenceEndpoint, str] = field(default_factory=dict)
    """URLs of the endpoints that versions are published to."""
    lines: dict[str, _Line] = field(default_factory=dict)
    """Lines of the list, by endpoint name."""
    departed: list[InferenceEndpoint] = field(default_factory=list)
    """Endpoints that are no longer listed; their connections are closed at the end."""
    has_new_servers: bool = False
    """Whether a server has joined or been restarted since the last publish."""
    num_abandoned: int = 0
    """The number of own servers that will not be restarted."""
    join_server: JoinServer | None = None
    """The HTTP server at which other servers join, with ``servers.attach.join``."""
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while the trainers hold the memory that a server needs to start."""

    def __post_init__(self) -> None:
        self._note_once = functools.cache(self.note)
        self.may_start.set()

    def take_over(self, before: Servers) -> None:
        """Continue with the servers that an earlier incarnation of the run has started."""
        self.own, self.extra = before.own, before.extra

    async def start(self, directory: RunDirectory) -> None:
        """Start the run's own servers, or attach to others. Raises `ConfigError` if one cannot take part.

        Own servers that are already running are kept. Those that have ended are restarted later.
        """
        servers = self.config.servers
        self.run_id = directory.run_id
        running = [server for server in self.own if server.process.ended is None]
        if not servers.attach.urls and not running and not self.launcher.port:
            await finish_all(*(server.stop() for server in self.own))
            self.own = await start_servers(self.config, directory, self.token, self.placements, self.launcher)
        limits = {server.url: server.spec.options.num_slots for server in running or self.own}
        limits |= dict.fromkeys(servers.attach.urls, servers.slots_of_attached)
        self.taking_part = {self._connect(url): url for url in limits}
        capabilities = await run_together(*map(self._check_endpoint, self.taking_part))
        for (endpoint, url), can in zip(self.taking_part.items(), capabilities, strict=True):
            self.actor.add(endpoint, limits[url], can)
        if servers.attach.join is not None:
            self.join_server = JoinServer(servers.attach.join, self.token, directory.run_id)
            at = await self.join_server.open()
            self.note(f"servers may join at {at}")
            if servers.scaling is not None:
                member = servers.scaling.server

                async def start_one(name: str) -> ServerProcess:
                    where = place_extra(name, self.config, member, self.launcher.num_gpus)
                    return await start_joining_server(
                        self.config, member, directory, self.token, where, self.launcher, at
                    )

                self.scaling = Scaling(servers.scaling, self.extra, start_one, self._load, self.journal, self.note)
        if servers.attach.others_may_come:
            await self._wait_for_the_first()

    def watching(self) -> list[Coroutine[Any, Any, None]]:
        """Return calls that keep the run's own servers running and follow the list, until cancelled.

        One of them raises `EndpointError` once all own servers are abandoned and no others can join.
        """
        following = [self._follow()] if self.config.servers.attach.others_may_come else []
        scaling = [] if self.scaling is None else [self.scaling.run()]
        return [*map(self._keep_running, self.own), *following, *scaling]

    def members(self) -> Members:
        """Return the servers that the next publish is for; call it once for each publish.

        If a server has joined or been restarted since the last call, that publish asks every server that was left out.
        """
        members = Members(urls=tuple(self.taking_part.values()), ask_all=self.has_new_servers)
        self.has_new_servers = False
        return members

    def served(self, names: Collection[str]) -> None:
        """Note which of the run's own servers have held a version since their processes began."""
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

    async def stop(self) -> None:
        try:
            await self.disconnect()
        finally:
            await finish_all(*(server.stop() for server in (*self.own, *self.extra)))

    async def disconnect(self) -> None:
        """Close the connections to all servers; those that the run started keep running."""
        if self.join_server is not None:
            await self.join_server.close()
        endpoints = (*self.taking_part, *self.departed)
        await asyncio.gather(*(endpoint.aclose() for endpoint in endpoints), return_exceptions=True)

    def _load(self) -> tuple[bool, int, int]:
        """Return whether training waits, the slots of the servers that take work, and how many of them are free."""
        return not self.is_training(), *self.actor.dispatcher.endpoints.count()

    def _connect(self, url: str) -> InferenceEndpoint:
        timeout_s = self.config.sampling.generate_timeout_s
        return connect_endpoint(url, token=self.token, generate_timeout_s=timeout_s)

    async def _check_endpoint(self, endpoint: InferenceEndpoint) -> Capabilities:
        """Return what an endpoint can do. Raises `ConfigError` if it cannot take part."""
        can = await check_endpoint(self.config, self.vocab_size, endpoint)
        if self.config.train.lora is not None:
            run_id = (await endpoint.weight_version()).run_id
            if run_id not in (None, self.run_id):
                raise ConfigError(
                    f"{endpoint.name} serves weights of run {run_id!r}, but the LoRA of train.lora is for those that "
                    "it was started from: restart the server"
                )
        return can

    async def _keep_running(self, server: ServerProcess) -> None:
        """Restart a server whenever its process ends, until it ends repeatedly without having held a version."""
        backoff, num_failures = Backoff(_RESTART_PAUSE_S, _MAX_PAUSE_S), 0
        while True:
            await server.process.wait()
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
            before = server.url
            with contextlib.suppress(ConfigError):  # its process has ended: the loop reports it
                await server.restart(self.config.run.start_timeout_s, same_port=num_failures == 1)
                await self._moved(before, server)
                self.note(f"{server.name} was restarted and takes part after the next update")
                server.is_end_reported = False
                self.has_new_servers = True
        self.note(
            f"{server.name} will not be restarted: it ended {_MAX_FAILURES} times in a row before it held a version"
        )
        self.num_abandoned += 1
        if self.num_abandoned == len(self.own) and not self.config.servers.attach.others_may_come:
            raise nobody_left(self.actor)

    async def _moved(self, before: str, server: ServerProcess) -> None:
        """Let a restarted server take part at its new address instead of the old one. Raises `ConfigError`."""
        if server.url in self.taking_part.values():
            return
        endpoint = self._connect(server.url)
        can = await self._check_endpoint(endpoint)
        for old in [old for old, url in self.taking_part.items() if url == before]:
            self.actor.retire(old.name, functools.partial(self._left, old.name))
        self.taking_part[endpoint] = server.url
        self.actor.add(endpoint, server.spec.options.num_slots, can)

    # ----------------------------------------------------------------------------------------- servers of the list

    async def _wait_for_the_first(self) -> None:
        """Let the listed servers take part, and wait for one of them if no server takes part yet."""
        timeout_s = self.config.run.start_timeout_s
        deadline = time.monotonic() + timeout_s
        await self._look()
        while not self.taking_part:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no server of {self._where} could take part within {timeout_s:g} s; raise run.start_timeout_s to "
                    "wait longer"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)
            await self._look()

    @property
    def _where(self) -> str:
        """The settings from which other servers may join, for messages."""
        attach = self.config.servers.attach
        settings = {"urls_file": attach.urls_file, "join": attach.join}
        return " or ".join(f"servers.attach.{key} {str(it)!r}" for key, it in settings.items() if it is not None)

    def _listed(self) -> dict[str, str] | None:
        """Return the URLs of the file and of those that joined, by endpoint name; None if the file is unreadable."""
        listed: dict[str, str] | None = {}
        if self.config.servers.attach.urls_file is not None:
            listed, problems = read_server_list(self.config.servers.attach.urls_file)
            for problem in problems:
                self._note_once(problem)
        if listed is not None and self.join_server is not None:
            listed |= self.join_server.listed()
        return listed

    async def _follow(self) -> None:
        while True:
            for name in await self._look():
                self.note(f"{name} joins with the next update")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _look(self) -> list[str]:
        """Retire servers that are no longer listed, contact new ones, and return the names of those that have joined.

        A server that does not answer or cannot take part is tried again later. An unreadable file changes nothing.
        """
        listed = self._listed()
        if listed is None:
            return []
        for name in self.lines.keys() - listed.keys():
            if self.lines.pop(name).takes_part:
                hands_on = self.join_server is not None and self.join_server.hands_on(name)
                how = "hands on what it has sampled and leaves" if hands_on else "leaves once its groups have ended"
                self.note(f"{name} is no longer listed: it {how}")
                self.actor.retire(name, functools.partial(self._left, name), hands_on=hands_on)
        present = {endpoint.name for endpoint in self.taking_part}  # includes those that are leaving
        for name in [name for name in listed if name not in present]:
            self.lines.setdefault(name, _Line(listed[name]))
        now = time.monotonic()
        due = [line for line in self.lines.values() if not line.takes_part and line.backoff.is_due(now)]
        came = await run_together(*(self._ask(line) for line in due))
        return [name for name in came if name is not None]

    async def _ask(self, line: _Line) -> str | None:
        """Let the server of a line take part and return its name; None if it does not answer or cannot."""
        endpoint = self._connect(line.url)
        try:
            async with asyncio.timeout(_ASK_S):
                can = await self._check_endpoint(endpoint)
        except (TimeoutError, InflightError) as error:
            await endpoint.aclose()
            why = str(error) or f"{endpoint.name}: did not answer within {_ASK_S:g} s"
            self._note_once(f"a server of {self._where} cannot take part yet: {why}")
            line.backoff.next(time.monotonic())
            return None
        line.takes_part = self.has_new_servers = True
        self.taking_part[endpoint] = line.url
        self.actor.add(endpoint, self.config.servers.slots_of_joining, can)
        return endpoint.name

    def _left(self, name: str) -> None:
        """Remove a retired server that has finished its groups."""
        for endpoint in [endpoint for endpoint in self.taking_part if endpoint.name == name]:
            del self.taking_part[endpoint]
            self.departed.append(endpoint)
        self.journal.fleet(left=[name])


def nobody_left(actor: Actor) -> EndpointError:
    """Return the error that states how every endpoint was lost."""
    causes = "; ".join(f"{lost}: {why}" for lost, why in actor.dispatcher.endpoints.lost.items())
    return EndpointError(f"no inference server is left ({causes})")
