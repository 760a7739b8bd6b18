"""Finds the line of the implementation at which an error was raised, rather than a line of a library or of the kit."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import inflight

_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = tuple(
    Path(path).resolve()
    for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(inflight.__file__).parent)
)


def own_frame(error: BaseException) -> str | None:
    """Return the innermost frame outside installed packages, the standard library and inflight, or None if there is
    none.

    If the error was raised from another error, the other error's frame takes precedence.
    """
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    for raised in reversed(causes):
        for frame in reversed(traceback.extract_tb(raised.__traceback__)):
            if not _is_library(frame.filename):
                return _text(frame)
    return None


def innermost_frame(error: BaseException) -> str:
    """Return where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return _text(frames[-1]) if frames else "an unknown place"


def _text(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _is_library(filename: str) -> bool:
    if filename.startswith("<"):  # frozen modules, and code compiled from strings
        return True
    path = Path(filename).resolve()
    return any(part in _INSTALLED for part in path.parts) or any(path.is_relative_to(root) for root in _LIBRARIES)
