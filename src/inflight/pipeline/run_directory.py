"""The directory of a run: which process owns it, and where a run that is started in it begins.

An operating-system lock on the file ``lock`` says who owns it. The run's children inherit it, so that a run that is
resumed never works beside what a killed one has left. Knows nothing of servers and trainers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.pipeline.checkpoints import latest_checkpoint, remove_unfinished

_ORPHANS_S = 20.0
"""How long what a killed run left may take to end by itself."""
_OWNER_S = 2.0
"""How long an owner that was killed a moment ago may take to be gone."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A directory that this process owns until `release`, and where to begin."""

    path: Path
    run_id: str
    """Name that servers know the run by; kept over its restarts, so that they refuse a trainer that was replaced."""
    lock: int
    """File descriptor of the lock, for children to inherit."""
    checkpoint: Path | None
    """Where workers are loaded from; None at the beginning of a run."""
    state: Mapping[str, Any] | None
    """The run's own state at the checkpoint."""

    @property
    def logs(self) -> Path:
        """Where processes write their output."""
        return self.path / "logs"

    def release(self) -> None:
        """Give the directory up; children that live on keep it."""
        os.close(self.lock)


def claim(path: Path, config_json: str, *, resume: bool, note: Callable[[str], None]) -> RunDirectory:
    """Own a run directory, a new one or, with ``resume``, the one of a run that has ended.

    A run that ended before its first checkpoint begins anew, with or without ``resume``. What a killed run has left
    running is waited for, and killed if it does not end. Raises `ConfigError` if another process owns the directory, if
    it holds a run and ``resume`` is false, or no run and it is true; nothing was changed then.
    """
    if resume and not (path / "config.json").exists():
        raise ConfigError(f"{str(path)!r} holds no run to resume: start it without --resume")
    lock = -1
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir(exist_ok=True)
        lock = _own(path / "lock", note)
        checkpoint, state = latest_checkpoint(path)
        if checkpoint is not None and not resume:
            raise ConfigError(
                f"{str(path)!r} holds a run already: continue it with --resume, "
                "or choose another directory with --run.directory"
            )
        if checkpoint is None:
            if (path / "config.json").exists():
                note(f"the run in {path} ended before its first checkpoint: it begins anew")
            (path / "config.json").write_text(config_json + "\n")
            (path / "run_id").write_text(f"{path.name}-{uuid.uuid4().hex[:8]}\n")
        remove_unfinished(path)
        run_id = (path / "run_id").read_text().strip()
    except BaseException as error:
        if lock >= 0:
            os.close(lock)
        if isinstance(error, OSError):
            raise ConfigError(f"run directory {str(path)!r} cannot be used: {error.strerror}") from error
        raise
    return RunDirectory(path, run_id, lock, checkpoint, state)


def _own(path: Path, note: Callable[[str], None]) -> int:
    """Return a descriptor that holds the lock. Raises `ConfigError` that names the owner."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    refuse_at = time.monotonic() + _OWNER_S
    kill_at: float | None = None
    try:
        while not _try_lock(lock):
            now = time.monotonic()
            if orphans := _orphans(lock):
                refuse_at = now + _OWNER_S
                names = ", ".join(map(str, orphans))
                if kill_at is None:
                    kill_at = now + _ORPHANS_S
                    note(f"waiting for what the run before has left to end: processes {names}")
                elif now > kill_at:
                    kill_at = now + _ORPHANS_S
                    note(f"killing what the run before has left: processes {names}")
                    for pid in orphans:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            elif now > refuse_at:
                raise ConfigError(
                    f"{str(path.parent)!r} belongs to a run that goes on ({os.pread(lock, 200, 0).decode()}): stop it "
                    "first, or choose another directory with --run.directory"
                )
            time.sleep(_POLL_S)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _orphans(lock: int) -> list[int]:
    """Return the processes that hold the lock of a run whose controller is gone; none if it is there, or unknown."""
    words = os.pread(lock, 200, 0).decode().split()
    if len(words) < 4 or words[3] != socket.gethostname():
        return []
    holders = _holders(lock)
    return [] if int(words[1]) in holders else holders


def _holders(lock: int) -> list[int]:
    """Return the other processes of this host that hold the lock; one that waits for it has the file open only."""
    wanted = os.fstat(lock)
    holders = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    status = descriptor.stat()
                    if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
                        if "FLOCK" in (process / "fdinfo" / descriptor.name).read_text():
                            holders.append(int(process.name))
                        break
    return holders
