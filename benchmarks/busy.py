"""Other work on the machine while something is measured."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy_processes(num: int) -> Iterator[None]:
    """Keep processors busy, each by a process with a session of its own."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(num)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
