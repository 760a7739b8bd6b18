"""Progress lines for the user: how much work is done, the estimated time left, and the library's log records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINE_EVERY_S = 5.0


class ProgressLines:
    """Reports the progress towards ``total`` every few seconds, and the time left at the current rate."""

    def __init__(
        self, what: str, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._say, self._clock = what, total, say, clock
        self._started = self._last_line = clock()

    def update(self, done: int, more: str = "") -> None:
        """Report that ``done`` units are complete, unless the last report is recent and work remains."""
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
    """Pass log records of the ``inflight`` loggers, at level INFO and above, to ``say`` until this process ends."""
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("inflight")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
