"""What takes long to make and no test changes is made by one worker of xdist for all of them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that ``make`` has filled, in this process or in another worker of the same session."""
    own = factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    is_made = directory.with_suffix(".made")
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(directory, ignore_errors=True)  # of a worker that failed
            directory.mkdir()
            make(directory)
            is_made.touch()
    return directory
