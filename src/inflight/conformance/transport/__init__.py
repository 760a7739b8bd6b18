"""Checks of transports: forming the group, what arrives, failures, giving up."""

from __future__ import annotations

from inflight.conformance.checks import Check
from inflight.conformance.transport import aborting, arriving, failing, forming

CHECKS: tuple[Check, ...] = (*forming.CHECKS, *arriving.CHECKS, *failing.CHECKS, *aborting.CHECKS)
