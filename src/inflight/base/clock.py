"""The time of day for events: as the wall clock was when the process began, and never stepped since."""

from __future__ import annotations

import time

_BEGAN_S = time.time() - time.monotonic()


def unix_time() -> float:
    """Return Unix time in seconds. Differences are durations, even if somebody sets the machine's clock meanwhile."""
    return _BEGAN_S + time.monotonic()
