"""The notices of a run: marks on its timeline, and failures."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

_NUM_FAILURES = 500
_NUM_MARKS = 2000


class Notices:
    """The newest marks and failures of a run, and how many failures of each kind there were."""

    def __init__(self) -> None:
        self.marks: deque[dict[str, Any]] = deque(maxlen=_NUM_MARKS)
        self.failures: deque[dict[str, Any]] = deque(maxlen=_NUM_FAILURES)
        self.num_failures: Counter[str] = Counter()

    def mark(self, event: Mapping[str, Any], kind: str, what: str) -> None:
        """Add a mark at the end of an event."""
        self.marks.append({"time_s": event["end_s"], "kind": kind, "what": what})

    def fail(self, event: Mapping[str, Any], kind: str, what: str, where: str) -> None:
        """Add a failure at the end of an event."""
        self.num_failures[kind] += 1
        self.failures.append({"time_s": event["end_s"], "kind": kind, "what": what[:2000], "where": where})

    def forget_marks_after(self, time_s: float) -> None:
        """Remove marks after ``time_s``, because the next process repeats that work."""
        self.marks = deque((mark for mark in self.marks if mark["time_s"] <= time_s), _NUM_MARKS)
