"""Processes of tests of dialects, and the ports at which they meet."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.servers import TOKEN
from tests.zygote import python


class Program:
    """A process of ours or of a stand-in's."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        environment = {**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [python(), "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=environment,
                text=True,
            )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return line

    def line_with(self, words: str) -> str:
        while words not in (line := self.line()):
            pass
        return line

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
