"""One disturbed run: its incarnations, what strikes them, and what was seen meanwhile. Judges nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns import places
from tests.campaigns.schedule import (
    CONTROLLER,
    GENERATE_TIMEOUT_S,
    PUBLISH_DEADLINE_S,
    REWARD_TIMEOUT_S,
    START_TIMEOUT_S,
    STEP_TIMEOUT_S,
    STOP_S,
    Schedule,
    Strike,
)

ROOT = Path(__file__).parents[2]
GROUP_SIZE = 4
KEEPS = 2
_DISK_MB = 16
_POLL_S = 0.02
_LOOK_EVERY_S = 0.5
_QUIET_S = STEP_TIMEOUT_S + PUBLISH_DEADLINE_S + 2 * STOP_S + 20.0
"""Longest time without a step, an end, or a strike: the longest deadlines in a row, and time for a busy machine."""
_START_QUIET_S = START_TIMEOUT_S + PUBLISH_DEADLINE_S + 2 * STOP_S + 20.0
_IMPORTS_S = 120.0
"""What plainly started processes of a busy machine may take to import everything, which no deadline counts."""
_GONE_S = 2 * STOP_S + 5.0
"""How long processes of a killed run may take to notice."""
_BESIDE_S = 25.0


@dataclass(slots=True)
class Incarnation:
    """One start of the run, to its end."""

    index: int
    resumed: dict[str, Any] | None
    """State of the checkpoint that it was resumed from."""
    resumed_version: int
    strikes: list[Strike] = field(default_factory=list)
    missed: list[Strike] = field(default_factory=list)
    """Strikes whose target did not live any more."""
    exit: int = 0
    said: str = ""
    """All that the controller printed."""
    seconds: float = 0.0
    version: int = 0
    hang: str | None = None
    was_put_down: bool = False
    """Whether it was killed at the end, after its controller was stopped for good."""
    left: list[str] = field(default_factory=list)
    """What was still there after it."""

    @property
    def last_line(self) -> str:
        """The last line of its own."""
        lines = [line for line in self.said.splitlines() if line.startswith("inflight: ")]
        return lines[-1].removeprefix("inflight: ") if lines else ""


@dataclass(slots=True)
class Record:
    """Everything that was seen of one run."""

    schedule: Schedule
    place: Path
    incarnations: list[Incarnation] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str | None = None

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.place / "disk" / "run"


class Disturbed:
    """Plays a schedule in a place of its own below ``parent``; raises `KeyboardInterrupt` once ``stopping`` is set."""

    def __init__(self, schedule: Schedule, parent: Path, model: Path, python: str, stopping: threading.Event) -> None:
        self._schedule = schedule
        self._stopping = stopping
        self._model = model
        self._python = python
        self._place = parent / f"run-{schedule.seed}"
        shutil.rmtree(self._place, ignore_errors=True)
        for name in ("disk", "store", "tmp", "control"):
            (self._place / name).mkdir(parents=True)
        self.record = Record(schedule, self._place)
        self._sockets: set[str] = set()
        self._shared: set[str] = set()
        self._frozen: list[int] = []
        """Processes that were stopped for good."""

    def play(self) -> Record:
        """Run, strike and resume until it is done, or until an incarnation that nothing struck does not end as it
        should.
        """
        started = time.monotonic()
        needs_cut = any(strike.kind == "connections cut" for strike in self._schedule.strikes)
        reasons = [places.can_mount()] * self._schedule.needs_disk + [places.can_cut()] * needs_cut
        if any(reasons):
            self.record.skipped = next(reason for reason in reasons if reason is not None)
            return self.record
        mounted = [self._place / name for name in ("disk", "store") if self._schedule.needs_disk]
        try:
            for path in mounted:
                places.mount(path, _DISK_MB)
            pending = list(self._schedule.strikes)
            while True:
                incarnation = self._live(pending)
                self.record.incarnations.append(incarnation)
                undisturbed = not incarnation.strikes and not incarnation.missed
                if (
                    incarnation.exit == 0
                    or incarnation.hang is not None
                    or undisturbed
                    or len(self.record.incarnations) > 8
                ):
                    break
            self.record.seconds = time.monotonic() - started
        finally:
            self._kill_all()
        return self.record

    def close(self) -> None:
        """Remove what the run wrote."""
        for name in ("disk", "store"):
            if self._schedule.needs_disk:
                with contextlib.suppress(OSError):
                    places.unmount(self._place / name)
        shutil.rmtree(self._place, ignore_errors=True)

    # -------------------------------------------------------------------------------------------------- one incarnation

    def _live(self, pending: list[Strike]) -> Incarnation:
        version, state = self._latest()
        incarnation = Incarnation(len(self.record.incarnations), state, version, version=version)
        self._note(incarnation)
        output = self._place / "output.log"
        output.unlink(missing_ok=True)
        controller = self._start(output, resume=(self.record.directory / "config.json").exists())
        self._frozen = []
        started = moved = time.monotonic()
        reached = started
        looked, seen = 0.0, self._stat()
        step, undo = version if incarnation.index else -1, list[tuple[float, Any]]()
        has_begun = False
        while controller.poll() is None:
            if self._stopping.is_set():
                raise KeyboardInterrupt
            now = time.monotonic()
            if (stat := self._stat()) != seen:
                seen, found = stat, self._last_version()
                if found is not None and found != step:
                    incarnation.version = step = found
                    reached = moved = now
                    has_begun = True
            if pending:
                strike = pending[0]
                is_begun = strike.step < 0 or (step >= strike.step and (has_begun or incarnation.index == 0))
                since = started if strike.step < 0 or not has_begun else reached
                is_there = strike.step >= 0 or has_begun or self._is_there(strike)
                if is_begun and is_there and now >= since + strike.delay_s:
                    pending.pop(0)
                    moved = now
                    self._look()
                    undone = self._strike(strike, incarnation, controller)
                    if undone is not None and strike.lasts_s is not None:
                        undo.append((now + strike.lasts_s, undone))
                    if incarnation.was_put_down:
                        break
            for due in [item for item in undo if item[0] <= now]:
                undo.remove(due)
                due[1]()
                moved = now
            if now - looked > _LOOK_EVERY_S:
                looked = now
                self._look()
            limit_s = _QUIET_S if has_begun else _START_QUIET_S + _IMPORTS_S * self._schedule.is_plain
            if now - moved > limit_s:
                incarnation.hang = f"nothing happened for {limit_s:.0f} s at version {step}, and the run did not end"
                break
            time.sleep(_POLL_S)
        if incarnation.hang is not None:
            controller.kill()
        incarnation.exit = controller.wait(30.0)
        incarnation.seconds = time.monotonic() - started
        for _, undone in undo:
            undone()
        self._after(incarnation)
        incarnation.said = output.read_text(errors="replace")
        return incarnation

    def _start(self, output: Path, *, resume: bool) -> subprocess.Popen[bytes]:
        settings = {
            "run.directory": str(self.record.directory),
            "run.num_steps": str(self._schedule.num_steps),
            "run.seed": str(self._schedule.seed),
            "run.keep_checkpoints": str(KEEPS),
            "run.start_timeout_s": f"{START_TIMEOUT_S:g}",
            "run.step_timeout_s": f"{STEP_TIMEOUT_S:g}",
            "run.save_timeout_s": f"{STEP_TIMEOUT_S:g}",
            "model.path": str(self._model),
            "task.name": "tests.campaigns.task:letters",
            "task.params.control": str(self._place / "control"),
            "task.params.long_every": str(self._schedule.long_every),
            "task.reward_timeout_s": f"{REWARD_TIMEOUT_S:g}",
            "sampling.group_size": str(GROUP_SIZE),
            "sampling.max_tokens": "24",
            "servers.count": "2",
            "servers.max_concurrent": "16",
            "updates.deadline_s": f"{PUBLISH_DEADLINE_S:g}",
            "sampling.generate_timeout_s": f"{GENERATE_TIMEOUT_S:g}",
            "train.num_ranks": "2",
            "train.tokens_per_worker": "400",
            "train.max_tokens_per_micro_batch": "512",
            "train.learning_rate": "5e-3",
            **self._schedule.overrides,
        }
        if settings["updates.transport"] == "file":
            settings["updates.directory"] = str(self._place / "store")
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        command = [self._python, "-m", "inflight", "train", str(ROOT / "examples" / "quickstart.toml"), *arguments]
        with output.open("wb") as file:
            return subprocess.Popen(
                [*command, *(["--resume"] if resume else [])],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
                    "TMPDIR": str(self._place / "tmp"),
                    "COLUMNS": "1000",
                    places.TAG: str(self._place),
                },
                start_new_session=True,
            )

    def _is_there(self, strike: Strike) -> bool:
        """Return whether what is to be struck at the start has been started."""
        return not strike.is_of_process or strike.target in places.processes(self._place)

    def _strike(self, strike: Strike, incarnation: Incarnation, controller: subprocess.Popen[bytes]) -> Any:
        """Strike; returns what undoes it, if that can be undone."""
        incarnation.strikes.append(strike)
        if strike.kind.startswith("full"):
            ballast = places.fill(self._place / strike.target)
            assert places.is_full(self._place / strike.target), "the disk is not full"
            return lambda: ballast.unlink(missing_ok=True)
        if strike.target == "reward":
            file = (
                self._place
                / "control"
                / {"slow rewards": "slow", "reward raises": "raise", "reward hangs": "hang"}[strike.kind]
            )
            file.touch()
            return lambda: file.unlink(missing_ok=True)
        pid = places.processes(self._place).get(strike.target)
        if pid is None:
            incarnation.strikes.remove(strike)
            incarnation.missed.append(strike)
            return None
        if strike.kind == "connections cut":
            places.cut_connections(pid)
            return None
        _signal(pid, getattr(signal, strike.kind))
        if strike.kind != "SIGSTOP":
            return None
        if strike.lasts_s is None:
            self._frozen.append(pid)
            if strike.target == CONTROLLER:
                self._beside(incarnation)
                incarnation.was_put_down = True
                _signal(pid, signal.SIGKILL)
                self._frozen.remove(pid)
        return lambda: _signal(pid, signal.SIGCONT)

    def _beside(self, incarnation: Incarnation) -> None:
        """Start a second run in the directory of one that is stopped: it has to be refused."""
        output = self._place / "beside.log"
        second = self._start(output, resume=True)
        try:
            status = second.wait(_BESIDE_S)
            said = output.read_text(errors="replace")
            if status != 1 or "Traceback" in said:
                incarnation.left.append(
                    f"a second run beside the stopped one ended with status {status}: {said[-300:]}"
                )
        except subprocess.TimeoutExpired:
            incarnation.left.append("a second run was started beside the stopped one, and was not refused")
            for name, pid in places.processes(self._place).items():
                if name == "beside":
                    _signal(pid, signal.SIGKILL)
            second.wait(30.0)

    def _after(self, incarnation: Incarnation) -> None:
        """Look what is left once the controller is gone, and clear away what the campaign itself stopped for good."""
        for name in ("slow", "raise", "hang"):
            (self._place / "control" / name).unlink(missing_ok=True)
        for name in ("disk", "store"):
            (self._place / name / "ballast").unlink(missing_ok=True)
        was_killed = incarnation.exit < 0
        if was_killed:  # it could not stop its children: those that are stopped cannot see that it is gone
            for pid in self._frozen:
                _signal(pid, signal.SIGKILL)
        if was_killed and self._schedule.resumes_at_once:
            return
        deadline = time.monotonic() + (_GONE_S if was_killed else 1.0)
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        incarnation.left += left
        if not was_killed:
            incarnation.left += [f"{path} is in shared memory" for path in sorted(self._shared) if Path(path).exists()]
            incarnation.left += [f"temporary file {path}" for path in sorted((self._place / "tmp").rglob("*"))]
        if left:
            self._kill_all()

    def _left(self) -> list[str]:
        """Return which processes are alive and which ports are open. A process whose first thread has ended counts as
        dead, but its sockets are open until its other threads have ended too."""
        ports = [f"port {port} is listened on" for port in places.listening(self._sockets)]
        return [*places.belongings(self._place).values(), *ports]

    def _kill_all(self) -> None:
        for pid in places.belongings(self._place):
            _signal(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        while places.belongings(self._place) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    # ------------------------------------------------------------------------------------------------ what is seen

    def _look(self) -> None:
        """Note which sockets and which shared memory the run holds."""
        sockets, shared = places.held_by(list(places.processes(self._place).values()))
        self._sockets |= sockets
        self._shared |= shared

    def _note(self, incarnation: Incarnation) -> None:
        """Write the start of an incarnation into the task's own record."""
        with (self._place / "control" / "record.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "incarnation", "index": incarnation.index}) + "\n")

    def _latest(self) -> tuple[int, dict[str, Any] | None]:
        """Return version and state of the latest checkpoint; 0 and None if there is none."""
        checkpoints = self.record.directory / "checkpoints"
        try:
            version = json.loads((checkpoints / "latest.json").read_text())["version"]
            return version, json.loads((checkpoints / f"version-{version:06d}.json").read_text())
        except (OSError, ValueError):
            return 0, None

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = (self.record.directory / "metrics.jsonl").stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _last_version(self) -> int | None:
        try:
            lines = (self.record.directory / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
            return int(json.loads(lines[-1])["version"]) if lines else None
        except (OSError, ValueError):
            return None


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
