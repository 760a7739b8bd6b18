"""Runs one check on one subject in this process and returns the verdict.

`inflight.conformance.kit` kills the process of a check that never returns.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from inflight.conformance.checks import Check, CheckFailed, CheckSkipped
from inflight.conformance.frames import innermost_frame, own_frame
from inflight.conformance.verdicts import CheckOutcome, Verdict, plain
from inflight.errors import InflightError
from inflight.wire import WireModel


class Hung(Exception):  # noqa: N818 - an outcome, not an error
    """A call did not end before its deadline. The second argument shows where the call was waiting."""


class Subject(Protocol):
    """The subject under check, in the process that runs the checks."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Return ``implementation``, ``implementation_version``, ``capabilities`` and ``flags`` for the certificate."""

    @property
    @abstractmethod
    def evidence(self) -> dict[str, Any]:
        """Return the evidence of the current check so far. The judge clears it before each check."""

    @abstractmethod
    def missing(self, needs: tuple[str, ...]) -> str | None:
        """Return why a check with these needs cannot be run, or None if it can."""

    @abstractmethod
    def prepare(self) -> None:
        """Restore the state in which every check starts. An error fails the check."""

    @abstractmethod
    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        """Call a check's function. Its errors propagate; raises `Hung` if it does not return before the deadline."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


class Judgement(WireModel):
    """One check's verdict on this rank, and whether the subject could be restored."""

    verdict: Verdict
    prepare_seconds: float = 0.0
    is_gone: bool = False
    """The subject could not be restored: the check did not run, and the verdict states why."""


def judge(subject: Subject, check: Check, stage: Callable[[Any], Any] | None = None) -> Judgement:
    """Return the judgement of one check. If there is a ``stage``, it runs instead of the check's function."""
    subject.evidence.clear()
    if (reason := subject.missing(check.needs)) is not None:
        return Judgement(verdict=verdict_of(check, CheckOutcome.SKIPPED, message=reason))
    started = time.monotonic()
    outcome, message, stacks = _outcome_of(subject.prepare)
    prepared = time.monotonic()
    is_gone = outcome is not CheckOutcome.PASSED
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
    return Judgement(verdict=verdict, prepare_seconds=prepared - started, is_gone=is_gone)


def _outcome_of(call: Callable[[], object]) -> tuple[CheckOutcome, str, str]:
    """Return the outcome of a call, a message, and where the call hung."""
    try:
        call()
    except CheckSkipped as reason_to_skip:
        return CheckOutcome.SKIPPED, str(reason_to_skip), ""
    except CheckFailed as failure:
        return CheckOutcome.FAILED, str(failure), ""
    except Hung as hung:
        return CheckOutcome.HUNG, str(hung.args[0]), str(hung.args[1])
    except Exception as error:  # any error of an implementation is evidence
        where = own_frame(error) or ("" if isinstance(error, InflightError) else innermost_frame(error))
        return CheckOutcome.FAILED, f"{type(error).__name__} was raised{f' at {where}' if where else ''}: {error}", ""
    return CheckOutcome.PASSED, "", ""


def verdict_of(
    check: Check,
    outcome: CheckOutcome,
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
        requirement=check.requirement,
        outcome=outcome,
        seconds=round(seconds, 3),
        message=message,
        evidence=dict(evidence or {}),
        look_at="" if outcome in (CheckOutcome.PASSED, CheckOutcome.SKIPPED) else check.look_at,
        stacks=stacks,
    )
