"""The kit runs checks on a target in processes that it can kill, and returns the verdicts on the checks.

A check that blocks or kills its process affects only that process: the kit records the stacks of the process, kills it
and everything that it started, and runs the next check in a new process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from inflight.base.openmp import WAIT_ASLEEP
from inflight.conformance.checks import Check
from inflight.conformance.child import ChildReady, ChildSetup, Command
from inflight.conformance.judge import Judgement, verdict_of
from inflight.conformance.targets import SERVER_GROUP, EndpointTarget, Target, WorkerTarget
from inflight.conformance.verdicts import CheckOutcome, Verdict, merged
from inflight.errors import ConfigError
from inflight.wire import WireModel

Message = TypeVar("Message", bound=WireModel)

_CLOSE_S = 25.0
"""Time limit for restoring the original weights of a server that outlives the kit."""
_PREPARE_S = 20.0
"""Time limit for restoring the subject before a check, on top of the time for restarting it and the check's
deadline."""


class Gone(NamedTuple):
    """A subject that could not be restored."""

    since: str
    """The id of the last check that ran if it failed, otherwise the id of the first check that could not run."""
    why: str


class Kit:
    """Runs checks on one target. Use it as a context manager; checks may run in any order and more than once.

    ``start_deadline_s`` limits how long creating the subject may take: importing its factory, loading its model, and
    joining its ranks. ``deadline_scale`` multiplies the deadline of every check, for slow machines.
    """

    is_over = False
    """Always False: each check can run in new processes, so further checks can always run."""

    def __init__(self, target: Target, *, start_deadline_s: float = 90.0, deadline_scale: float = 1.0) -> None:
        self._target = target
        self._deadline_scale = deadline_scale
        self._start_deadline_s = start_deadline_s * deadline_scale
        self._directory = Path(tempfile.mkdtemp(prefix="inflight-check-"))
        self._sessions: dict[int, _Session] = {}
        self._num_sessions = 0
        self._facts: Mapping[str, Any] = {}
        self._last: Verdict | None = None
        """The verdict on the last check that has run."""
        self._unmakable: ConfigError | None = None
        self.gone: Gone | None = None
        """Since which check, and why, the subject cannot be restored; None while it is available."""
        self.start_seconds = 0.0
        """Seconds spent so far on starting processes and restoring the subject between checks."""

    def __enter__(self) -> Kit:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            for session in self._sessions.values():
                session.kill()
        self.close()

    @property
    def target(self) -> Target:
        return self._target

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts that the subject reports about itself. Raises `ConfigError` if the subject cannot be created."""
        if not self._facts:
            self._session(self._num_ranks)
        return self._facts

    @property
    def _num_ranks(self) -> int:
        return self._target.num_ranks if isinstance(self._target, WorkerTarget) else 1

    def run(self, check: Check) -> Verdict:
        """Return the verdict on one check. Raises `ConfigError` if the subject cannot be created.

        If an endpoint cannot be restored, further checks are skipped until it can be. `gone` records the check with
        which this began.
        """
        try:
            verdict, is_gone = self._judged(check)
        except ConfigError as error:
            if self._last is None or not isinstance(self._target, EndpointTarget):
                raise
            self._unmakable = error
            verdict, is_gone = verdict_of(check, CheckOutcome.FAILED, message=str(error)), True
        if not is_gone:
            if verdict.outcome is not CheckOutcome.SKIPPED:  # a skipped check does not use the subject
                self._last, self.gone = verdict, None
            return verdict
        if self.gone is None:
            was_good = self._last is None or self._last.outcome is CheckOutcome.PASSED
            self.gone = Gone(check.id if self._last is None or was_good else self._last.id, verdict.message)
        if self.gone.since == check.id:
            message = (
                f"the {self._target.kind} could not be restored for this check, which did not run: {verdict.message}"
            )
            return verdict.model_copy(update={"message": message, "look_at": ""})
        reason = f"the {self._target.kind} has been unavailable since {self.gone.since}"
        return verdict_of(check, CheckOutcome.SKIPPED, message=reason)

    def _judged(self, check: Check) -> tuple[Verdict, bool]:
        """Return a verdict, and whether the check could not run because there was no subject. Raises `ConfigError`."""
        total_s = 0.0
        evidence: dict[str, Any] = {}
        for stage, num_ranks in (("before", 1), ("function", self._num_ranks), ("after", 1)):
            if getattr(check, stage) is None:
                continue
            verdict, is_gone = self._run_stage(check, stage, num_ranks)
            total_s += verdict.seconds
            evidence |= verdict.evidence
            if verdict.outcome is not CheckOutcome.PASSED:
                break
        return verdict.model_copy(update={"seconds": round(total_s, 3), "evidence": evidence}), is_gone

    def close(self) -> None:
        """End every process of this kit and remove its files. Idempotent."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run_stage(self, check: Check, stage: str, num_ranks: int) -> tuple[Verdict, bool]:
        session = self._session(num_ranks)
        started = time.monotonic()
        try:
            slowness = float(self._facts.get("slowness", 1.0))
            deadline_s = check.deadline_s * self._deadline_scale * slowness + _PREPARE_S + self._start_deadline_s
            answers = session.run(Command(check=check.id, stage=stage), deadline_s)
        except _NoAnswerError as error:
            del self._sessions[num_ranks]
            seconds = time.monotonic() - started
            outcome = CheckOutcome.HUNG if error.stacks else CheckOutcome.FAILED
            return verdict_of(check, outcome, seconds=seconds, message=error.message, stacks=error.stacks), False
        self.start_seconds += max(answer.prepare_seconds for answer in answers)
        verdict = merged([answer.verdict for answer in answers])
        if verdict.outcome is CheckOutcome.HUNG:  # calls that still run there could disturb the next check
            session.kill()
            del self._sessions[num_ranks]
        return verdict, any(answer.is_gone for answer in answers)

    def _session(self, num_ranks: int) -> _Session:
        if self._unmakable is not None:  # of an endpoint, which has no other group of ranks
            raise self._unmakable
        if num_ranks not in self._sessions:
            started = time.monotonic()
            self._num_sessions += 1
            first = ChildSetup(
                target=self._target,
                num_ranks=num_ranks,
                session=self._num_sessions,
                directory=self._directory,
                start_deadline_s=self._start_deadline_s,
                deadline_scale=self._deadline_scale,
            )
            session = _Session([first.model_copy(update={"rank": rank}) for rank in range(num_ranks)])
            self.start_seconds += time.monotonic() - started
            self._sessions[num_ranks] = session
            if not self._facts or num_ranks == self._num_ranks:
                self._facts = session.facts
        return self._sessions[num_ranks]


class _NoAnswerError(Exception):
    def __init__(self, message: str, stacks: str) -> None:
        super().__init__(message)
        self.message = message
        self.stacks = stacks


class _Session:
    """The processes of one group of ranks, each with one subject."""

    def __init__(self, setups: Sequence[ChildSetup]) -> None:
        target, start_deadline_s = setups[0].target, setups[0].start_deadline_s
        self._directory = setups[0].directory
        self._number = setups[0].session
        num_threads = max(1, (os.cpu_count() or 1) // len(setups))
        self._ranks = [
            _Rank(self._directory / f"output-{self._number}-{setup.rank}.txt", num_threads) for setup in setups
        ]
        try:
            for process, setup in zip(self._ranks, setups, strict=True):
                process.send(setup)
            deadline = time.monotonic() + start_deadline_s
            answers = [self._receive(rank, ChildReady, deadline) for rank in range(len(setups))]
        except _NoAnswerError as error:
            self.kill()
            stacks = f"\n{error.stacks}" if error.stacks else ""
            raise ConfigError(f"{target.label} could not be created: {error.message}{stacks}") from error
        except BaseException:
            self.kill()
            raise
        if problems := [answer.problem for answer in answers if answer.problem]:
            self.kill()
            raise ConfigError(problems[0])
        self.facts: Mapping[str, Any] = answers[0].facts

    def run(self, command: Command, deadline_s: float) -> list[Judgement]:
        """Return every rank's judgement. If a rank does not answer, kill the session and raise `_NoAnswerError`."""
        deadline = time.monotonic() + deadline_s
        try:
            for process in self._ranks:
                process.send(command)
            return [self._receive(rank, Judgement, deadline) for rank in range(len(self._ranks))]
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """Give the subjects time to close, then kill their processes."""
        for process in self._ranks:
            process.hang_up()
        deadline = time.monotonic() + _CLOSE_S
        for process in self._ranks:
            process.wait(deadline)
        self.kill()

    def kill(self) -> None:
        """Kill every rank and the processes that it started.

        Servers run in process groups of their own, whose ids are recorded in files.
        """
        for process in self._ranks:
            process.kill()
        for noted in self._directory.glob(f"{SERVER_GROUP}*"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(noted.name.removeprefix(SERVER_GROUP)), signal.SIGKILL)
            noted.unlink(missing_ok=True)

    def _receive(self, rank: int, kind: type[Message], deadline: float) -> Message:
        process, is_alone = self._ranks[rank], len(self._ranks) == 1
        try:
            line = process.receive(deadline)
        except TimeoutError:
            message = "it did not answer in time, and its process was killed"
            raise _NoAnswerError(message if is_alone else f"rank {rank}: {message}", self._stacks()) from None
        if line is None:
            where = "" if is_alone else f" of rank {rank}"
            raise _NoAnswerError(f"the process{where} ended with {process.ending()}", "")
        return kind.model_validate_json(line)

    def _stacks(self) -> str:
        files = [self._directory / f"stacks-{self._number}-{rank}.txt" for rank in range(len(self._ranks))]
        for process, file in zip(self._ranks, files, strict=True):
            if file.exists():  # without its handler, the signal would end the process
                process.signal(signal.SIGUSR1)
        time.sleep(0.5)
        texts = [file.read_text() if file.exists() else "" for file in files]
        return "\n".join(
            f"--- rank {rank}\n{text or 'no stacks: the process was stopped or had not started'}"
            for rank, text in enumerate(texts)
        )


class _Rank:
    """One child process at the other end of a socket."""

    def __init__(self, output: Path, num_threads: int) -> None:
        self._output = output
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._buffer = b""
        with output.open("wb") as out, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "inflight.conformance.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={
                    "HF_HUB_OFFLINE": "1",
                    "TRANSFORMERS_VERBOSITY": "error",
                    "TQDM_DISABLE": "1",
                    "OMP_NUM_THREADS": str(num_threads),
                    **WAIT_ASLEEP,
                    **os.environ,
                },
            )

    def send(self, message: WireModel) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` states how it ended
            self._socket.sendall(message.model_dump_json().encode() + b"\n")

    def receive(self, deadline: float) -> bytes | None:
        """Return the next line, or None if the process has ended. Raises ``TimeoutError``."""
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                part = self._socket.recv(1 << 16)
            except ConnectionResetError:
                part = b""
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def ending(self) -> str:
        """Return how the process ended, with the last lines of its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
        lines = self._output.read_text(errors="replace").strip().splitlines()[-15:]
        return how + ("; its last output:\n" + "\n".join(lines) if lines else "")

    def signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kill the process and its whole process group. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()
