"""Who may still read shared memory: each reader holds a lock on a file of its own for as long as it might.

The system releases the lock however the reader ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

_PREFIX = "reader-"


class Reader:
    """One reader, in the directory beside the memory. Raises `OSError`."""

    def __init__(self, directory: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._path = directory / f"{_PREFIX}{secrets.token_hex(16)}"
        self._fd = os.open(self._path, flags, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Say that nothing is read any more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(fd)


class Readers:
    """Those who are reading beside ``directory`` now. The directory may be removed meanwhile. Raises `OSError`."""

    def __init__(self, directory: Path) -> None:
        self._fds: list[int] = []
        with os.scandir(directory) as entries:
            for name in [entry.name for entry in entries if entry.name.startswith(_PREFIX)]:
                with contextlib.suppress(FileNotFoundError):
                    self._fds.append(os.open(directory / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))

    def are_gone(self) -> bool:
        """Return whether none of them reads any more."""
        while self._fds:
            try:
                fcntl.flock(self._fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            os.close(self._fds.pop())
        return True
