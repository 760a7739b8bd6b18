"""An engine's own server as a child process: started, waited for, watched, and stopped with everything it started.

Its output goes to a file; errors quote the last lines. Knows nothing of particular engines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from inflight.engines.kinds import EngineKind, EngineOptions
from inflight.errors import ConfigError, EndpointError

_POLL_S = 0.2
_STOP_S = 15.0
_NUM_LINES = 20
_PR_SET_PDEATHSIG = 1


class EngineProcess:
    """One running server. ``url`` is its own address, always on loopback."""

    def __init__(self, kind: EngineKind, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.name = kind.name
        self.process = process
        self.url = url
        self.log = log

    def wait(self) -> None:
        """Return when the server has ended."""
        self.process.wait()

    def how_it_ended(self) -> str:
        """Say how it ended, with the last lines of its own output."""
        code = self.process.poll()
        if code is None:
            how = "is still running"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"{self.name} {how}; the end of its output ({self.log}):\n{tail(self.log)}"

    def stop(self) -> None:
        """End the server and everything that it started: asked first, killed after a while. Idempotent."""
        family = _family(self.process.pid)
        for pid in (self.process.pid,) if self.process.poll() is None else ():
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while any(map(_is_alive, family)) and time.monotonic() < deadline:
            self.process.poll()  # reaps it
            time.sleep(0.05)
        for pid in {*family, *_family(self.process.pid)}:
            _signal(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def started(
    kind: EngineKind,
    options: EngineOptions,
    *,
    python: str | None = None,
    port: int = 0,
    timeout_s: float = 300.0,
    log: Path | None = None,
    on_wait: Callable[[float], None] | None = None,
) -> Iterator[EngineProcess]:
    """Yield a server that is healthy; stop it on the way out, whatever happens.

    ``python`` is the interpreter of the engine's environment (None: this one), ``port`` 0 takes a free one. ``on_wait``
    is told every few seconds how long the start has taken. Raises `ConfigError` with the server's own last words if it
    ends, or is not healthy after ``timeout_s`` seconds.
    """
    interpreter = _interpreter(python)
    port = port or _free_port()
    with contextlib.ExitStack() as stack:
        if log is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="inflight-"))
            log = Path(directory) / f"{kind.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [interpreter, *kind.command(options, "127.0.0.1", port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **kind.environment(options)},
                start_new_session=True,  # Ctrl-C is ours to hand on
                preexec_fn=_end_with_parent,
            )
        engine = EngineProcess(kind, process, f"http://127.0.0.1:{port}", log)
        stack.callback(engine.stop)
        _wait_until_healthy(engine, kind.health_path, timeout_s, on_wait)
        yield engine


def tail(log: Path) -> str:
    """Return the last lines of a file, indented."""
    lines = log.read_text(errors="replace").strip().splitlines()[-_NUM_LINES:] if log.exists() else []
    return "\n".join(f"    {line[:300]}" for line in lines) or "    (nothing)"


def _wait_until_healthy(
    engine: EngineProcess, path: str, timeout_s: float, on_wait: Callable[[float], None] | None
) -> None:
    begun = time.monotonic()
    told = begun
    while True:
        if engine.process.poll() is not None:
            raise ConfigError(engine.how_it_ended())
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(engine.url + path, timeout=5.0, trust_env=False).status_code == 200:
                return
        now = time.monotonic()
        if now - begun > timeout_s:
            raise ConfigError(
                f"{engine.name} was not healthy after {timeout_s:g} s and is stopped. {engine.how_it_ended()}"
            )
        if on_wait is not None and now - told > 5:
            told = now
            on_wait(now - begun)
        time.sleep(_POLL_S)


def died(engine: EngineProcess) -> EndpointError:
    """Return the error of a server that ended while it was served from."""
    return EndpointError(engine.how_it_ended(), engine.url)


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        raise ConfigError(f"--python {python!r} is no interpreter; give the python of the engine's virtual environment")
    return python


def _end_with_parent() -> None:
    """Have the kernel end the child when this process is killed; nothing else could, then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _family(pid: int) -> list[int]:
    """Return a process, all its descendants, and what else is of its session, which orphans stay in."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = (int(fields[1]), int(fields[3]))
    found = {pid}
    while True:
        more = {p for p, (parent, session) in parents.items() if parent in found or session == pid} - found
        if not more:
            return sorted(found)
        found |= more


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
