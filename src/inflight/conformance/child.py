"""The program of a process that runs checks and can be killed if a check never returns.

It is started with ``python -m`` and the file descriptor of a socket, over which it exchanges lines of JSON with its
parent. It receives a `ChildSetup` and then one `Command` per check, and sends `ChildReady` and then one `Judgement` per
command. The process ends when its parent does.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from pydantic import Field

from inflight.conformance.checks import Check
from inflight.conformance.frames import innermost_frame, own_frame
from inflight.conformance.judge import Subject, judge
from inflight.conformance.targets import EndpointTarget, Target, WorkerTarget
from inflight.conformance.verdicts import BAD_OUTCOMES, plain
from inflight.errors import InflightError
from inflight.wire import WireModel


class ChildSetup(WireModel):
    """The target that a child checks, and its rank. ``directory`` is shared by all ranks and sessions of a run."""

    target: Target = Field(discriminator="kind")
    rank: int = 0
    num_ranks: int = 1
    session: int = 0
    """The number of the process group; each group has its own store."""
    directory: Path
    start_deadline_s: float
    deadline_scale: float = 1.0


class ChildReady(WireModel):
    """Reports that the subject was created, with facts for the certificate, or else states in ``problem`` why it was
    not."""

    facts: dict[str, object] = Field(default_factory=dict)
    problem: str = ""


class Command(WireModel):
    """A request to run one check's function, or its stage ``before`` or ``after``."""

    check: str
    stage: str = "function"


def main(file_number: int) -> int:
    """Serve the parent until it closes the socket; return the exit status."""
    connection = socket.socket(fileno=file_number)
    lines = connection.makefile("r", encoding="utf-8")
    setup = ChildSetup.model_validate_json(lines.readline())
    stacks = (setup.directory / f"stacks-{setup.session}-{setup.rank}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    def send(message: WireModel) -> None:
        connection.sendall(message.model_dump_json().encode() + b"\n")

    dead_threads = _noted_threads()
    try:
        subject = open_subject(setup)
    except InflightError as error:
        send(ChildReady(problem=str(error)))
        return 0
    except Exception as error:  # any error of a factory is reported to its author
        where = own_frame(error) or innermost_frame(error)
        what = f"{type(error).__name__} at {where}: {error}"
        send(ChildReady(problem=f"{setup.target.label} could not be created: {what}"))
        raise
    checks = {c.id: replace(c, deadline_s=c.deadline_s * setup.deadline_scale) for c in checks_of(setup.target.kind)}
    try:
        send(ChildReady(facts=plain(subject.facts)))
        for line in lines:
            command = Command.model_validate_json(line)
            check = checks[command.check]
            dead_threads.clear()
            found = judge(subject, check, getattr(check, command.stage))
            verdict = found.verdict
            if dead_threads and verdict.outcome in BAD_OUTCOMES:
                verdict = verdict.model_copy(update={"message": "\n".join([verdict.message, *dead_threads])})
            send(found.model_copy(update={"verdict": verdict}))
    finally:
        subject.close()
    return 0


def _noted_threads() -> list[str]:
    """Return a list to which, from now on, a line is appended for every thread that ends with an error."""
    noted: list[str] = []
    show = threading.excepthook

    def note(ended: threading.ExceptHookArgs) -> None:
        if (error := ended.exc_value) is not None:
            name = "a thread" if ended.thread is None else f"thread {ended.thread.name}"
            where = own_frame(error) or innermost_frame(error)
            noted.append(f"{name} ended with {type(error).__name__} at {where}: {error}")
        show(ended)

    threading.excepthook = note
    return noted


def open_subject(setup: ChildSetup) -> Subject:
    """Return the subject of a setup, created in this process."""
    if isinstance(setup.target, EndpointTarget):
        from inflight.conformance.endpoint.judged import JudgedEndpoint

        return JudgedEndpoint(
            setup.target,
            setup.directory,
            setup.start_deadline_s,
            deadline_scale=setup.deadline_scale,
            is_suspect=setup.session > 1,
        )
    if isinstance(setup.target, WorkerTarget):
        from inflight.conformance.worker.subject import WorkerSubject

        return WorkerSubject.open(
            setup.target, setup.directory, rank=setup.rank, num_ranks=setup.num_ranks, session=setup.session
        )
    from inflight.conformance.transport.subject import TransportSubject

    files = setup.directory / f"transport-{setup.session}"
    files.mkdir()
    return TransportSubject(setup.target, files)


def checks_of(kind: str) -> tuple[Check, ...]:
    """Return every check of a kind, in the order of the contract."""
    checks: tuple[Check, ...] = import_module(f"inflight.conformance.{kind}.catalogue").CHECKS
    return checks


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that a check left running must not keep the process alive
