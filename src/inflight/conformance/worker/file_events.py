"""Events that announce a change to a file, for checks that observe or disturb a save."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.")
_WRITES = os.O_WRONLY | os.O_RDWR

Listener = Callable[[str, tuple[Any, ...]], None]
"""Receives the name and the arguments of an audit event, in the thread that is about to act. If it raises an error,
that thread's call fails with it."""

_listeners: list[Listener] = []
"""The listeners that currently receive events. An audit hook cannot be removed from a process."""


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener before every change to a file that this process makes through Python during the block."""
    if not hasattr(listening, "hook"):
        vars(listening)["hook"] = _note
        sys.addaudithook(_note)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _listeners and (event.startswith(_CHANGES) or (event == "open" and bool(arguments[2] & _WRITES))):
        for listener in [*_listeners]:
            listener(event, arguments)


class FullDisk:
    """A listener that simulates a full disk for one of the files that are opened for writing below a directory.

    It refuses the file whose name is the ``number``-th distinct name to be opened, counted from 0.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self._directory, self._number = directory, number
        self._names: list[str] = []
        self.refused = ""
        """The name of that file once it has been refused; empty before."""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or (file := path_of(arguments)) is None or not file.is_relative_to(self._directory):
            return
        if file.name not in self._names:
            self._names.append(file.name)
        if self._names.index(file.name) == self._number:
            self.refused = file.name
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))


def path_of(arguments: tuple[Any, ...]) -> Path | None:
    """Return the absolute path that an event concerns (for a rename, the old one), or None if it has none, such as for
    an open descriptor."""
    path = arguments[0] if arguments else None
    return Path(os.path.abspath(os.fsdecode(path))) if isinstance(path, str | bytes | os.PathLike) else None
