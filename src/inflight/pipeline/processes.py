"""Server and trainer processes of a run: started, watched, and stopped with everything they started.

Each ends by itself when the run dies, because its input ends. Their output goes to files; errors quote the last lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inflight.errors import ConfigError, EndpointError, WorkerDiedError
from inflight.pipeline.channel import Message, RunChannel
from inflight.pipeline.config import FleetMember, RunConfig

_POLL_S = 0.05
_STOP_S = 10.0
_STOP_ENGINE_S = 30.0
"""For a server that has an engine's own server to stop."""
_NUM_LINES = 24


@dataclass(slots=True, eq=False)
class Process:
    """One child process and the file that its output goes to."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    stop_s: float = field(default=_STOP_S, kw_only=True)

    def how_it_ended(self) -> str:
        """Say how it ended, with the last lines of its output."""
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()[-_NUM_LINES:] if self.log.exists() else []
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
    """An inference server that this run started; ``url`` is empty until it answers."""

    max_concurrent: int
    url: str = ""

    async def stop(self) -> None:
        """See `Process.stop`. One that is still starting does not watch its input yet, and is told by a signal."""
        if not self.url and self.process.returncode is None:
            self.process.terminate()
        await Process.stop(self)


@dataclass(slots=True, eq=False)
class Rank(Process):
    """A trainer rank and the channel to it."""

    channel: RunChannel


async def start_servers(config: RunConfig, directory: Path, token: str, model_path: Path, run_id: str) -> list[Server]:
    """Start the fleet side by side and wait until all answer. Raises `ConfigError` with a server's own last words.

    They follow what the run stores, if it says that they do.
    """
    servers: list[Server] = []
    try:
        for member in config.servers.members:
            for _ in range(member.count):
                servers.append(await _start_server(config, member, directory, token, model_path, len(servers), run_id))
        async with asyncio.timeout(config.run.start_timeout_s):
            await asyncio.gather(*(_wait_until_ready(server, directory) for server in servers))
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
    config: RunConfig, member: FleetMember, directory: Path, token: str, model_path: Path, index: int, run_id: str
) -> Server:
    is_embedded = member.engine == "local"
    name = f"server-{index}" if is_embedded else f"server-{index}-{member.engine}"
    ready_file = _ready_file(directory, name)
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "inflight", "serve", str(model_path), "--port", "0"]
    command += ["--ready-file", str(ready_file), "--exit-with-stdin", "--name", config.model.path.name]
    command += ["--dtype", config.model.dtype, "--max-concurrent", str(member.max_concurrent)]
    command += ["--threads", str(config.servers.threads)]
    if config.servers.device is not None:
        command += ["--device", config.servers.device]
    if config.servers.updates == "pull":
        command += ["--follow", str(config.servers.directory), "--follow-run", run_id]
    if not is_embedded:
        command += ["--engine", member.engine, "--start-timeout", str(config.run.start_timeout_s)]
        command += ["--log", str(directory / f"{name}.engine.log")]
        command += [f"--engine-arg={argument}" for argument in member.engine_arguments]
        command += [] if member.python is None else ["--python", str(member.python)]
    log = directory / f"{name}.log"
    environment = {**os.environ, "INFLIGHT_TOKEN": token, "OMP_NUM_THREADS": str(config.servers.threads)}
    process = await _spawn(command, log, environment)
    return Server(name, process, log, member.max_concurrent, stop_s=_STOP_S if is_embedded else _STOP_ENGINE_S)


async def _wait_until_ready(server: Server, directory: Path) -> None:
    ready_file = _ready_file(directory, server.name)
    while not ready_file.exists():
        if server.process.returncode is not None:
            raise ConfigError(server.how_it_ended())
        await asyncio.sleep(_POLL_S)
    server.url = json.loads(ready_file.read_text())["url"]


def _ready_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


async def start_ranks(config: RunConfig, directory: Path, token: str) -> list[Rank]:
    """Start the trainer ranks; they wait for their first message."""
    ranks = []
    rendezvous = directory / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    for rank in range(config.train.num_ranks):
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {
                **os.environ,
                "INFLIGHT_TOKEN": token,
                "OMP_NUM_THREADS": str(config.train.threads),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(config.train.num_ranks),
                "INFLIGHT_RENDEZVOUS": str(rendezvous.resolve()),
            }
            name = f"trainer-{rank}"
            log = directory / f"{name}.log"
            command = [sys.executable, "-m", "inflight.pipeline.trainer", str(theirs.fileno())]
            process = await _spawn(command, log, environment, keep=(theirs.fileno(),))
        ranks.append(Rank(name, process, log, await RunChannel.open(rank, ours)))
    return ranks


async def _spawn(
    command: Sequence[str], log: Path, environment: dict[str, str], keep: tuple[int, ...] = ()
) -> asyncio.subprocess.Process:
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=keep,
            start_new_session=True,
        )


async def ask(ranks: Sequence[Rank], frames: Sequence[bytes], timeout_s: float) -> list[Message]:
    """Send each rank its frame and return every answer.

    The first rank that dies or answers an error ends the wait: `WorkerDiedError` with its last words, or the error.
    """

    async def one(rank: Rank, frame: bytes) -> Message:
        try:
            await rank.channel.send(frame)
            answer = await rank.channel.receive()
        except WorkerDiedError as error:
            await asyncio.wait_for(rank.process.wait(), _STOP_S)
            raise WorkerDiedError(rank.how_it_ended()) from error
        return answer

    asking = [asyncio.ensure_future(one(rank, frame)) for rank, frame in zip(ranks, frames, strict=True)]
    try:
        async with asyncio.timeout(timeout_s):
            return list(await asyncio.gather(*asking))
    except TimeoutError as error:
        waiting = [rank.name for rank, task in zip(ranks, asking, strict=True) if not task.done() or task.cancelled()]
        raise WorkerDiedError(f"{', '.join(waiting)} gave no answer within {timeout_s:g} s") from error
    finally:
        for task in asking:
            task.cancel()


async def watch_servers(servers: Sequence[Server]) -> EndpointError:
    """Return an error that says which server died first, and how."""
    waiting = {asyncio.ensure_future(server.process.wait()): server for server in servers}
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    server = waiting[next(iter(done))]
    return EndpointError(server.how_it_ended(), server.url)
