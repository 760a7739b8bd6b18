"""The checks of a trainer worker, in the order of the contract."""

from __future__ import annotations

from inflight.conformance.checks import Check
from inflight.conformance.worker import checkpoint, discovery, forward, gather, gradients, memory, packing, steps

CHECKS: tuple[Check, ...] = (
    *discovery.CHECKS,
    *forward.CHECKS,
    *packing.CHECKS,
    *gradients.CHECKS,
    *steps.CHECKS,
    *gather.CHECKS,
    *memory.CHECKS,
    *checkpoint.CHECKS,
)
"""Every check of workers."""
