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
from tests.campaigns.engine import GroupsOfEngine, LiveEngine, engine_of_server
from tests.campaigns.schedule import CONTROLLER, ENGINE_PARTS, ENGINE_SERVER, Schedule, Strike
from tests.campaigns.settings import settings_of, urls_file

ROOT = Path(__file__).parents[2]
PACED_AFTER = 1
"""After so many steps in which an engine has not sampled, although nothing struck it, rewards are delayed, too."""
_DISK_MB = 16
_POLL_S = 0.02
_LOOK_EVERY_S = 0.5
_IMPORTS_S = 120.0
"""What plainly started processes of a busy machine may take to import everything, which no deadline counts."""
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
    was_engine_down: bool = False
    """Whether the engine that it attaches to was down at some time."""
    num_engine_groups: int = 0
    """How many groups the engine sampled."""
    num_groups_since: int = 0
    """The same since the engine was last struck, or became healthy."""
    num_issued_since_joined: int = 1
    """How many requests began, on any server, after the engine had joined the run."""
    engine_up_s: float = 0.0
    """How long the engine was healthy, without a strike, until the end."""

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
    engine_problem: str | None = None
    """What was wrong with the campaign's engine after the run."""

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.place / "disk" / "run"


class Disturbed:
    """Plays a schedule in a place of its own below ``parent``; raises `KeyboardInterrupt` once ``stopping`` is set."""

    def __init__(
        self,
        schedule: Schedule,
        parent: Path,
        model: Path,
        python: str,
        stopping: threading.Event,
        engine: LiveEngine | None = None,
        engine_python: Path | None = None,
    ) -> None:
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
        self._engine = engine if schedule.engine is not None and schedule.engine.is_attached else None
        self._engine_python = engine_python
        self._engine_server = "" if schedule.engine is None else f"server-1-{schedule.engine.name}"
        """What the run calls its own server of the engine."""
        self._groups = GroupsOfEngine(self.record.directory / "events.jsonl")
        self._engine_since = 0.0
        """Since when the engine has been healthy and not been struck."""
        if self._engine is not None:
            urls_file(self._place).write_text(f"{self._engine.url}\n")

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
        self._groups.begin()
        controller = self._start(output, resume=(self.record.directory / "config.json").exists())
        self._frozen = []
        started = moved = self._engine_since = time.monotonic()
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
                    if strike.target in self._schedule.engine_targets:
                        self._groups.mark()
                        self._engine_since = now + (strike.lasts_s or 0.0)
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
                if self._schedule.engine is not None:
                    self._look_at_engine(incarnation, now)
            deadlines = self._schedule.deadlines
            imports_s = _IMPORTS_S * self._schedule.is_plain
            limit_s = deadlines.quiet_s if has_begun else deadlines.start_quiet_s + imports_s
            if now - moved > limit_s:
                incarnation.hang = f"nothing happened for {limit_s:.0f} s at version {step}, and the run did not end"
                break
            time.sleep(_POLL_S)
        if incarnation.hang is not None:
            controller.kill()
        if self._schedule.engine is not None:
            self._look_at_engine(incarnation, time.monotonic())
        incarnation.exit = controller.wait(30.0)
        incarnation.seconds = time.monotonic() - started
        for _, undone in undo:
            undone()
        self._after(incarnation)
        incarnation.said = output.read_text(errors="replace")
        return incarnation

    def _start(self, output: Path, *, resume: bool) -> subprocess.Popen[bytes]:
        settings = settings_of(self._schedule, self._place, self._model, self._engine_python)
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
                    "TORCHINDUCTOR_CACHE_DIR": str(self._place.parent / "torch-cache"),  # engines compile, and keep it
                    "COLUMNS": "1000",
                    places.TAG: str(self._place),
                },
                start_new_session=True,
            )

    def _is_there(self, strike: Strike) -> bool:
        """Return whether what is to be struck at the start has been started."""
        return not strike.is_of_process or self._process_id(strike.target) is not None

    def _process_id(self, target: str) -> int | None:
        """Return the live process that a strike means."""
        if target not in ENGINE_PARTS:
            return places.processes(self._place).get(target)
        if self._engine is not None:
            return self._engine.process_ids().get(target)
        server = places.processes(self._place).get(self._engine_server)
        if server is None or target == ENGINE_SERVER:
            return server
        return engine_of_server(server).get(target)

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
        pid = self._process_id(strike.target)
        if pid is None:
            incarnation.strikes.remove(strike)
            incarnation.missed.append(strike)
            return None
        if strike.kind == "connections cut":
            places.cut_connections(pid)
            return None
        if self._engine is not None and strike.target in ENGINE_PARTS and strike.kind == "SIGKILL":
            self._engine.condemn()
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
        for name in ("slow", "raise", "hang", "wait"):
            (self._place / "control" / name).unlink(missing_ok=True)
        for name in ("disk", "store"):
            (self._place / name / "ballast").unlink(missing_ok=True)
        was_killed = incarnation.exit < 0
        if was_killed:  # it could not stop its children: those that are stopped cannot see that it is gone
            for pid in self._frozen:
                _signal(pid, signal.SIGKILL)
        if was_killed and (self._schedule.resumes_at_once or self._schedule.is_leased):
            return
        deadline = time.monotonic() + (self._schedule.deadlines.gone_s if was_killed else 1.0)
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

    def _look_at_engine(self, incarnation: Incarnation, now: float) -> None:
        """Note whether the engine takes part; until it does, rewards are delayed, so that the run lasts."""
        if self._engine is not None:
            self._groups.addresses.add(self._engine.address)
            up_since = self._engine.up_since
            is_up = up_since is not None
            incarnation.was_engine_down |= not is_up
            if up_since is not None and up_since > self._engine_since:
                self._engine_since = up_since
                self._groups.mark()
        else:
            with contextlib.suppress(OSError, ValueError):
                ready = json.loads((self.record.directory / "logs" / f"{self._engine_server}.json").read_text())
                self._groups.addresses.add(ready["url"])
            is_up = self._engine_server in places.processes(self._place)
        if now < self._engine_since or (self._engine is not None and not is_up):
            self._groups.mark()
        incarnation.num_groups_since = self._groups.look()
        incarnation.num_engine_groups = self._groups.num_groups
        incarnation.num_issued_since_joined = self._groups.num_issued
        incarnation.engine_up_s = max(0.0, now - self._engine_since) if is_up else 0.0
        wait = self._place / "control" / "wait"
        is_late = incarnation.version >= incarnation.resumed_version + PACED_AFTER
        was_struck = any(strike.target in self._schedule.engine_targets for strike in incarnation.strikes)
        if incarnation.num_groups_since > 0:
            wait.unlink(missing_ok=True)
        elif (is_late or was_struck or incarnation.was_engine_down) and not wait.exists():
            wait.touch()

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
