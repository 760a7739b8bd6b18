"""Compares two certificates of one implementation: the outcomes of the checks, and the circumstances of the runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from inflight.base.printable import printable
from inflight.conformance.verdicts import Certificate, CheckOutcome, Verdict
from inflight.errors import ConfigError
from inflight.wire import WireModel

_FAILING = frozenset({CheckOutcome.FAILED, CheckOutcome.HUNG, CheckOutcome.EXPECTED_FAILURE})


class ChangeKind(StrEnum):
    """How one check changed; the value is the heading under which it is shown."""

    REGRESSION = "regressions"
    """The check used to pass, or its failure was expected; now it fails or hangs."""
    STILL_BAD = "still failing"
    EXCUSED = "now an expected failure"
    SKIP_CHANGED = "skipped before or now"
    FIXED = "fixed"
    NEW = "new checks"
    GONE = "no longer checked"


class Change(WireModel):
    """A check whose outcome differs between the two certificates, or that fails in both."""

    kind: ChangeKind
    id: str
    requirement: str
    before: CheckOutcome | None
    """None if the old certificate has no verdict on the check."""
    after: CheckOutcome | None
    """None if the new certificate has no verdict on the check."""
    message: str = ""
    """The message of the newer verdict."""


class FactChange(WireModel):
    """A version, flag, capability or property of the machine that differs; a certificate without it has None."""

    name: str
    before: str | None
    after: str | None


class CertificateComparison(WireModel):
    """An old and a new certificate side by side."""

    old_title: str
    new_title: str
    changes: tuple[Change, ...]
    facts: tuple[FactChange, ...]
    new_problem: str = ""
    """Why the new certificate is not valid; empty if it is valid, or if the old one was not valid either."""

    def of(self, kind: ChangeKind) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind is kind)

    @property
    def is_worse(self) -> bool:
        """Whether a check regressed, or the new certificate is not valid although the old one is."""
        return bool(self.of(ChangeKind.REGRESSION)) or bool(self.new_problem)


def compare(old: Certificate, new: Certificate) -> CertificateComparison:
    """Return what changed from ``old`` to ``new``. Raises `ConfigError` if they are of different kinds."""
    if old.kind != new.kind:
        raise ConfigError(f"certificates of different kinds cannot be compared: {old.kind} and {new.kind}")
    before = {verdict.id: verdict for verdict in old.verdicts}
    after = {verdict.id: verdict for verdict in new.verdicts}
    old_facts, new_facts = dict(_facts(old)), dict(_facts(new))
    changes = [_change(before.get(id), after.get(id)) for id in [*after, *(id for id in before if id not in after)]]
    return CertificateComparison(
        old_title=_title(old),
        new_title=_title(new),
        changes=tuple(change for change in changes if change is not None),
        facts=tuple(
            FactChange(name=name, before=old_facts.get(name), after=new_facts.get(name))
            for name in {**old_facts, **new_facts}
            if old_facts.get(name) != new_facts.get(name)
        ),
        new_problem=new.problem if not old.problem else "",
    )


def comparison_text(comparison: CertificateComparison) -> str:
    """Return the comparison for a terminal, the worst changes first."""
    lines = [f"old: {comparison.old_title}", f"new: {comparison.new_title}"]
    if comparison.new_problem:
        lines += ["", f"the new certificate is not valid: {comparison.new_problem}"]
    for kind in ChangeKind:
        if changes := comparison.of(kind):
            lines += ["", f"{kind} ({len(changes)})", *(f"  {_change_text(change)}" for change in changes)]
    if comparison.facts:
        lines += ["", f"circumstances ({len(comparison.facts)})"]
        lines += [f"  {fact.name}: {_side(fact.before)} -> {_side(fact.after)}" for fact in comparison.facts]
    lines += ["", "worse than before" if comparison.is_worse else "not worse than before"]
    return "".join(f"{printable(line)}\n" for line in lines)


def _change(before: Verdict | None, after: Verdict | None) -> Change | None:
    outcome_before = before.outcome if before else None
    outcome_after = after.outcome if after else None
    newest = after or before
    kind = _kind(outcome_before, outcome_after)
    if newest is None or kind is None:
        return None
    return Change(
        kind=kind,
        id=newest.id,
        requirement=newest.requirement,
        before=outcome_before,
        after=outcome_after,
        message=after.message if after else "",
    )


def _kind(before: CheckOutcome | None, after: CheckOutcome | None) -> ChangeKind | None:
    """Return how a check changed, or that it still fails; None if neither applies."""
    if before is None:
        return ChangeKind.NEW
    if after is None:
        return ChangeKind.GONE
    if CheckOutcome.SKIPPED in (before, after):
        return ChangeKind.SKIP_CHANGED if before is not after else None
    if after in (CheckOutcome.FAILED, CheckOutcome.HUNG):
        return ChangeKind.STILL_BAD if before in (CheckOutcome.FAILED, CheckOutcome.HUNG) else ChangeKind.REGRESSION
    if after is CheckOutcome.EXPECTED_FAILURE:
        return ChangeKind.EXCUSED if before is not after else None
    return ChangeKind.FIXED if before in _FAILING else None


def _title(certificate: Certificate) -> str:
    return f"{certificate.implementation} {certificate.implementation_version}".strip() + f", {certificate.started_at}"


def _facts(certificate: Certificate) -> Iterator[tuple[str, str]]:
    """Yield the circumstances of a run as pairs of a dotted name and a string."""
    for name in ("protocol_version", "kit_version", "target", "implementation", "implementation_version"):
        yield name, str(getattr(certificate, name))
    for name in ("flags", "capabilities", "environment"):
        yield from _flat(name, getattr(certificate, name))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _change_text(change: Change) -> str:
    outcomes = f"{change.before or 'not checked'} -> {change.after or 'not checked'}"
    message = f" ({change.message.partition(chr(10))[0]})" if change.message else ""
    return f"{change.id}  {outcomes}: {change.requirement}{message}"


def _side(text: str | None) -> str:
    return "none" if text is None else text
