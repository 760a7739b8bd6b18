"""Real ``inflight train`` processes for tests, forked from a zygote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaigns import places
from tests.gates import SOON_S
from tests.zygote import python

CONFIG = """
[run]
directory = "{directory}"
num_steps = 6
checkpoint_every_steps = 3
checkpoint_every_s = 100_000
restarts = 0

[model]
path = "{model}"

[task]
name = "tests.run.tasks:count_letters"

[sampling]
group_size = 4
max_tokens = 48

[servers]
max_concurrent = 32

[train]
tokens_per_worker = 600
max_tokens_per_micro_batch = 512
learning_rate = 1e-3
"""
GROUP_SIZE = 4
"""Of `CONFIG`."""
ROOT = Path(__file__).parents[2]


class RunProcess:
    """A run in a process of its own."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        *overrides: str,
        environment: dict[str, str] | None = None,
        max_file_bytes: int | None = None,
        config: Path | None = None,
        stdout: int | None = None,
    ) -> None:
        self.directory = directory / "run"
        directory.mkdir(parents=True, exist_ok=True)
        if config is None:
            config = directory / "run.toml"
            config.write_text(CONFIG.format(directory=self.directory, model=model))
        else:
            overrides = ("--run.directory", str(self.directory), "--model.path", str(model), *overrides)
        self.log = directory / "output.log"
        # A limit on file sizes, inherited by every child, fails writes as a full disk does.
        limit = [] if max_file_bytes is None else ["prlimit", f"--fsize={max_file_bytes}"]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*limit, python(), "-m", "inflight", "train", str(config), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **(environment or {})},
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 150.0) -> int:
        """Return the exit status; a run that hangs fails the test with its output."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run hangs: {self.output()[-3000:]}") from None

    def wait_for_steps(self, num_steps: int, timeout_s: float = 120.0) -> None:
        self.wait_until(lambda: len(self.rows()) >= num_steps, timeout_s)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self.process.poll() is not None  # before the condition: a run may meet it and end at once
            if condition():
                return
            assert not has_ended, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def rows(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of these kinds, in order."""
        path = self.directory / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] in kinds]

    def wait_for_events(
        self, kind: str, is_meant: Callable[[dict[str, Any]], bool], timeout_s: float = 120.0
    ) -> list[dict[str, Any]]:
        """Return the events that are meant, as soon as there is one."""
        self.wait_until(lambda: any(map(is_meant, self.events(kind))), timeout_s)
        return [event for event in self.events(kind) if is_meant(event)]

    def wait_for_output(self, text: str, timeout_s: float = 120.0) -> None:
        self.wait_until(lambda: text in self.output(), timeout_s)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def processes(self) -> dict[str, int]:
        """Process ids of the controller, the servers and the trainers that are alive, by name."""
        return places.processes(self.directory.parent)

    def servers(self) -> list[int]:
        """Process ids of the run's own servers."""
        return [json.loads(path.read_text())["pid"] for path in sorted((self.directory / "logs").glob("server-*.json"))]

    def server_urls(self) -> list[str]:
        """URLs of the run's own servers."""
        return [json.loads(path.read_text())["url"] for path in sorted((self.directory / "logs").glob("server-*.json"))]

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        if self.process.poll() is None:
            if (pid := self.processes().get("controller")) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait(10)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends_within(pid: int, timeout_s: float = SOON_S) -> bool:
    """Return whether a process ends, as soon as it does."""
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
