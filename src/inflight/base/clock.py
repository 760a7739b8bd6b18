"""Timestamps for events: the wall-clock time when the process began, plus the monotonic time since then."""

from __future__ import annotations

import time

_BEGAN_S = time.time() - time.monotonic()


def unix_time() -> float:
    """Return the Unix time in seconds. Differences are true durations, even if the system clock is changed."""
    return _BEGAN_S + time.monotonic()
