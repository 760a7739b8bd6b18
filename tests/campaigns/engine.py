"""The campaign's own server of a real engine, which outlives the runs that attach to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.contracts import EngineKind, EngineOptions
from inflight.engines.launch import EngineProcess, start_engine
from inflight.engines.process_tree import dead_part, vital_parts
from inflight.errors import InflightError
from inflight.http.kinds import load_engine_kind
from tests.campaigns.places import is_alive
from tests.campaigns.schedule import ENGINE, ENGINE_CORE

_CORES = {"vllm": "VLLM::EngineCor", "sglang": "sglang::schedul"}
"""Titles of the processes that sample; the kernel keeps 15 characters."""
_LOOK_S = 0.2
_PAUSE_S = 1.0
_START_S = 600.0
_ANSWER_S = 90.0
"""How long an engine that nothing strikes may take to answer a health check on a busy machine."""
_MAX_STARTS_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine of a campaign, and the environment that it is installed in."""

    name: str
    python: Path
    model: Path | None
    """A checkpoint of a real model; None: a tiny one."""

    @property
    def model_name(self) -> str:
        return "tiny" if self.model is None else self.model.name

    def version(self) -> str:
        """Return the release that is installed."""
        command = (  # a build for the CPU may have a name of its own
            "import importlib.metadata as found; "
            f"print(found.version(found.packages_distributions()[{self.name!r}][0]))"
        )
        done = subprocess.run([self.python, "-c", command], capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.strip()


class LiveEngine:
    """A server on a port of its own. It is started again there whenever a part of it has died, as by an operator."""

    def __init__(self, kind: EngineKind, options: EngineOptions, python: str, directory: Path) -> None:
        self._kind = kind
        self._options = options
        self._python = python
        self._directory = directory
        self._port = 0
        self._process: EngineProcess | None = None
        self._first = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._failure: BaseException | None = None
        self.num_starts = 0
        self.up_since: float | None = None
        """When it became healthy, by the monotonic clock; None: it is down, or about to be found dead."""
        self._operator = threading.Thread(target=self._operate, name="operator", daemon=True)
        self._operator.start()

    @property
    def address(self) -> str:
        """The URL that names it in a run's events."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """What a run attaches to."""
        return self.address.replace("http", f"{self._kind.name}+http", 1)

    def process_ids(self) -> dict[str, int]:
        """Return the processes to strike; none while it is down."""
        with self._changed:
            return {} if self.up_since is None or self._process is None else engine_parts(self._process.pid)

    def condemn(self) -> None:
        """Let it count as down until it has been started again; called right before its death."""
        with self._changed:
            self.up_since = None

    def wait_until_up(self) -> str | None:
        """Wait until it answers health checks. One that does not is started again; returns what was wrong with it.

        Raises `KeyboardInterrupt` once it is being closed, and `RuntimeError` if it cannot be started.
        """
        problem = None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self.up_since is not None or self._failure is not None or self._is_closing, _START_S
                )
                if self._is_closing:
                    raise KeyboardInterrupt
                if self.up_since is None:
                    raise RuntimeError(f"the engine does not start: {self._failure}")
            if self._answers():
                return problem
            if self._is_closing:
                continue
            problem = f"the engine did not answer for {_ANSWER_S:.0f} s after the run, and was started again"
            self.replace()

    def replace(self) -> None:
        """Start it again, although it lives."""
        self.condemn()
        with self._changed:
            if self._process is not None:
                self._process.stop(at_once=True)

    def close(self) -> None:
        """End it, and all that came of it."""
        self._is_closing = True
        with self._changed:
            self._changed.notify_all()
            if self._process is not None:
                self._process.stop(at_once=True)
        self._operator.join(60.0)

    def _answers(self) -> bool:
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and not self._is_closing:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(self.address + self._kind.health_path, timeout=10.0) as answer,
            ):
                if answer.status == 200:
                    return True
            time.sleep(_LOOK_S)
        return False

    def _operate(self) -> None:
        failures = 0
        while not self._is_closing:
            log = self._directory / f"engine-{self.num_starts}.log"
            self.num_starts += 1
            try:
                with self._changed:
                    process = self._process = start_engine(
                        self._kind, self._options, python=self._python, port=self._port, log=log
                    )
                    self._port = int(process.url.rpartition(":")[2])
                if self._is_closing:
                    process.stop(at_once=True)
                    return
                asyncio.run(process.wait_until_healthy(_START_S))
            except InflightError as error:
                if self._process is not None:
                    self._process.stop(at_once=True)
                failures += 1
                time.sleep(_PAUSE_S)
                if failures == _MAX_STARTS_IN_A_ROW:
                    with self._changed:
                        self._failure = error
                        self._changed.notify_all()
                    return
                continue
            failures = 0
            first, parts = vital_parts(process.pid)
            with self._changed:
                self.up_since = time.monotonic()
                self._changed.notify_all()
            while not self._is_closing and dead_part(first, parts) is None and is_alive(first):
                time.sleep(_LOOK_S)
            with self._changed:
                self.up_since = None
            process.stop(at_once=True)


def engine_parts(supervisor: int) -> dict[str, int]:
    """Return the process that serves, and the one that samples, of the engine that was started by ``supervisor``."""
    first, parts = vital_parts(supervisor)
    found = {ENGINE: first} if first else {}
    for pid, part in parts.items():
        if part.name in _CORES.values():
            found[ENGINE_CORE] = pid
    return found


def engine_of_server(server: int) -> dict[str, int]:
    """Return the parts of the engine behind a process of ``inflight serve --engine``."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            if parent == server and b"supervise.py" in (entry.parent / "cmdline").read_bytes():
                return engine_parts(int(entry.parent.name))
    return {}


@contextlib.contextmanager
def live_engine(choice: EngineChoice | None, model: Path, directory: Path) -> Iterator[LiveEngine | None]:
    """Yield the campaign's own server, which has been started but may not be up yet; None without a choice."""
    if choice is None:
        yield None
        return
    directory.mkdir(parents=True, exist_ok=True)
    dtype = "float32" if choice.model is None else "bfloat16"
    options = EngineOptions(model=model, dtype=dtype, threads=1, max_concurrent=16, max_model_len=1024)
    engine = LiveEngine(load_engine_kind(choice.name), options, str(choice.python), directory)
    try:
        yield engine
    finally:
        engine.close()


class GroupsOfEngine:
    """Follows a run's events, and counts the groups that the engine has sampled since a mark."""

    def __init__(self, events: Path) -> None:
        self._events = events
        self._offset = 0
        self.addresses = set[str]()
        """Every address that the engine has had in this run."""
        self.num_groups = 0
        """All of them since the last `begin`."""
        self.num_since = 0
        """Those since the last `mark`."""
        self.joined_s = 0.0
        """When the engine last joined the run, in seconds of its events; 0 if it took part from the beginning."""
        self.num_issued = 0
        """Requests to any server that began after the engine had joined."""

    def begin(self) -> None:
        """Skip what is there already."""
        with contextlib.suppress(FileNotFoundError):
            self._offset = self._events.stat().st_size
        self.num_groups = self.num_since = self.num_issued = 0
        self.joined_s = 0.0

    def mark(self) -> None:
        self.look()
        self.num_since = 0

    def look(self) -> int:
        """Return how many groups the engine has sampled since the mark."""
        with contextlib.suppress(FileNotFoundError), self._events.open("rb") as file:
            size = file.seek(0, 2)
            if size < self._offset:  # the run has dropped what followed its checkpoint
                self._offset = 0 if size == 0 else size
            file.seek(self._offset)
            lines = file.read().split(b"\n")
            self._offset += sum(len(line) + 1 for line in lines[:-1])
            for line in lines[:-1]:
                with contextlib.suppress(ValueError):
                    self._read(json.loads(line))
        return self.num_since

    def _read(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "group" if event["endpoint"] in self.addresses:
                self.num_groups += 1
                self.num_since += 1
            case "fleet_changed" if self.addresses.intersection((*event["joined"], *event["restored"])):
                self.joined_s, self.num_issued = event["end_s"], 0
            case "request":
                self.num_issued += event["start_s"] > self.joined_s
