"""Lines for the user: how much of long work is done, how much time is left, and what the library logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINE_EVERY_S = 5.0


class ProgressLines:
    """Reports every few seconds how much of ``total`` is done, and how much time is left at the rate so far."""

    def __init__(
        self, what: str, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._say, self._clock = what, total, say, clock
        self._started = self._last_line = clock()

    def update(self, done: int, more: str = "") -> None:
        """Report that ``done`` is done, unless the last report is recent and work remains."""
        now = self._clock()
        if now - self._last_line < LINE_EVERY_S and done < self._total:
            return
        self._last_line = now
        elapsed_s = now - self._started
        left_s = elapsed_s / done * (self._total - done) if done else None
        parts = [f"{self._what}: {done:,} of {self._total:,} in {elapsed_s:.0f} s"]
        if left_s:
            parts.append(f"about {left_s:.0f} s left")
        if more:
            parts.append(more)
        self._say(", ".join(parts))


def report_log_records(say: Callable[[str], None]) -> None:
    """Pass on what the loggers below ``inflight`` report, from level INFO, for as long as this process lives."""
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("inflight")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
