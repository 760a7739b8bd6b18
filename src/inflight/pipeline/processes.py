"""Server and trainer processes of a run: started, watched, and stopped with everything they started.

Each ends by itself when the run dies, because its input ends. Their output goes to files; errors quote the last lines.
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

from inflight.errors import ConfigError
from inflight.pipeline.channel import RunChannel
from inflight.pipeline.config import FleetMember, RunConfig
from inflight.pipeline.run_directory import RunDirectory

_POLL_S = 0.05
STOP_S = 10.0
"""How long a process may take to end once its input has."""
_STOP_ENGINE_S = 30.0
"""For a server that has an engine's own server to stop."""
NUM_LINES = 24
"""Of a log or a traceback, which errors quote."""


@dataclass(slots=True, eq=False)
class Process:
    """One child process and the file that its output goes to."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    stop_s: float = field(default=STOP_S, kw_only=True)

    def how_it_ended(self) -> str:
        """Say how it ended, with the last lines of its output."""
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()[-NUM_LINES:] if self.log.exists() else []
        quoted = "\n".join(f"    {line}" for line in lines)
        return f"{self.name} {how}; the end of {self.log}:\n{quoted}" if quoted else f"{self.name} {how}"

    async def stop(self) -> None:
        """End its input and wait; kill it if it takes too long."""
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
    """An inference server that this run started; ``url`` is empty until it has answered once."""

    max_concurrent: int
    command: Sequence[str]
    environment: Mapping[str, str]
    ready_file: Path
    """Where it says that it answers."""
    lock: int
    """Descriptor of the run directory's lock, which it inherits."""
    url: str = ""
    has_served: bool = False
    """Whether it has held a version since it was started."""
    end_is_told: bool = False
    """Whether a person was told how it ended; false again once it was started again."""

    async def stop(self) -> None:
        """See `Process.stop`. One that is still starting does not watch its input yet, and is told by a signal."""
        if not self.ready_file.exists() and self.process.returncode is None:
            self.process.terminate()
        await Process.stop(self)

    async def restart(self, timeout_s: float) -> None:
        """Start it again at its URL, once its process has ended, and wait until it answers.

        Raises `ConfigError` with its own last words if it does not; it has ended then.
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
    """What it said last that it does; empty while it is asked nothing."""

    def how_it_ended(self) -> str:
        """Say what it did and how it ended, with the last lines of its output."""
        return self.during(Process.how_it_ended(self))

    def during(self, what: str) -> str:
        """Say what happened, and during what."""
        return f"during {self.doing}: {what}" if self.doing else what


async def start_servers(config: RunConfig, directory: RunDirectory, token: str) -> list[Server]:
    """Start the fleet side by side and wait until all answer. Raises `ConfigError` with a server's own last words.

    They follow what the run stores, if it says that they do.
    """
    servers: list[Server] = []
    try:
        for member in config.servers.members:
            for _ in range(member.count):
                servers.append(await _start_server(config, member, directory, token, len(servers)))
        async with asyncio.timeout(config.run.start_timeout_s):
            await asyncio.gather(*(_wait_until_ready(server) for server in servers))
    except BaseException as error:
        waiting = ", ".join(server.name for server in servers if not server.url)
        await asyncio.gather(*(server.stop() for server in servers))
        if isinstance(error, TimeoutError):
            raise ConfigError(
                f"{waiting} did not answer within {config.run.start_timeout_s:g} s; run.start_timeout_s is the limit"
            ) from error
        raise
    return servers


async def _start_server(
    config: RunConfig, member: FleetMember, directory: RunDirectory, token: str, index: int
) -> Server:
    is_embedded = member.engine == "local"
    name = f"server-{index}" if is_embedded else f"server-{index}-{member.engine}"
    ready_file = directory.logs / f"{name}.json"
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "inflight", "serve", str(config.model.path), "--port", "0"]
    command += ["--ready-file", str(ready_file), "--exit-with-stdin", "--name", config.model.path.name]
    command += ["--dtype", config.model.dtype, "--max-concurrent", str(member.max_concurrent)]
    command += ["--threads", str(config.servers.threads)]
    if config.servers.device is not None:
        command += ["--device", config.servers.device]
    if config.servers.updates == "pull":
        command += ["--follow", str(config.servers.directory), "--follow-run", directory.run_id]
    if not is_embedded:
        command += ["--engine", member.engine, "--start-timeout", str(config.run.start_timeout_s)]
        command += ["--log", str(directory.logs / f"{name}.engine.log")]
        command += [f"--engine-arg={argument}" for argument in member.engine_arguments]
        command += [] if member.python is None else ["--python", str(member.python)]
    log = directory.logs / f"{name}.log"
    environment = {**os.environ, "INFLIGHT_TOKEN": token, "OMP_NUM_THREADS": str(config.servers.threads)}
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


async def start_ranks(config: RunConfig, directory: Path, token: str, lock: int | None = None) -> list[Rank]:
    """Start the trainer ranks; they wait for their first message."""
    ranks: list[Rank] = []
    rendezvous = directory / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    try:
        for rank in range(config.train.num_ranks):
            ranks.append(await _start_rank(config, rank, directory, token, str(rendezvous.resolve()), lock))
    except BaseException:
        await asyncio.gather(*(rank.stop() for rank in ranks))
        raise
    return ranks


async def _start_rank(
    config: RunConfig, rank: int, directory: Path, token: str, rendezvous: str, lock: int | None
) -> Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        environment = {
            **os.environ,
            "INFLIGHT_TOKEN": token,
            "OMP_NUM_THREADS": str(config.train.threads),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(config.train.num_ranks),
            "INFLIGHT_RENDEZVOUS": rendezvous,
        }
        name = f"trainer-{rank}"
        log = directory / f"{name}.log"
        command = [sys.executable, "-m", "inflight.pipeline.trainer", str(theirs.fileno())]
        keep = (theirs.fileno(), *(() if lock is None else (lock,)))
        process = await _spawn(command, log, environment, keep)
    return Rank(name, process, log, await RunChannel.open(rank, ours))


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
