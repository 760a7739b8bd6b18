"""Two certificates side by side: what counts as a regression, and what else is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.conformance.compare import ChangeKind, FactChange, compare, comparison_text
from inflight.conformance.verdicts import CheckOutcome, Verdict
from inflight.errors import ConfigError
from tests.conformance.certificates import EVERYTHING, FAILED, HUNG, PASSED, certificate, verdict

OUTCOMES = st.sampled_from(CheckOutcome)
RUNS = st.dictionaries(st.sampled_from([f"E-0{n}" for n in range(8)]), OUTCOMES)


def run_of(outcomes: dict[str, CheckOutcome]) -> tuple[Verdict, ...]:
    return tuple(verdict(id, outcome) for id, outcome in outcomes.items())


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (CheckOutcome.PASSED, CheckOutcome.PASSED, None),
        (CheckOutcome.PASSED, CheckOutcome.FAILED, ChangeKind.REGRESSION),
        (CheckOutcome.PASSED, CheckOutcome.HUNG, ChangeKind.REGRESSION),
        (CheckOutcome.EXPECTED_FAILURE, CheckOutcome.FAILED, ChangeKind.REGRESSION),
        (CheckOutcome.UNEXPECTED_PASS, CheckOutcome.FAILED, ChangeKind.REGRESSION),
        (CheckOutcome.FAILED, CheckOutcome.HUNG, ChangeKind.STILL_BAD),
        (CheckOutcome.FAILED, CheckOutcome.FAILED, ChangeKind.STILL_BAD),
        (CheckOutcome.HUNG, CheckOutcome.PASSED, ChangeKind.FIXED),
        (CheckOutcome.EXPECTED_FAILURE, CheckOutcome.UNEXPECTED_PASS, ChangeKind.FIXED),
        (CheckOutcome.PASSED, CheckOutcome.EXPECTED_FAILURE, ChangeKind.EXCUSED),
        (CheckOutcome.FAILED, CheckOutcome.EXPECTED_FAILURE, ChangeKind.EXCUSED),
        (CheckOutcome.EXPECTED_FAILURE, CheckOutcome.EXPECTED_FAILURE, None),
        (CheckOutcome.SKIPPED, CheckOutcome.FAILED, ChangeKind.SKIP_CHANGED),
        (CheckOutcome.PASSED, CheckOutcome.SKIPPED, ChangeKind.SKIP_CHANGED),
        (CheckOutcome.SKIPPED, CheckOutcome.SKIPPED, None),
        (None, CheckOutcome.FAILED, ChangeKind.NEW),
        (CheckOutcome.PASSED, None, ChangeKind.GONE),
    ],
)
def test_what_became_of_a_check(
    before: CheckOutcome | None, after: CheckOutcome | None, kind: ChangeKind | None
) -> None:
    old = certificate(*run_of({"E-01": before} if before else {}))
    new = certificate(*run_of({"E-01": after} if after else {}))
    comparison = compare(old, new)
    assert [change.kind for change in comparison.changes] == ([kind] if kind else [])
    assert comparison.is_worse == (kind is ChangeKind.REGRESSION)


@given(RUNS, RUNS)
def test_every_check_of_both_is_accounted_for_once(old: dict[str, CheckOutcome], new: dict[str, CheckOutcome]) -> None:
    comparison = compare(certificate(*run_of(old)), certificate(*run_of(new)))
    changed = [change.id for change in comparison.changes]
    assert len(changed) == len(set(changed))
    assert set(changed) >= set(old) ^ set(new)
    for id in set(old) | set(new):
        if id not in changed:
            assert {old[id], new[id]} <= {CheckOutcome.PASSED, CheckOutcome.UNEXPECTED_PASS} or old[id] is new[id]
    assert comparison_text(comparison).count("\n  E-") == len(changed)


@given(RUNS)
def test_a_certificate_is_no_worse_than_itself(outcomes: dict[str, CheckOutcome]) -> None:
    subject = certificate(*run_of(outcomes))
    comparison = compare(subject, subject)
    assert not comparison.is_worse and comparison.facts == ()
    assert {change.kind for change in comparison.changes} <= {ChangeKind.STILL_BAD}


def test_circumstances_that_changed_are_named_down_to_the_field() -> None:
    old = certificate(PASSED, flags={"model": "a"}, capabilities={"limits": {"tokens": 8}, "ranks": [0]})
    new = certificate(
        PASSED,
        implementation_version="2.1",
        environment={"torch": "2.9"},
        capabilities={"limits": {"tokens": 16}, "ranks": [0]},
    )
    assert set(compare(old, new).facts) == {
        FactChange(name="implementation_version", before="2.0", after="2.1"),
        FactChange(name="flags.model", before="a", after=None),
        FactChange(name="capabilities.limits.tokens", before="8", after="16"),
        FactChange(name="environment.torch", before=None, after="2.9"),
    }


def test_a_run_that_now_ends_early_is_worse() -> None:
    whole, short = certificate(PASSED), certificate(PASSED, problem="before E-02: it is gone")
    assert compare(whole, short).is_worse
    assert "it is gone" in comparison_text(compare(whole, short))
    assert not compare(short, whole).is_worse
    assert not compare(short, short).is_worse


def test_the_text_shows_regressions_first_with_what_was_seen() -> None:
    old = certificate(PASSED, verdict("E-02", CheckOutcome.PASSED), HUNG)
    new = certificate(verdict("E-01", CheckOutcome.SKIPPED), FAILED, HUNG, implementation_version="2.1")
    text = comparison_text(compare(old, new))
    assert text.index("regressions (1)") < text.index("still failing (1)") < text.index("skipped before or now (1)")
    assert "E-02  passed -> failed: E-02 holds (3 of 8 logprobs differ)" in text
    assert "implementation_version: 2.0 -> 2.1" in text
    assert text.endswith("worse than before\n")


def test_certificates_of_different_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="endpoint and worker"):
        compare(EVERYTHING, certificate(PASSED, kind="worker"))
