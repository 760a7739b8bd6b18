"""Handmade certificates for tests of the code that uses certificates."""

from __future__ import annotations

from typing import Any

from inflight.conformance.verdicts import Certificate, CheckOutcome, Verdict


def verdict(id: str, outcome: CheckOutcome, level: str = "tokens", **fields: Any) -> Verdict:
    return Verdict(
        **{"id": id, "level": level, "requirement": f"{id} holds", "outcome": outcome, "seconds": 0.25, **fields}
    )


def certificate(*verdicts: Verdict, **fields: Any) -> Certificate:
    return Certificate(
        **{
            "kit_version": "0.1.0",
            "kind": "endpoint",
            "target": "http://127.0.0.1:8000",
            "implementation": "tiny",
            "implementation_version": "2.0",
            "started_at": "2026-03-01T12:00:00+00:00",
            "seconds": 10.0,
            "start_seconds": 3.0,
            "verdicts": verdicts,
            **fields,
        }
    )


PASSED = verdict("E-01", CheckOutcome.PASSED)
FAILED = verdict(
    "E-02",
    CheckOutcome.FAILED,
    message="3 of 8 logprobs differ",
    evidence={"largest_difference": 0.25, "tokens": [1, 2], "what": "<b>bold</b> & \x1b[31mred\x00"},
    look_at="the sampler's temperature",
)
HUNG = verdict("U-01", CheckOutcome.HUNG, "updates", message="no answer in 20 s", stacks="--- rank 0\nFile <stdin>")
SKIPPED = verdict("U-02", CheckOutcome.SKIPPED, "updates", message="abort is not supported", seconds=0.0)
EXPECTED = verdict("U-03", CheckOutcome.EXPECTED_FAILURE, "updates", message="lease lost", expected="issue 31")
SURPRISE = verdict("U-04", CheckOutcome.UNEXPECTED_PASS, "updates", message="it passed", expected="issue 32")
EVERYTHING = certificate(PASSED, FAILED, HUNG, SKIPPED, EXPECTED, SURPRISE)
