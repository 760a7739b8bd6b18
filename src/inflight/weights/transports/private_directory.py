"""Directories of one process, readable by its user only, that outlive it only until the next of their kind is made.

A lock on a file in it tells whether its process lives: the system takes the lock back when the process ends, however
it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "inflight-weights-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")  # whole: what is not named so is somebody else's
_LOCK = "lock"


class PrivateDirectory:
    """A new directory below ``parent``, mode 0700, with a random name, as ``path``.

    Those that killed processes of this user left below ``parent`` are removed. Raises `OSError`.
    """

    def __init__(self, parent: Path) -> None:
        remove_left_behind(parent)
        self.path, self._lock = _made(parent)

    def remove(self) -> None:
        """Remove it with all that is in it. What is still open or mapped somewhere stays readable there. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def remove_left_behind(parent: Path) -> None:
    """Remove what processes of this user that are gone left below ``parent``. Raises `OSError`."""
    for stale in _left_behind(parent):
        shutil.rmtree(stale, ignore_errors=True)  # another process may be removing it at this moment


def _made(parent: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor that holds its lock."""
    while True:
        path = parent / f"{_PREFIX}{secrets.token_hex(16)}"
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # it was taken for one left behind before it could be locked
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if _locked(lock) and os.fstat(lock).st_nlink:
                return path, lock
            os.close(lock)


def _left_behind(parent: Path) -> Iterator[Path]:
    """Yield the directories whose process is gone, each locked while it is in use by the caller."""
    with os.scandir(parent) as entries:
        names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
    for path in (parent / name for name in names):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            try:
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                path.rmdir()  # not locked yet; only an empty one goes, and its maker tries again
                continue
            try:
                if _locked(lock):
                    yield path
            finally:
                os.close(lock)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
