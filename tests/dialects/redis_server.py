"""A real Redis server for tests, without persistence."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.gates import reserved_port


@contextlib.contextmanager
def running_redis(directory: Path, password: str = "") -> Iterator[int]:
    """Run ``redis-server`` on the loopback address; yields its port once it accepts connections."""
    directory.mkdir(parents=True, exist_ok=True)
    port = reserved_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    if password:
        command += ["--requirepass", password]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            lines = []
            while not lines or "Ready to accept connections" not in lines[-1]:
                lines.append(process.stdout.readline())
                assert lines[-1], "".join(lines)
            yield port
        finally:
            process.terminate()
