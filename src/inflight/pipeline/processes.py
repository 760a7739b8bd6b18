"""Server and trainer processes of a run: started, watched, and stopped with everything they started.

Each ends by itself when the run dies, because its input ends. Their output goes to files; errors quote the last lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from inflight.errors import ConfigError, InflightError, WorkerDiedError, error_from_code
from inflight.pipeline.channel import Message, RunChannel
from inflight.pipeline.config import FleetMember, RunConfig
from inflight.pipeline.run_directory import RunDirectory

_POLL_S = 0.05
_STOP_S = 10.0
_STOP_ENGINE_S = 30.0
"""For a server that has an engine's own server to stop."""
_NUM_LINES = 24
_MAX_FAILURES = 3
"""A server that ended so often before it held a version is not started again."""
_RESTART_PAUSE_S = 1.0
"""Pause before a server is started again; it grows by as much with each failure."""
_GRACE_S = 2.0
"""How long after a rank that lost another one the cause may take to show."""
_TOGETHER_S = 0.2
"""Within which ranks fail that fail together."""


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
    """An inference server that this run started; ``url`` is empty until it has answered once."""

    max_concurrent: int
    command: Sequence[str]
    environment: Mapping[str, str]
    ready_file: Path
    """Where it says that it answers."""
    lock: int
    """Descriptor of the run directory's lock, which it inherits."""
    url: str = ""

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
        stop_s=_STOP_S if is_embedded else _STOP_ENGINE_S,
    )


async def _wait_until_ready(server: Server) -> None:
    while not server.ready_file.exists():
        if server.process.returncode is not None:
            raise ConfigError(server.how_it_ended())
        await asyncio.sleep(_POLL_S)
    server.url = json.loads(server.ready_file.read_text())["url"]


async def keep_running(
    server: Server,
    timeout_s: float,
    *,
    on_end: Callable[[str], None],
    on_restart: Callable[[], None],
    has_served: Callable[[], bool],
) -> None:
    """Start a server again whenever its process ends; ``on_end`` is told how it ended.

    Returns once it is given up: it ended several times, each before ``has_served()`` was true since its start.
    """
    num_failures = 0
    while True:
        await server.process.wait()
        num_failures = 1 if has_served() else num_failures + 1
        on_end(server.how_it_ended())
        if num_failures >= _MAX_FAILURES:
            return
        await asyncio.sleep(_RESTART_PAUSE_S * num_failures)
        with contextlib.suppress(ConfigError):  # its process has ended, which is told at the beginning of the loop
            await server.restart(timeout_s)
            on_restart()


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


class _RankError(Exception):
    """A rank answered an error, or died."""

    def __init__(self, rank: Rank, error: InflightError, *, blames_another: bool = False) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.error = error
        self.blames_another = blames_another


async def ask(ranks: Sequence[Rank], frames: Sequence[bytes], timeout_s: float) -> list[Message]:
    """Send each rank its frame and return every answer.

    The first rank that dies or answers an error ends the wait, whatever the others wait for: `WorkerDiedError` with its
    last words, or the error, and its name where others did not say the same. A rank that only lost the connection to
    another is believed to be the cause if nothing else shows within two seconds. Ranks are not to be asked again after
    a failure.
    """
    asking = [asyncio.ensure_future(_ask_one(rank, frame)) for rank, frame in zip(ranks, frames, strict=True)]
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait(asking, return_when=asyncio.FIRST_EXCEPTION)
        failures = await _failures(asking)
    except TimeoutError as error:
        waiting = [rank for rank, task in zip(ranks, asking, strict=True) if not task.done()]
        silent = ", ".join(rank.during(rank.name) for rank in waiting)
        raise WorkerDiedError(f"no answer within {timeout_s:g} s: {silent}") from error
    finally:
        for task in asking:
            task.cancel()
    if failures:
        cause = min(failures, key=lambda failure: failure.blames_another)
        raise _named(cause, failures, len(ranks)) from cause
    return [task.result() for task in asking]


async def _ask_one(rank: Rank, frame: bytes) -> Message:
    """Return the answer of one rank. Raises `_RankError`."""
    try:
        await rank.channel.send(frame)
        while (answer := await rank.channel.receive())["type"] == "doing":
            rank.doing = answer["what"]
    except WorkerDiedError as error:
        raise _RankError(rank, WorkerDiedError(await _last_words(rank))) from error
    if answer["type"] == "error":
        said = error_from_code(answer["code"], answer["message"])
        raise _RankError(rank, said, blames_another=answer["blames_another_rank"])
    if answer["type"] == "failed":
        lines = "\n".join(f"    {line}" for line in answer["traceback"].strip().splitlines()[-_NUM_LINES:])
        words = rank.during(f"{rank.name} failed: {answer['message']}\n{lines}")
        raise _RankError(rank, WorkerDiedError(words), blames_another=answer["blames_another_rank"])
    rank.doing = ""
    return answer


async def _last_words(rank: Rank) -> str:
    """Say how a rank ended whose channel is closed."""
    try:
        async with asyncio.timeout(_STOP_S):
            await rank.process.wait()
    except TimeoutError:
        return rank.during(f"{rank.name} closed its channel to the run and goes on")
    return rank.how_it_ended()


async def _failures(asking: Sequence[asyncio.Future[Message]]) -> list[_RankError]:
    """Return the failures of ranks of which one has failed, once the cause is likely to be among them."""
    started = time.monotonic()
    while True:
        failures, waiting = [], [task for task in asking if not task.done()]
        for task in asking:
            try:
                _ = task.done() and task.result()
            except _RankError as failure:
                failures.append(failure)
        grace_s = _GRACE_S if all(failure.blames_another for failure in failures) else _TOGETHER_S
        rest_s = started + grace_s - time.monotonic()
        if not failures or not waiting or rest_s <= 0:
            return failures
        await asyncio.wait(waiting, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)


def _named(cause: _RankError, failures: Sequence[_RankError], num_ranks: int) -> InflightError:
    """Return the error of a rank with its name, unless all say the same or the error names one already."""
    text, name = str(cause.error), cause.rank.name
    all_say_so = len(failures) == num_ranks and len({str(failure.error) for failure in failures}) == 1
    if all_say_so or name in text or text.startswith("rank "):
        return cause.error
    return error_from_code(cause.error.code, f"{name}: {text}")
