"""The kit's look at POISONED, which needs the adapter in the kit's own process, on the real engines."""

from __future__ import annotations

from inflight.conformance.checks import select
from inflight.conformance.endpoint.catalogue import CHECKS
from inflight.conformance.kit import Kit
from inflight.conformance.targets import EndpointTarget
from inflight.conformance.verdicts import CheckOutcome


def test_an_apply_that_fails_poisons_until_a_complete_update(engine):
    (check,) = select(CHECKS, ["U-37"])
    with Kit(EndpointTarget(url=engine.url, model=engine.model), deadline_scale=3.0) as kit:
        verdict = kit.run(check)
    assert verdict.outcome is CheckOutcome.PASSED, f"{verdict.message}\n{verdict.evidence}\n{verdict.stacks}"
