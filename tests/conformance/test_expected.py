"""Expected failures: what a file may say, and what it makes of a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.conformance.checks import Check
from inflight.conformance.expected import apply_expected, load_expected
from inflight.conformance.verdicts import BAD_OUTCOMES, CheckOutcome
from inflight.errors import ConfigError
from tests.conformance.certificates import PASSED, verdict

CHECKS = [Check(id, "tokens", f"{id} holds", "nowhere", print) for id in ("E-01", "E-02", "E-03")]


def test_a_file_gives_a_reason_per_check(tmp_path: Path) -> None:
    file = tmp_path / "expected.toml"
    file.write_text('# kept in git\nE-01 = "no lease yet"\nE-03 = "issue 31, \\"rounding\\""\n')
    assert load_expected(file, CHECKS) == {"E-01": "no lease yet", "E-03": 'issue 31, "rounding"'}
    file.write_text("")
    assert load_expected(file, CHECKS) == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b'E-01 "no equals sign"', "is not valid TOML"),
        (b'E-01 = "once"\nE-01 = "twice"', "is not valid TOML"),
        (b'E-01 = "\xff"', "is not valid TOML"),
        (b'E-99 = "no such check"', r"key 'E-99'.* E-01 to E-03"),
        (b'E-01 = ""', r"key 'E-01'.*empty"),
        (b'E-01 = "  \\n "', r"key 'E-01'.*empty"),
        (b"E-01 = 3", r"key 'E-01'.*must be a string, not 3"),
        (b'["E-01"]\nreason = "as a table"', r"key 'E-01'.*E-12 = "),
    ],
)
def test_what_cannot_be_used_is_refused_with_file_and_key(tmp_path: Path, text: bytes, complaint: str) -> None:
    file = tmp_path / "expected.toml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_expected(file, CHECKS)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml.*No such file"):
        load_expected(tmp_path / "missing.toml", CHECKS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CheckOutcome.FAILED, CheckOutcome.EXPECTED_FAILURE),
        (CheckOutcome.HUNG, CheckOutcome.EXPECTED_FAILURE),
        (CheckOutcome.PASSED, CheckOutcome.UNEXPECTED_PASS),
        (CheckOutcome.SKIPPED, CheckOutcome.SKIPPED),
    ],
)
def test_what_an_expectation_makes_of_a_verdict(before: CheckOutcome, after: CheckOutcome) -> None:
    found = verdict("E-01", before, message="seen", evidence={"n": 1}, stacks="here")
    changed = apply_expected(found, {"E-01": "issue 31"})
    assert changed.outcome is after
    assert changed.expected == ("" if after is CheckOutcome.SKIPPED else "issue 31")
    assert (changed.evidence, changed.stacks) == (found.evidence, found.stacks)
    assert apply_expected(found, {"E-02": "another"}) == found


def test_an_unexpected_pass_says_what_to_do() -> None:
    assert "remove it" in apply_expected(PASSED, {"E-01": "issue 31"}).message


@given(st.sampled_from(list(CheckOutcome)[:4]))
def test_an_expected_verdict_is_bad_only_if_it_passed(outcome: CheckOutcome) -> None:
    changed = apply_expected(verdict("E-01", outcome), {"E-01": "issue 31"})
    assert (changed.outcome in BAD_OUTCOMES) == (outcome is CheckOutcome.PASSED)
