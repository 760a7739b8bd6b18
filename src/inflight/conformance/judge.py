"""Runs one check over one subject in this process and says what it came to.

Knows nothing of processes and of what subjects are. A check that does not come back at all is the business of
`inflight.conformance.kit`, which kills the process.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from inflight.conformance.checks import Check, CheckFailed, CheckSkipped
from inflight.conformance.frames import innermost_frame, own_frame
from inflight.conformance.verdicts import Outcome, Verdict, plain
from inflight.errors import InflightError


class Hung(Exception):  # noqa: N818 - an outcome, no error
    """A call did not end before its deadline; the second argument says where it waited."""


class Subject(Protocol):
    """What is checked, inside the process that checks it."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Return ``implementation``, ``implementation_version``, ``capabilities`` and ``flags`` for the certificate."""

    @property
    @abstractmethod
    def evidence(self) -> dict[str, Any]:
        """Return what the present check has noted so far; the judge empties it before each check."""

    @abstractmethod
    def missing(self, needs: tuple[str, ...]) -> str | None:
        """Return why a check with these needs cannot be run, None if it can."""

    @abstractmethod
    def prepare(self) -> None:
        """Bring the subject back to where every check starts from. What it raises fails the check."""

    @abstractmethod
    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        """Call a check's function. Raises what it raises, and `Hung`."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One check, judged."""

    verdict: Verdict
    prepare_seconds: float = 0.0
    """How long it took to bring the subject back."""
    is_gone: bool = False
    """The subject could not be brought back: the check did not run, and the verdict says why."""


def judge(subject: Subject, check: Check, stage: Callable[[Any], Any] | None = None) -> Judgement:
    """Judge one check. ``stage`` None: the check's function."""
    subject.evidence.clear()
    if (reason := subject.missing(check.needs)) is not None:
        return Judgement(verdict_of(check, Outcome.SKIPPED, message=reason))
    started = time.monotonic()
    outcome, message, stacks = _outcome_of(subject.prepare)
    prepared = time.monotonic()
    is_gone = outcome is not Outcome.PASSED
    if not is_gone:
        outcome, message, stacks = _outcome_of(lambda: subject.call(stage or check.function, check.deadline_s))
    verdict = verdict_of(
        check,
        outcome,
        seconds=time.monotonic() - prepared,
        message=message,
        evidence=plain(subject.evidence),
        stacks=stacks,
    )
    return Judgement(verdict, prepared - started, is_gone)


def _outcome_of(call: Callable[[], object]) -> tuple[Outcome, str, str]:
    """Return what a call came to, what was seen, and where it hung."""
    try:
        call()
    except CheckSkipped as reason_to_skip:
        return Outcome.SKIPPED, str(reason_to_skip), ""
    except CheckFailed as failure:
        return Outcome.FAILED, str(failure), ""
    except Hung as hung:
        return Outcome.HUNG, str(hung.args[0]), str(hung.args[1])
    except InflightError as error:
        where = own_frame(error)
        return Outcome.FAILED, f"{type(error).__name__} was raised{f' at {where}' if where else ''}: {error}", ""
    except Exception as error:  # whatever an implementation raises is evidence
        where = own_frame(error) or innermost_frame(error)
        return Outcome.FAILED, f"{type(error).__name__} was raised at {where}: {error}", ""
    return Outcome.PASSED, "", ""


def verdict_of(
    check: Check,
    outcome: Outcome,
    *,
    seconds: float = 0.0,
    message: str = "",
    evidence: Mapping[str, Any] | None = None,
    stacks: str = "",
) -> Verdict:
    """Return a verdict on a check."""
    return Verdict(
        id=check.id,
        level=check.level,
        sentence=check.sentence,
        outcome=outcome,
        seconds=round(seconds, 3),
        message=message,
        evidence=dict(evidence or {}),
        look_at="" if outcome in (Outcome.PASSED, Outcome.SKIPPED) else check.look_at,
        stacks=stacks,
    )
