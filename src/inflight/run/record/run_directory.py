"""The directory of a run: its owner, and the checkpoint from which a run in it begins.

Ownership is an operating-system lock on the file ``lock``. Child processes of the run inherit it, so that a resumed run
never runs concurrently with processes of a killed one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inflight.base.whole_files import write_whole
from inflight.errors import CheckpointError, ConfigError
from inflight.run.record.changes import changed_settings, describe_change, without_partials, write_config
from inflight.run.record.checkpoints import latest_checkpoint, remove_unfinished

_ORPHANS_S = 20.0
"""How long processes of a killed run may take to end without being killed."""
_OWNER_S = 2.0
"""How long, in seconds, an owner that was just killed may take to disappear."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a run in a directory begins: at a checkpoint, or at version 0."""

    checkpoint: Path | None
    """What workers load; None at the beginning of a run."""
    state: Mapping[str, Any] | None
    """The run's own state at the checkpoint."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A directory that this process owns until `release`, and the point from which the run begins."""

    path: Path
    run_id: str
    """The run's name for servers. Restarts keep the name, so that servers refuse a replaced trainer."""
    lock: int
    """File descriptor of the lock, for children to inherit."""
    checkpoint: Path | None
    """What workers load; None at the beginning of a run."""
    state: Mapping[str, Any] | None
    """The run's own state at the checkpoint."""

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def at_latest_checkpoint(self) -> RunDirectory:
        """Return this directory, still owned, with the latest checkpoint as its starting point."""
        self.check_present()
        checkpoint, state = latest_checkpoint(self.path)
        remove_unfinished(self.path)
        return replace(self, checkpoint=checkpoint, state=state)

    def check_present(self) -> None:
        """Raise `CheckpointError` if the directory was deleted, or replaced by another one."""
        try:
            is_present = (self.path / "lock").stat().st_ino == os.fstat(self.lock).st_ino
        except OSError:
            is_present = False
        if not is_present:
            raise CheckpointError(
                f"run directory {str(self.path)!r} was deleted or replaced while the run was writing to it: its "
                "contents are lost. Start the run again"
            )

    def release(self) -> None:
        """Release the directory; surviving children still hold it."""
        os.close(self.lock)


def starting_point(path: Path, *, resume: bool) -> StartingPoint:
    """Return where a run in this directory would begin, without changing anything.

    Raises `ConfigError`, as `claim` does, if a running process owns the directory, if the directory is not writable, if
    it contains a run and ``resume`` is false, or if it contains none and ``resume`` is true.
    """
    if resume and not (path / "config.json").exists():
        raise ConfigError(f"{str(path)!r} holds no run to resume: start a new run without --resume")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = os.strerror(errno.EACCES if existing.is_dir() else errno.ENOTDIR)
        raise ConfigError(f"run directory {str(path)!r} cannot be used: {why}")
    _refuse_living_owner(path)
    return _last_checkpoint(path, resume=resume)


def _last_checkpoint(path: Path, *, resume: bool) -> StartingPoint:
    """Return the latest checkpoint of a directory. Raises `ConfigError` if there is one and ``resume`` is false."""
    checkpoint, state = latest_checkpoint(path)
    if checkpoint is not None and not resume:
        raise ConfigError(
            f"{str(path)!r} already holds a run: continue it with --resume, "
            "or choose another directory with --run.directory"
        )
    return StartingPoint(checkpoint, state)


def claim(path: Path, config_json: str, *, resume: bool, note: Callable[[str], None]) -> RunDirectory:
    """Take ownership of a run directory: a new one or, with ``resume``, the directory of an ended run.

    A run that ended before its first checkpoint starts over, with or without ``resume``. Remaining processes of a
    killed run are killed if they do not end in time. Raises `ConfigError` if another process owns the directory, if it
    contains a run and ``resume`` is false, if it contains none and ``resume`` is true, or if that run cannot be
    continued with the new settings; in these cases the directory is unchanged.
    """
    if resume and not (path / "config.json").exists():
        raise ConfigError(f"{str(path)!r} holds no run to resume: start a new run without --resume")
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir(exist_ok=True)
        with contextlib.ExitStack() as undo:
            lock = _take_lock(path / "lock", note)
            undo.callback(os.close, lock)
            start = _last_checkpoint(path, resume=resume)
            state = start.state
            if state is not None:
                changes = changed_settings(path, config_json)
                state = without_partials(state, changes)
                if changes:
                    described = "; ".join(describe_change(key, values) for key, values in changes.items())
                    note(f"settings that have changed since this run was started: {described}")
                write_config(path, config_json)
            if start.checkpoint is None:
                if (path / "config.json").exists():
                    note(f"the run in {path} ended before its first checkpoint, so it starts over")
                write_config(path, config_json)
                write_whole(path / "run_id", f"{path.name}-{uuid.uuid4().hex[:8]}\n")
            remove_unfinished(path)
            run_id = (path / "run_id").read_text().strip()
            undo.pop_all()
    except OSError as error:
        raise ConfigError(f"run directory {str(path)!r} cannot be used: {error.strerror}") from error
    return RunDirectory(path, run_id, lock, start.checkpoint, state)


def _take_lock(path: Path, note: Callable[[str], None]) -> int:
    """Return a descriptor that holds the lock. Raises `ConfigError`, which names the owner, if another run holds it."""
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
                    note(f"waiting for processes of the previous run to end: {names}")
                elif now > kill_at:
                    kill_at = now + _ORPHANS_S
                    note(f"killing processes of the previous run: {names}")
                    for pid in orphans:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            elif now > refuse_at:
                raise _already_owned(path.parent, lock)
            time.sleep(_POLL_S)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _refuse_living_owner(path: Path) -> None:
    """Raise `ConfigError` if a running process on this host owns the directory and does not end soon."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the directory has no owner
        return
    refuse_at = time.monotonic() + _OWNER_S
    try:
        while _owner(lock) in _holders(lock):
            if time.monotonic() > refuse_at:
                raise _already_owned(path, lock)
            time.sleep(_POLL_S)
    finally:
        os.close(lock)


def _already_owned(path: Path, lock: int) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} belongs to a run that has not ended ({os.pread(lock, 200, 0).decode()}): stop it first, or "
        "choose another directory with --run.directory"
    )


def _owner(lock: int) -> int | None:
    """Return the process id in the lock if it belongs to this host; otherwise None."""
    words = os.pread(lock, 200, 0).decode().split()
    return int(words[1]) if len(words) >= 4 and words[3] == socket.gethostname() else None


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _orphans(lock: int) -> list[int]:
    """Return the processes that hold the lock of a run whose controller has ended; none if it is running or unknown."""
    owner = _owner(lock)
    if owner is None:
        return []
    holders = _holders(lock)
    return [] if owner in holders else holders


def _holders(lock: int) -> list[int]:
    """Return the processes on this host that hold the lock, excluding those that only wait for it."""
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
