"""The conformance kit: checks numerically whether an implementation satisfies a contract.

Importing it does not import torch; listing and running checks does.
"""

from __future__ import annotations

from inflight.conformance.checks import Check
from inflight.conformance.child import checks_of
from inflight.conformance.kit import Kit
from inflight.conformance.targets import EndpointTarget, TransportTarget, WorkerTarget
from inflight.conformance.verdicts import Certificate, CheckOutcome, Verdict

__all__ = [
    "Certificate",
    "Check",
    "CheckOutcome",
    "EndpointTarget",
    "Kit",
    "TransportTarget",
    "Verdict",
    "WorkerTarget",
    "endpoint_checks",
    "transport_checks",
    "worker_checks",
]


def endpoint_checks() -> tuple[Check, ...]:
    """Return the checks of inference endpoints, in the order of the contract."""
    return checks_of("endpoint")


def worker_checks() -> tuple[Check, ...]:
    """Return the checks of trainer workers, in the order of the contract."""
    return checks_of("worker")


def transport_checks() -> tuple[Check, ...]:
    """Return the checks of transports, in the order of the contract."""
    return checks_of("transport")
