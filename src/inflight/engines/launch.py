"""Runs an engine's own server as a child process: starts it, waits for it, and stops it and its descendants.

The server listens on loopback only. Its output goes to a file, which error messages quote.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from inflight.base.tasks import run_together
from inflight.contracts import EngineKind, EngineOptions
from inflight.engines import supervise
from inflight.engines.process_tree import dead_part, vital_parts
from inflight.errors import ConfigError, EndpointError
from inflight.http.bounded_client import BoundedClient
from inflight.http.tokens import TOKEN_VARIABLE

_HOST = "127.0.0.1"
_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 20.0
"""Seconds allowed for one health check at start-up: an engine may answer its first check only after generating
tokens.
"""
_REPORT_EVERY_S = 5.0
_WATCH_S = 0.1
_ASK_S = 0.5
"""Seconds between two health checks of a running engine, and the time limit of each."""
_PATIENCE_S = 10.0
"""How long, in seconds, an engine may take to end before it is killed. If part of it has died, the rest has half a
second.
"""
_ASSIGNED_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NUM_PORTS = 12_000
"""An engine's port is chosen from this many ports below the range of assigned ports."""
_NUM_TRIED = 16
_QUOTED_LINES = 20
_QUOTED_WIDTH = 300


class EngineProcess:
    """An engine's server, started by this process.

    Use it as a context manager: on exit, all of its processes are ended.

    ``log`` holds the engine's output. A temporary log is deleted if nothing failed.
    """

    def __init__(self, kind: EngineKind, process: subprocess.Popen[bytes], url: str, log: Path, *, keeps_log: bool):
        self._kind = kind
        self._process = process
        self._keeps_log = keeps_log
        self.name = kind.name
        self.url = url
        """The engine's own address, on loopback."""
        self.log = log

    @property
    def pid(self) -> int:
        """The id of the process from which all other processes of the engine descend."""
        return self._process.pid

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(at_once=isinstance(error, EndpointError))
        if not self._keeps_log and not isinstance(error, Exception):
            self.log.unlink(missing_ok=True)

    async def wait_until_healthy(self, timeout_s: float, on_wait: Callable[[float], None] | None = None) -> None:
        """Return once the engine can generate. Calls ``on_wait`` every few seconds with the seconds that have passed.

        Raises `EndpointError` with the last lines of the engine's output if it ends, or takes longer than
        ``timeout_s``.
        """
        started = reported = time.monotonic()
        async with contextlib.aclosing(BoundedClient(self.url)) as client:
            while True:
                patience_s = min(_HEALTH_TIMEOUT_S, max(_POLL_S, started + timeout_s - time.monotonic()))
                if await _status_of(client, self._kind.health_path, patience_s) == 200:
                    return
                self._raise_if_ended()
                now = time.monotonic()
                if now - started > timeout_s:
                    raise EndpointError(
                        f"{self.name} was not healthy after {timeout_s:g} s and is being stopped; {self._end()}"
                    )
                if on_wait is not None and now - reported > _REPORT_EVERY_S:
                    reported = now
                    on_wait(now - started)
                await asyncio.sleep(_POLL_S)

    async def watch(self) -> NoReturn:
        """Wait until the engine or a part of it dies, and raise `EndpointError` with its last lines of output.

        This watches the processes that are running when it is called, and the health that the engine's server reports.
        Once a part has died, the rest of the engine is ended immediately.
        """
        watches = [self._watch_processes()]
        if self._kind.liveness_path is not None:
            watches.append(self._watch_health(self._kind.liveness_path))
        await run_together(*watches)
        raise AssertionError("an engine is watched until it ends")

    async def _watch_processes(self) -> None:
        first, parts = vital_parts(self._process.pid)
        while True:
            self._raise_if_ended()
            if (part := dead_part(first, parts)) is not None:
                self._raise_dead(f"its process {part.pid} ({part.name}) {part.how}")
            await asyncio.sleep(_WATCH_S)

    async def _watch_health(self, path: str) -> None:
        async with contextlib.aclosing(BoundedClient(self.url, keeps_alive=False)) as client:
            while True:
                if await _status_of(client, path, _ASK_S) == 503:  # a server that does not answer may be busy
                    break
                await asyncio.sleep(_ASK_S)
        await asyncio.sleep(2 * _WATCH_S)  # the end of a process is more specific
        self._raise_dead(f"GET {path} answered status 503")

    def _raise_dead(self, how: str) -> NoReturn:
        self._shorten_patience()
        raise EndpointError(f"{self.name} has died: {how}; {self._end()}")

    def _raise_if_ended(self) -> None:
        status = self._process.poll()
        if status is not None:
            number = -status if status < 0 else status - 128
            how = f"was killed by signal {number}" if number > 0 else f"ended with status {status}"
            raise EndpointError(f"{self.name} {how}; {self._end()}")

    def _end(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-_QUOTED_LINES:]
        return "\n".join(
            [
                f"the end of {self.log}:" if lines else f"{self.log} is empty",
                *(f"    {line[:_QUOTED_WIDTH]}" for line in lines),
            ]
        )

    def _shorten_patience(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGQUIT)

    def stop(self, *, at_once: bool = False) -> None:
        """End every process that descends from the engine; return when none is left. Idempotent."""
        assert self._process.stdin is not None
        if at_once:
            self._shorten_patience()
        self._process.stdin.close()
        try:
            self._process.wait(2 * _PATIENCE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # the engine ends with it
            self._process.wait()


@contextlib.contextmanager
def started(
    kind: EngineKind, options: EngineOptions, *, timeout_s: float = 300.0, python: str | None = None, port: int = 0
) -> Iterator[EngineProcess]:
    """Yield an engine's healthy server, and stop it on exit. Blocks, so it does not belong in an event loop.

    Raises `EndpointError` with the last lines of the engine's output if it ends, or is not healthy after ``timeout_s``.
    The other arguments are those of `start_engine`.
    """
    with start_engine(kind, options, python=python, port=port) as engine:
        asyncio.run(engine.wait_until_healthy(timeout_s))
        yield engine


def start_engine(
    kind: EngineKind, options: EngineOptions, *, python: str | None = None, port: int = 0, log: Path | None = None
) -> EngineProcess:
    """Start an engine's server on loopback, and return without waiting for it.

    ``python`` is the interpreter of the environment in which the engine is installed (by default, this one). ``port`` 0
    means any free port. Raises `ConfigError`, in which case nothing was started.
    """
    if options.drafts is not None and (problem := kind.drafts_problem(options.drafts)) is not None:
        raise ConfigError(f"drafts from {options.drafts!r}: {problem}")
    interpreter = _interpreter(python)
    port = _free_port(port)
    if log is None:
        number, name = tempfile.mkstemp(prefix=f"inflight-{kind.name}-", suffix=".log")
        path = Path(name)
    else:
        path = log
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise ConfigError(f"log {str(path)!r} cannot be written: {error.strerror}") from error
    # The engine must not receive the token of the server in front of it.
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    command = [sys.executable, "-I", supervise.__file__, str(_PATIENCE_S)]
    try:
        process = subprocess.Popen(
            [*command, interpreter, *kind.command(options, _HOST, port)],
            stdin=subprocess.PIPE,
            stdout=number,
            stderr=number,
            env={**inherited, **kind.environment(options)},
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the engine cleanly
        )
    finally:
        os.close(number)
    return EngineProcess(kind, process, f"http://{_HOST}:{port}", path, keeps_log=log is not None)


def _lasting_ports() -> list[int]:
    """Return a few ports that the system does not assign by itself; none if the range that it assigns is unknown.

    An engine binds its port up to a minute after it was started. Until then, an outgoing connection of any process
    could take a port that the system assigns.
    """
    try:
        first = int(_ASSIGNED_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    below = range(max(1024, first - _NUM_PORTS), first)
    return random.sample(below, min(_NUM_TRIED, len(below)))


async def _status_of(client: BoundedClient, path: str, timeout_s: float) -> int:
    """Return the HTTP status of the response to a GET, or 0 if there is no response."""
    with contextlib.suppress(EndpointError):
        status, _ = await client.request("GET", path, timeout_s=timeout_s)
        return status
    return 0


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    found = shutil.which(python)
    if found is None:
        why = "is not executable" if Path(python).exists() else "does not exist"
        raise ConfigError(
            f"Python interpreter {python!r} {why}; pass the one of the environment in which the engine is installed, "
            "such as ENVIRONMENT/bin/python"
        )
    return str(Path(found).absolute())  # the link identifies the virtual environment: do not resolve it


def _free_port(port: int) -> int:
    """Return ``port`` if an engine can listen on it now; for 0, return a free one. Raises `ConfigError`."""
    if not port:
        for candidate in _lasting_ports():
            with contextlib.suppress(ConfigError):
                return _free_port(candidate)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no such port"
            raise ConfigError(f"the engine cannot listen on {_HOST}:{port}: {reason}; choose another port") from error
        return int(probe.getsockname()[1])
