"""Checks what an endpoint supports."""

from __future__ import annotations

from inflight.errors import UnsupportedError
from inflight.wire import Capabilities, Needs


def require(can: Capabilities, needs: Needs, endpoint: str) -> None:
    """Raise `UnsupportedError`, which names the endpoint, unless the endpoint meets all needs."""
    if missing := can.missing(needs):
        raise UnsupportedError(f"{endpoint} does not support {', '.join(missing.values())}")
