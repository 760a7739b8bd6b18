"""Mutants that crash are recognised however the error reaches the verdict, and those that misbehave are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.conformance.verdicts import CheckOutcome
from tests.conformance.broken import logs_in, require_not_broken
from tests.conformance.certificates import verdict

TRACEBACK = 'Traceback (most recent call last):\n  File "mutant.py", line 3, in faulty\nNameError: name x\n'


@pytest.mark.parametrize(
    "message",
    [
        "rank 1: AttributeError was raised at mutant.py:3 in faulty: no such thing",
        "EndpointError was raised: the engine failed (TypeError('missing 1 argument')); restart the server",
        """it was answered with status 500: b'{"error":{"message":"/v1/generate failed: NameError: name x'""",
        "TransferError was raised: receiving failed: 'Receiver' object has no attribute '_spec'",
    ],
)
def test_a_crash_shows_in_a_message(message: str) -> None:
    found = verdict("E-10", CheckOutcome.FAILED).model_copy(update={"message": message})
    with pytest.raises(AssertionError, match="the mutant itself is broken"):
        require_not_broken(found)


def test_a_crash_shows_in_evidence_and_in_what_a_server_printed(tmp_path: Path) -> None:
    hung = verdict("E-10", CheckOutcome.HUNG).model_copy(update={"message": "it did not end within 20 s"})
    require_not_broken(hung, ["INFO: a TypeError is only mentioned here"])
    with pytest.raises(AssertionError, match="UnboundLocalError"):
        require_not_broken(hung.model_copy(update={"evidence": {"an abort": "UnboundLocalError: x"}}))
    (tmp_path / "server-1.txt").write_text(TRACEBACK)
    with pytest.raises(AssertionError, match="NameError: name x"):
        require_not_broken(hung, logs_in(tmp_path))
