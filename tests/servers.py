"""Real ``inflight serve`` processes for tests, forked from a zygote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.zygote import python

TOKEN = "test-token"


class ServerProcess:
    """A server in a process of its own, stopped with the test process at the latest."""

    def __init__(
        self, model: Path, directory: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._ready_file = directory / "ready.json"
        self._log = directory / "server.log"
        command = [python(), "-m", "inflight", "serve", str(model), "--port", "0", "--exit-with-stdin"]
        command += ["--ready-file", str(self._ready_file), "--threads", "1", "--name", "tiny", *arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **(environment or {})},
                start_new_session=True,
            )
        self.url = ""
        self.pid = 0
        """Of the server itself, once it is ready; ``process`` may only stand for it."""

    def wait_until_ready(self, timeout_s: float = 90.0) -> None:
        """Wait for the ready file; fail with the log if the server ends or the time is up."""
        deadline = time.monotonic() + timeout_s
        while not self._ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start: {self.log()}")
            time.sleep(0.05)
        ready = json.loads(self._ready_file.read_text())
        self.url, self.pid = ready["url"], ready["pid"]

    def log(self) -> str:
        """Return what the server wrote."""
        return self._log.read_text(errors="replace")

    def stop_in_place(self) -> None:
        """SIGSTOP: the process hangs with its sockets open."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Close its input, which ends it and what it started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid or self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=60)
        if self.process.stdin is not None:
            self.process.stdin.close()
