"""Every mutant against checks other than its own: ``python -m tests.conformance.mutation KIND ...``.

Writes mutation.json. Workers and transports go through all checks. Endpoints go through their own check and those
that take a healthy one less than 0.15 s; all of them would take hours. Mutants that mutation.json already contains
are left out: delete it to start again. The tests run each mutant against its own check only.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from inflight.conformance.checks import Check
from inflight.conformance.child import checks_of
from inflight.conformance.kit import Kit
from inflight.conformance.targets import EndpointTarget, Target, TransportTarget, WorkerTarget
from inflight.conformance.verdicts import CheckOutcome
from inflight.errors import ConfigError
from tests.conformance import mutants, transport_mutants, worker_mutants

EMBEDDED = "inflight.engines.embedded.loading:load_endpoint"

RESULTS = Path(__file__).with_name("mutation.json")


@dataclass(frozen=True, slots=True)
class Subject:
    """One mutant of any kind."""

    kind: str
    name: str
    caught_by: str
    fault: str
    target: Target


def subjects() -> list[Subject]:
    """Return every mutant."""
    endpoints = [
        Subject("endpoint", m.name, m.caught_by, m.fault, mutants.target_of(m)) for m in mutants.MUTANTS.values()
    ]
    workers = [
        Subject(
            "worker",
            name,
            m.caught_by,
            m.fault,
            WorkerTarget(
                factory="tests.conformance.worker_mutants:KIND",
                num_ranks=m.num_ranks,
                options={"mutant": name},
            ),
        )
        for name, m in worker_mutants.MUTANTS.items()
    ]
    transports = [
        Subject(
            "transport",
            name,
            m.check,
            m.what,
            TransportTarget(factory="tests.conformance.transport_mutants:make", options={"mutant": name}),
        )
        for name, m in transport_mutants.MUTANTS.items()
    ]
    return [*endpoints, *workers, *transports]


def healthy_seconds() -> dict[str, float]:
    """Return the seconds that each endpoint check takes on the embedded endpoint."""
    with Kit(EndpointTarget(factory=EMBEDDED, options={"drafts": "both"})) as kit:
        return {check.id: kit.run(check).seconds for check in checks_of("endpoint")}


def compared(subject: Subject, seconds: Mapping[str, float]) -> list[Check]:
    """Return the checks that a mutant goes through: see the module."""
    checks = checks_of(subject.kind)
    return [
        check
        for check in checks
        if subject.kind != "endpoint" or check.id == subject.caught_by or seconds[check.id] < 0.15
    ]


def failures(subject: Subject, checks: Sequence[Check]) -> dict[str, str]:
    """Return the outcome of every check that the mutant does not pass."""
    found = {}
    with Kit(subject.target) as kit:
        for check in checks:
            try:
                verdict = kit.run(check)
            except ConfigError as error:
                found[check.id] = f"failed: {error}"[:80]
                continue
            if verdict.outcome in (CheckOutcome.FAILED, CheckOutcome.HUNG):
                found[check.id] = str(verdict.outcome)
    return found


def run(kinds: Sequence[str]) -> None:
    """Run every mutant of these kinds against all of its checks, two at a time."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [s for s in subjects() if s.kind in kinds and s.caught_by not in known.get(s.kind, {}).get(s.name, {})]
    writing = threading.Lock()
    seconds = healthy_seconds() if "endpoint" in kinds else {}

    def one(subject: Subject) -> None:
        started = time.monotonic()
        found = failures(subject, compared(subject, seconds))
        with writing:
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            results.setdefault(subject.kind, {})[subject.name] = found
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        caught = "caught" if subject.caught_by in found else "MISSED"
        print(
            f"{time.monotonic() - started:6.1f} s  {caught}  {subject.kind} {subject.name}: {' '.join(found)}",
            flush=True,
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, wanted))


if __name__ == "__main__":
    run(sys.argv[1:] or ["endpoint", "worker", "transport"])
