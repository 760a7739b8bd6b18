"""The checks of a transport, in the order of the contract."""

from __future__ import annotations

from inflight.conformance.checks import checks_in
from inflight.conformance.transport import aborting, arriving, failing, forming, mixed, records, stored, timeouts

CHECKS = checks_in(forming, arriving, mixed, stored, records, timeouts, failing, aborting)
