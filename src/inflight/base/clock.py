"""The time of day for events: the wall clock's time when the process began, plus a monotonic clock's time since."""

from __future__ import annotations

import time

_BEGAN_S = time.time() - time.monotonic()


def unix_time() -> float:
    """Return the Unix time in seconds. Differences are true durations, even if the clock is set in between."""
    return _BEGAN_S + time.monotonic()
