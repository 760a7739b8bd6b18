"""Server and trainer processes of a run: what is started, and when each is ready. Launchers start and watch them.

Each ends by itself when the run dies, because its standard input ends. Output goes to files; errors quote its end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from inflight.base.tasks import result_unless, run_together
from inflight.errors import ConfigError, WorkerDiedError
from inflight.http.kinds import load_engine_kind
from inflight.http.tokens import TOKEN_VARIABLE
from inflight.launchers import Launched, Launcher, Program
from inflight.run.config import FleetMember, RunConfig
from inflight.run.machines.placement import Place
from inflight.run.ranks.channel import RunChannel
from inflight.run.ranks.handshake import RUN_VARIABLE, Meeting
from inflight.run.ranks.messages import Here
from inflight.run.record.run_directory import RunDirectory
from inflight.run.servers.leases import taken_over

_POLL_S = 0.05
STOP_S = 10.0
"""How long a process may take to end once its standard input has ended."""
_STOP_ENGINE_S = 30.0
"""The same for a server that must first stop an engine's own server."""
NUM_LINES = 24
"""How many lines of a traceback an error quotes."""


@dataclass(slots=True, eq=False)
class Process:
    """One process of the run, and what it was started from."""

    name: str
    process: Launched
    log: Path
    stop_s: float = field(default=STOP_S, kw_only=True)

    def how_it_ended(self) -> str:
        ended = self.process.ended
        quoted = "\n".join(f"    {line}" for line in ended.lines) if ended is not None else ""
        how = f"{self.name} {ended or 'has not ended'}"
        return f"{how}; the end of {self.log}:\n{quoted}" if quoted else how

    async def stop(self) -> None:
        """End its standard input and wait; kill it if it takes too long."""
        await self.process.stop(self.stop_s)


@dataclass(slots=True, eq=False)
class Server(Process):
    """An inference server that this run started; ``url`` is empty until the server is ready."""

    max_concurrent: int
    program: Program
    launcher: Launcher
    url: str = ""
    is_ready: bool = False
    """Since it was last started."""
    is_leased: bool = False
    """Whether it goes on when its standard input ends."""
    has_served: bool = False
    """Whether it has held a version since it was last started."""
    end_is_told: bool = False
    """Whether the user was told how it ended; reset when it is started again."""

    async def stop(self) -> None:
        """Stop it like any process, but with a signal where the end of its input would not end it.

        While it is starting it does not watch its input yet.
        """
        if not self.is_ready or self.is_leased:
            self.process.send_signal(signal.SIGTERM)
        await Process.stop(self)

    async def restart(self, timeout_s: float, *, same_port: bool) -> None:
        """Start it again after its process has ended, and wait until it is ready; then ``url`` is where it is now.

        Raises `ConfigError` with the end of its log if it does not become ready; the process has ended then.
        """
        await Process.stop(self)  # gives up where it ran
        port = urlsplit(self.url).port if same_port and self.url else 0
        program = replace(self.program, command=[*self.program.command, "--port", str(port)], appends=True)
        self.is_ready = False
        (self.process,) = await self.launcher.start([program], timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_until_ready(self)
        except TimeoutError as error:
            raise ConfigError(f"{self.name} did not answer within {timeout_s:g} s") from error
        finally:
            if not self.is_ready:
                await self.stop()


@dataclass(slots=True, eq=False)
class Rank(Process):
    """A trainer rank, which meets the run by itself."""

    rank: int
    meeting: Meeting
    doing: str = "starting"
    """What it last reported to be doing; empty between requests."""
    _channel: RunChannel | None = None

    async def channel(self) -> RunChannel:
        """Return the channel to it, once it is there. Raises `WorkerDiedError` if it ends before that."""
        if self._channel is None:
            early = WorkerDiedError(f"trainer rank {self.rank} ended before it had met the run")
            self._channel = await result_unless(self.meeting.channel(self.rank), self.process.wait(), lambda: early)
        return self._channel

    async def rendezvous(self) -> str:
        """Return where the other ranks meet this one, as it says when it comes; empty for a single rank."""
        said = await (await self.channel()).receive()
        assert isinstance(said, Here), "a rank first says that it is here"
        return said.rendezvous

    def how_it_ended(self) -> str:
        """Return what it was doing and how it ended, with the last lines of its output."""
        return self.during(Process.how_it_ended(self))

    def during(self, what: str) -> str:
        return f"while {self.doing}: {what}" if self.doing else what


async def start_servers(
    config: RunConfig, directory: RunDirectory, token: str, places: Sequence[Place], launcher: Launcher
) -> list[Server]:
    """Start all servers together and wait until they are ready. With updates ``pull`` they follow the run's store.

    Raises `ConfigError` with the end of a server's log; no server is left running then.
    """
    members = [member for member in config.servers.members for _ in range(member.count)]
    timeout_s = config.run.start_timeout_s
    servers: list[Server] = []

    async def start(member: FleetMember, place: Place) -> None:
        program = _server_program(config, member, directory, token, place)
        process: Launched | None = None
        if config.servers.lease_s and program.ready_file is not None:
            process = await taken_over(program.ready_file, token, directory.run_id)
        # Each by itself: it may be started again elsewhere, without the others.
        server = await _launched(member, program, launcher, timeout_s, process)
        server.is_leased = config.servers.lease_s > 0
        servers.append(server)
        await _wait_until_ready(server)

    try:
        async with asyncio.timeout(timeout_s):
            await run_together(*(start(*it) for it in zip(members, places, strict=True)))
    except BaseException as error:
        await asyncio.gather(*(server.stop() for server in servers))
        if isinstance(error, TimeoutError):
            ready = {server.name for server in servers if server.is_ready}
            waiting = ", ".join(place.name for place in places if place.name not in ready)
            raise ConfigError(
                f"{waiting} did not answer within {timeout_s:g} s; raise run.start_timeout_s to wait longer"
            ) from error
        raise
    return sorted(servers, key=lambda server: [place.name for place in places].index(server.name))


async def start_joining_server(
    config: RunConfig,
    member: FleetMember,
    directory: RunDirectory,
    token: str,
    place: Place,
    launcher: Launcher,
    at: str,
) -> Server:
    """Start a server that joins the run by itself ``at`` its URL, and wait until it is ready.

    Raises `ConfigError` with the end of its log; it is not left running then.
    """
    program = _server_program(config, member, directory, token, place)
    timeout_s = config.run.start_timeout_s
    joining = replace(program, command=[*program.command, "--join", at])
    server = await _launched(member, joining, launcher, timeout_s, None)
    try:
        async with asyncio.timeout(timeout_s):
            await _wait_until_ready(server)
    except TimeoutError as error:
        raise ConfigError(f"{server.name} did not answer within {timeout_s:g} s") from error
    finally:
        if not server.is_ready:
            await server.stop()
    return server


async def _launched(
    member: FleetMember, program: Program, launcher: Launcher, timeout_s: float, process: Launched | None
) -> Server:
    """Return the server of a process, or of a new one."""
    if process is None:
        (process,) = await launcher.start([replace(program, command=[*program.command, "--port", "0"])], timeout_s)
    stop_s = STOP_S if member.engine == "local" else _STOP_ENGINE_S
    return Server(program.name, process, program.log, member.max_concurrent, program, launcher, stop_s=stop_s)


def _server_program(
    config: RunConfig, member: FleetMember, directory: RunDirectory, token: str, place: Place
) -> Program:
    """Return a server without its port."""
    command = [sys.executable, "-m", "inflight", "serve", str(config.model.path)]
    ready_file, lease_s = directory.logs / f"{place.name}.json", config.servers.lease_s
    command += ["--ready-file", str(ready_file.absolute()), "--exit-with-stdin", "--name", config.model.path.name]
    command += ["--lease", f"{lease_s:g}"] if lease_s else []
    command += ["--dtype", config.model.dtype, "--max-concurrent", str(member.max_concurrent)]
    command += ["--threads", str(config.servers.threads)]
    if config.servers.device is not None:
        command += ["--device", config.servers.device]
    if member.compile:
        command.append("--compile")
    if config.servers.updates == "pull":
        command += ["--follow", str(config.servers.directory), "--follow-run", directory.run_id]
    if config.servers.drafts != "off":
        command += ["--drafts", config.servers.drafts]
    if member.engine != "local":
        command += ["--engine", member.engine, "--start-timeout", str(config.run.start_timeout_s)]
        command += ["--log", str((directory.logs / f"{place.name}.engine.log").absolute())]
        released = load_engine_kind(member.engine).release_arguments if config.servers.release_memory else ()
        command += [f"--engine-arg={argument}" for argument in (*released, *member.engine_arguments)]
        command += [] if member.python is None else ["--python", str(member.python)]
    environment = {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": str(config.servers.threads)}
    return Program(
        place.name,
        command,
        environment | place.environment,
        directory.logs / f"{place.name}.log",
        ready_file,
        num_cpus=config.servers.threads,
        num_gpus=place.num_gpus,
        place=member.place,
        inherits=() if lease_s else (directory.lock,),  # who holds it is not left running when the run is resumed
    )


async def _wait_until_ready(server: Server) -> None:
    while (text := await server.process.ready()) is None:
        if server.process.ended is not None:
            raise ConfigError(server.how_it_ended())
        await asyncio.sleep(_POLL_S)
    server.url = json.loads(text)["url"]
    server.is_ready = True


async def start_ranks(
    config: RunConfig, logs: Path, token: str, lock: int | None, places: Sequence[Place], launcher: Launcher
) -> list[Rank]:
    """Start the trainer ranks together, which meet the run and wait for their first request."""
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
            # A rank that sees only its own GPU is the first one there.
            environment | {"RANK": str(rank), "LOCAL_RANK": "0" if place.has_gpu else str(rank)} | place.environment,
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
