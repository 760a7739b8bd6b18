"""Directories that belong to one process and that only its user can read.

The directories of a dead process are removed when the next directory is created.

The process holds a lock on a file in its directory. The operating system releases the lock no matter how the process
ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "inflight-weights-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")  # the whole name, because other directories may match a part
_LOCK = "lock"


class PrivateDirectory:
    """A new directory ``path`` in ``parent``, with a random name and the mode 0700.

    The constructor removes directories that killed processes of this user left behind in ``parent``. Raises `OSError`.
    """

    def __init__(self, parent: Path) -> None:
        remove_left_behind(parent)
        while True:
            self.path = parent / f"{_PREFIX}{secrets.token_hex(16)}"
            self.path.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # another process removed it before it was locked
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._lock = os.open(self.path / _LOCK, flags, 0o600)
                if _try_lock(self._lock) and os.fstat(self._lock).st_nlink:
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Remove the directory with its contents. Processes that have its files open or mapped can still read them.
        Idempotent.
        """
        lock, self._lock = self._lock, -1
        if lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def remove_left_behind(parent: Path) -> None:
    """Remove the directories that dead processes of this user left behind in ``parent``. Raises `OSError`."""
    with os.scandir(parent) as entries:
        names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
    for path in (parent / name for name in names):
        with contextlib.suppress(OSError):  # removed meanwhile, or not ours
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            try:
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                path.rmdir()  # not locked yet; rmdir removes it only if it is empty, and its creator then tries again
                continue
            try:
                if _try_lock(lock):
                    shutil.rmtree(path, ignore_errors=True)  # another process may be removing it too
            finally:
                os.close(lock)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def memory_directory() -> Path:
    """Return the directory whose files are in this host's memory, or else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
