"""Expected failures: checks that are known not to hold yet, with reasons, in a TOML file that is kept in git.

The file has one line per check, ``id = "reason"``::

    E-12 = "prompt logprobs are rounded to four digits, issue 31"
    U-07 = "no lease on a pause yet"

An expected failure does not fail a run. A listed check that passes does fail it, so that the file stays accurate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from inflight.base.toml import read_toml
from inflight.conformance.checks import Check
from inflight.conformance.verdicts import CheckOutcome, Verdict
from inflight.errors import ConfigError

_FORM = 'write one line per check, as in E-12 = "why it does not hold yet"'


def load_expected(path: Path, checks: Iterable[Check]) -> Mapping[str, str]:
    """Return the reasons that a file of expected failures gives, by check id.

    ``checks`` are all checks of the kind. Raises a `ConfigError` that names the file and the key.
    """
    known = [check.id for check in checks]
    entries = read_toml(path, "file of expected failures")
    for key, reason in entries.items():
        where = f"file of expected failures {str(path)!r}, key {key!r}"
        if key not in known:
            raise ConfigError(
                f"{where}: there is no such check, ids run from {known[0]} to {known[-1]}; remove the line"
            )
        if not isinstance(reason, str):
            raise ConfigError(f"{where}: the reason must be a string, not {reason!r}; {_FORM}")
        if not reason.strip():
            raise ConfigError(f"{where}: the reason is empty; state why the check does not hold yet")
    return entries


def apply_expected(verdict: Verdict, expected: Mapping[str, str]) -> Verdict:
    """Return the verdict with expected failures taken into account; a skipped check stays skipped."""
    reason = expected.get(verdict.id)
    if reason is None:
        return verdict
    if verdict.outcome in (CheckOutcome.FAILED, CheckOutcome.HUNG):
        return verdict.model_copy(update={"outcome": CheckOutcome.EXPECTED_FAILURE, "expected": reason})
    if verdict.outcome is CheckOutcome.PASSED:
        message = "it passed; remove it from the file of expected failures"
        return verdict.model_copy(
            update={"outcome": CheckOutcome.UNEXPECTED_PASS, "expected": reason, "message": message}
        )
    return verdict
