"""The server and trainer processes of a run, which launchers start and watch.

When the run dies, the standard input of each process is closed, which ends the process. The output of a process goes
to a file; errors quote the end of that file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from inflight.base.openmp import WAIT_ASLEEP
from inflight.base.tasks import add_failures_to, finish_all, result_unless, run_together
from inflight.errors import ConfigError, WorkerDiedError
from inflight.http.server_spec import FollowOptions, JoinOptions, ListenOptions, ServerSpec
from inflight.http.tokens import TOKEN_VARIABLE
from inflight.launchers import Launched, Launcher, Program
from inflight.run.config import RunConfig
from inflight.run.fleet_config import ServerGroupSection
from inflight.run.machines.placement import GpuPlacement
from inflight.run.machines.server_specs import server_spec
from inflight.run.ranks.channel import RunChannel
from inflight.run.ranks.handshake import RUN_VARIABLE, Meeting
from inflight.run.ranks.messages import Here
from inflight.run.record.run_directory import RunDirectory
from inflight.run.servers.leases import reconnect_leased_server

_POLL_S = 0.05
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 33), "MALLOC_TRIM_THRESHOLD_": str(1 << 35)}
"""Settings of glibc's allocator with which a process keeps the memory that it frees.

By default, glibc returns the memory of every large tensor to the system, which zeroes memory before it hands it out
again: on a CPU, this takes a tenth of the trainer's time."""
CPU_RANK_VARIABLES = _KEEP_MEMORY | WAIT_ASLEEP
"""Environment variables of trainer ranks that compute on a CPU."""
STOP_S = 10.0
"""How long a process may take to end after its standard input is closed."""
_STOP_ENGINE_S = 30.0
"""The same limit, for a server that must first stop its engine's server."""
NUM_LINES = 24
"""The number of lines of a traceback that an error quotes."""


@dataclass(slots=True, eq=False)
class Process:
    """One process of the run, and the program that it was started from."""

    name: str
    process: Launched
    log: Path
    stop_s: float = field(default=STOP_S, kw_only=True)

    def how_it_ended(self) -> str:
        return f"{self.name} {self.process.ended or 'has not ended'}{self.end_of_log()}"

    def end_of_log(self) -> str:
        """Return the last lines of an ended process's log, to append to a message; empty if there are none."""
        lines = self.process.ended.lines if self.process.ended is not None else ()
        return f"; the end of {self.log}:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""

    async def stop(self) -> None:
        """Close the process's standard input and wait for it to end; kill it if it takes too long."""
        await self.process.stop(self.stop_s)


@dataclass(slots=True, eq=False)
class ServerProcess(Process):
    """An inference server that this run started; ``url`` is empty until the server is ready."""

    spec: ServerSpec
    program: Program
    launcher: Launcher
    url: str = ""
    is_ready: bool = False
    """Whether the server has reported its address since it was last started."""
    is_leased: bool = False
    """Whether the server keeps running when its standard input is closed."""
    has_served: bool = False
    """Whether the server has held a version since it was last started."""
    is_end_reported: bool = False
    """Whether the user has been notified of how the server ended; reset when it is restarted."""

    async def stop(self) -> None:
        """Stop the server like any process, but with a signal if closing its input would not end it.

        A server that is still starting does not watch its input yet.
        """
        if not self.is_ready or self.is_leased:
            self.process.send_signal(signal.SIGTERM)
        await Process.stop(self)

    async def restart(self, timeout_s: float, *, same_port: bool) -> None:
        """Restart the server after its process has ended, and wait until it is ready; ``url`` is then its new address.

        If it does not become ready, its process is ended and `ConfigError` is raised, with the end of its log.
        """
        await Process.stop(self)  # it may be restarted on another host
        port = urlsplit(self.url).port if same_port and self.url else 0
        program = replace(self.program, command=_command(self.spec, port or 0), appends=True)
        self.is_ready = False
        (self.process,) = await self.launcher.start([program], timeout_s)
        await self.wait_until_ready(timeout_s)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once the server answers at ``url``.

        If it ends first or does not answer in time, it is stopped and `ConfigError` is raised, with the end of its log.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_for_url(self)
        except BaseException as error:
            with add_failures_to(error):
                await self.stop()
            if isinstance(error, TimeoutError):
                raise ConfigError(f"{self.name} did not answer within {timeout_s:g} s{self.end_of_log()}") from error
            raise


@dataclass(slots=True, eq=False)
class Rank(Process):
    """A trainer rank, which connects to the run."""

    rank: int
    meeting: Meeting
    doing: str = "starting"
    """The activity that the rank last reported; empty between requests."""
    _channel: RunChannel | None = None

    async def channel(self) -> RunChannel:
        """Return the channel to the rank once it has connected. Raises `WorkerDiedError` if it ends before that."""
        if self._channel is None:
            early = WorkerDiedError(f"trainer rank {self.rank} ended before it connected to the run")
            self._channel = await result_unless(self.meeting.channel(self.rank), self.process.wait(), lambda: early)
        return self._channel

    async def stop(self) -> None:
        """Stop the rank like any process, but with a signal if it has not connected to the run yet.

        Until then, it neither watches its input nor notices that the run has ended.
        """
        if self._channel is None:
            self.process.send_signal(signal.SIGTERM)
        await Process.stop(self)

    async def rendezvous(self) -> str:
        """Return the address that this rank reports for the other ranks to connect to; empty for a single rank."""
        said = await (await self.channel()).receive()
        assert isinstance(said, Here), "the first message of a rank must be Here"
        return said.rendezvous

    def how_it_ended(self) -> str:
        """Return what the rank was doing and how it ended, with the last lines of the rank's output."""
        return self.during(Process.how_it_ended(self))

    def during(self, what: str) -> str:
        return f"while {self.doing}: {what}" if self.doing else what


async def start_servers(
    config: RunConfig, directory: RunDirectory, token: str, places: Sequence[GpuPlacement], launcher: Launcher
) -> list[ServerProcess]:
    """Start all servers together and wait until they are ready. With ``pull``, they load stored versions.

    If a server does not become ready, all are stopped and `ConfigError` is raised, with the end of its log.
    """
    timeout_s = config.run.start_timeout_s
    servers: dict[str, ServerProcess] = {}

    async def start(member: ServerGroupSection, place: GpuPlacement) -> None:
        spec = _spec(config, member, directory, place.name)
        program = _program(config, spec, member, directory, token, place)
        process: Launched | None = None
        if config.servers.lease_s and program.ready_file is not None:
            process = await reconnect_leased_server(program.ready_file, token, directory.run_id)
        # Each one separately, because it may be restarted on another host without the others.
        servers[place.name] = server = await _launch_or_reuse(member, spec, program, launcher, timeout_s, process)
        server.is_leased = config.servers.lease_s > 0
        await _wait_for_url(server)

    try:
        async with asyncio.timeout(timeout_s):
            await run_together(*(start(*it) for it in zip(config.servers.started, places, strict=True)))
    except BaseException as error:
        waiting = [it.name for it in places if it.name not in servers or not servers[it.name].is_ready]
        with add_failures_to(error):
            await finish_all(*(server.stop() for server in servers.values()))
        if isinstance(error, TimeoutError):
            logs = "".join(servers[name].end_of_log() for name in waiting if name in servers)
            raise ConfigError(
                f"{', '.join(waiting)} did not answer within {timeout_s:g} s; raise run.start_timeout_s to wait "
                f"longer{logs}"
            ) from error
        raise
    return [servers[place.name] for place in places]


async def start_joining_server(
    config: RunConfig,
    member: ServerGroupSection,
    directory: RunDirectory,
    token: str,
    place: GpuPlacement,
    launcher: Launcher,
    at: str,
) -> ServerProcess:
    """Start a server that joins the run at the URL ``at``, and wait until it is ready.

    If it does not become ready, it is stopped and `ConfigError` is raised, with the end of its log.
    """
    spec = replace(_spec(config, member, directory, place.name), joining=JoinOptions(at))
    program = _program(config, spec, member, directory, token, place)
    timeout_s = config.run.start_timeout_s
    server = await _launch_or_reuse(member, spec, program, launcher, timeout_s, None)
    await server.wait_until_ready(timeout_s)
    return server


async def _launch_or_reuse(
    member: ServerGroupSection,
    spec: ServerSpec,
    program: Program,
    launcher: Launcher,
    timeout_s: float,
    process: Launched | None,
) -> ServerProcess:
    """Return the server of a process that is already running, or else start one."""
    if process is None:
        (process,) = await launcher.start([program], timeout_s)
    stop_s = STOP_S if member.kind.runs_in_process else _STOP_ENGINE_S
    return ServerProcess(program.name, process, program.log, spec, program, launcher, stop_s=stop_s)


def _spec(config: RunConfig, member: ServerGroupSection, directory: RunDirectory, name: str) -> ServerSpec:
    """Return the specification of a server with this name, on any free port."""
    spec = server_spec(config, member)
    listen = ListenOptions(
        port=0,
        ready_file=(directory.logs / f"{name}.json").absolute(),
        exit_with_stdin=True,
        lease_s=config.servers.lease_s,
    )
    if config.updates.followed is not None:
        spec = replace(spec, following=FollowOptions(str(config.updates.followed), directory.run_id))
    if not member.kind.runs_in_process:
        log = (directory.logs / f"{name}.engine.log").absolute()
        spec = replace(spec, process=replace(spec.process, log=log))
    return replace(spec, listen=listen)


def _program(
    config: RunConfig,
    spec: ServerSpec,
    member: ServerGroupSection,
    directory: RunDirectory,
    token: str,
    place: GpuPlacement,
) -> Program:
    environment = {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": str(config.servers.threads)}
    return Program(
        place.name,
        _command(spec, 0),
        environment | place.environment,
        directory.logs / f"{place.name}.log",
        directory.logs / f"{place.name}.json",
        num_cpus=config.servers.threads,
        num_gpus=place.num_gpus,
        place=member.place,
        # A process that holds the lock is ended when the run is resumed.
        inherits=() if spec.listen.lease_s else (directory.lock,),
    )


def _command(spec: ServerSpec, port: int) -> list[str]:
    spec = replace(spec, listen=replace(spec.listen, port=port))
    return [sys.executable, "-m", "inflight", "serve", *spec.to_argv()]


async def _wait_for_url(server: ServerProcess) -> None:
    """Return once a server has reported its address. Raises `ConfigError` if its process ends before that."""
    while (text := await server.process.ready()) is None:
        if server.process.ended is not None:
            raise ConfigError(server.how_it_ended())
        await asyncio.sleep(_POLL_S)
    server.url = json.loads(text)["url"]
    server.is_ready = True


def unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of ``variables`` that are not already set in the environment."""
    return {name: value for name, value in variables.items() if name not in os.environ}


async def start_ranks(
    config: RunConfig, logs: Path, token: str, lock: int | None, places: Sequence[GpuPlacement], launcher: Launcher
) -> list[Rank]:
    """Start all trainer ranks, which connect to the run and wait for their first request."""
    meeting = await Meeting.open(launcher.address, token, len(places), launcher.port)
    environment = {
        TOKEN_VARIABLE: token,
        RUN_VARIABLE: meeting.where,
        "OMP_NUM_THREADS": str(config.train.threads),
        "WORLD_SIZE": str(len(places)),
    }
    programs = [
        Program(
            place.name,
            [sys.executable, "-m", "inflight.run.ranks.rank"],
            # A rank that sees only its own GPU has local rank 0.
            environment
            | ({} if place.has_gpu else unless_set(CPU_RANK_VARIABLES))
            | {"RANK": str(rank), "LOCAL_RANK": "0" if place.has_gpu else str(rank)}
            | place.environment,
            logs / f"{place.name}.log",
            num_cpus=config.train.threads,
            num_gpus=place.num_gpus,
            place=config.train.place,
            inherits=() if lock is None else (lock,),
        )
        for rank, place in enumerate(places)
    ]
    try:
        launched = await launcher.start(programs, config.run.start_timeout_s)
    except BaseException:
        meeting.close()
        raise
    return [
        Rank(program.name, process, program.log, rank, meeting)
        for rank, (program, process) in enumerate(zip(programs, launched, strict=True))
    ]
