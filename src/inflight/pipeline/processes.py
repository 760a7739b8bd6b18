"""Server and trainer processes of a run: started, watched and stopped.

Each ends by itself when the run dies, because its standard input ends. Output goes to files; errors quote its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from inflight.engines.kinds import load_engine_kind
from inflight.errors import ConfigError
from inflight.pipeline.channel import RunChannel
from inflight.pipeline.config import FleetMember, RunConfig
from inflight.pipeline.placement import Place
from inflight.pipeline.run_directory import RunDirectory

_POLL_S = 0.05
STOP_S = 10.0
"""How long a process may take to end once its standard input has ended."""
_STOP_ENGINE_S = 30.0
"""The same for a server that must first stop an engine's own server."""
NUM_LINES = 24
"""How many lines of a log or traceback an error quotes."""


@dataclass(slots=True, eq=False)
class Process:
    """One child process and its log file."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    stop_s: float = field(default=STOP_S, kw_only=True)

    def how_it_ended(self) -> str:
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()[-NUM_LINES:] if self.log.exists() else []
        quoted = "\n".join(f"    {line}" for line in lines)
        return f"{self.name} {how}; the end of {self.log}:\n{quoted}" if quoted else f"{self.name} {how}"

    async def stop(self) -> None:
        """End its standard input and wait; kill it if it takes too long."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            async with asyncio.timeout(self.stop_s):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@dataclass(slots=True, eq=False)
class Server(Process):
    """An inference server that this run started; ``url`` is empty until the server is ready."""

    max_concurrent: int
    command: Sequence[str]
    environment: Mapping[str, str]
    ready_file: Path
    """The server writes this file when it is ready."""
    lock: int
    """Descriptor of the run directory's lock, which the process inherits."""
    url: str = ""
    has_served: bool = False
    """Whether it has held a version since it was last started."""
    end_is_told: bool = False
    """Whether the user was told how it ended; reset when it is started again."""

    async def stop(self) -> None:
        """Stop it like any process, but with a signal while it is starting and does not watch its input yet."""
        if not self.ready_file.exists() and self.process.returncode is None:
            self.process.terminate()
        await Process.stop(self)

    async def restart(self, timeout_s: float) -> None:
        """Start it again at its URL, after its process has ended, and wait until it is ready.

        Raises `ConfigError` with the end of its log if it does not become ready; the process has ended then.
        """
        self.ready_file.unlink(missing_ok=True)
        command = [*self.command, "--port", str(urlsplit(self.url).port)]
        self.process = await _spawn(command, self.log, self.environment, keep=(self.lock,), mode="ab")
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_until_ready(self)
        except TimeoutError as error:
            raise ConfigError(f"{self.name} did not answer within {timeout_s:g} s") from error
        finally:
            if not self.ready_file.exists():
                await self.stop()


@dataclass(slots=True, eq=False)
class Rank(Process):
    """A trainer rank and the channel to it."""

    channel: RunChannel
    doing: str = ""
    """What it last reported to be doing; empty between requests."""

    def how_it_ended(self) -> str:
        """Return what it was doing and how it ended, with the last lines of its output."""
        return self.during(Process.how_it_ended(self))

    def during(self, what: str) -> str:
        return f"while {self.doing}: {what}" if self.doing else what


async def start_servers(
    config: RunConfig, directory: RunDirectory, token: str, places: Sequence[Place]
) -> list[Server]:
    """Start all servers together and wait until they are ready. With updates ``pull`` they follow the run's store.

    Raises `ConfigError` with the end of a server's log; no server is left running then.
    """
    servers: list[Server] = []
    try:
        for member in config.servers.members:
            for _ in range(member.count):
                place = places[len(servers)]
                servers.append(await _start_server(config, member, directory, token, place))
        async with asyncio.timeout(config.run.start_timeout_s):
            await asyncio.gather(*(_wait_until_ready(server) for server in servers))
    except BaseException as error:
        waiting = ", ".join(server.name for server in servers if not server.url)
        await asyncio.gather(*(server.stop() for server in servers))
        if isinstance(error, TimeoutError):
            raise ConfigError(
                f"{waiting} did not answer within {config.run.start_timeout_s:g} s; raise run.start_timeout_s "
                "to wait longer"
            ) from error
        raise
    return servers


async def _start_server(
    config: RunConfig, member: FleetMember, directory: RunDirectory, token: str, place: Place
) -> Server:
    is_embedded, name = member.engine == "local", place.name
    ready_file = directory.logs / f"{name}.json"
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "inflight", "serve", str(config.model.path), "--port", "0"]
    command += ["--ready-file", str(ready_file), "--exit-with-stdin", "--name", config.model.path.name]
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
    if not is_embedded:
        command += ["--engine", member.engine, "--start-timeout", str(config.run.start_timeout_s)]
        command += ["--log", str(directory.logs / f"{name}.engine.log")]
        released = load_engine_kind(member.engine).release_arguments if config.servers.release_memory else ()
        command += [f"--engine-arg={argument}" for argument in (*released, *member.engine_arguments)]
        command += [] if member.python is None else ["--python", str(member.python)]
    log = directory.logs / f"{name}.log"
    environment = {**os.environ, "INFLIGHT_TOKEN": token, "OMP_NUM_THREADS": str(config.servers.threads)}
    environment |= place.environment
    return Server(
        name,
        await _spawn(command, log, environment, keep=(directory.lock,)),
        log,
        member.max_concurrent,
        command,
        environment,
        ready_file,
        directory.lock,
        stop_s=STOP_S if is_embedded else _STOP_ENGINE_S,
    )


async def _wait_until_ready(server: Server) -> None:
    while not server.ready_file.exists():
        if server.process.returncode is not None:
            raise ConfigError(server.how_it_ended())
        await asyncio.sleep(_POLL_S)
    server.url = json.loads(server.ready_file.read_text())["url"]


async def start_ranks(
    config: RunConfig, logs: Path, token: str, lock: int | None, places: Sequence[Place]
) -> list[Rank]:
    """Start the trainer ranks, which wait for their first request."""
    ranks: list[Rank] = []
    rendezvous = logs / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "INFLIGHT_TOKEN": token,
        "OMP_NUM_THREADS": str(config.train.threads),
        "WORLD_SIZE": str(config.train.num_ranks),
        "INFLIGHT_RENDEZVOUS": str(rendezvous),
    }
    try:
        for rank, place in enumerate(places):
            log = logs / f"{place.name}.log"
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "inflight.pipeline.trainer", str(theirs.fileno())]
                keep = (theirs.fileno(), *(() if lock is None else (lock,)))
                # A rank that sees only its own GPU is the first one there.
                numbered = environment | {"RANK": str(rank), "LOCAL_RANK": "0" if place.devices else str(rank)}
                process = await _spawn(command, log, numbered | place.environment, keep)
            ranks.append(Rank(place.name, process, log, await RunChannel.open(rank, ours)))
    except BaseException:
        await asyncio.gather(*(rank.stop() for rank in ranks))
        raise
    return ranks


async def _spawn(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    keep: tuple[int, ...],
    mode: Literal["wb", "ab"] = "wb",
) -> asyncio.subprocess.Process:
    with log.open(mode) as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=dict(environment),
            pass_fds=keep,
            start_new_session=True,
        )
