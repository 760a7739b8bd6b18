"""Lanes of a timeline: individual time spans, or bins if there are too many of them.

Times are seconds since the run began.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from inflight.observe.watch.series import Array, rounded

MAX_SPANS = 100_000
"""Maximum number of spans that a lane keeps; if there are more, the oldest half is dropped."""


class Lane:
    """The activity of a server or a rank, or one kind of work, as spans in rows without overlap."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.num_rows = 1
        self.forgotten_until_s = 0.0
        """Spans that ended before this time were dropped."""
        self._starts, self._ends, self._rows = array("d"), array("d"), array("i")
        self._facts: list[Any] = []
        self._row_ends: list[float] = []

    def __len__(self) -> int:
        return len(self._facts)

    def add(self, start_s: float, end_s: float, facts: Any, row: int | None = None) -> None:
        """Add a span, in a free row unless ``row`` is given. Spans must be added in the order of their ends."""
        if row is None:
            row = self._free_row(start_s, end_s)
        self.num_rows = max(self.num_rows, row + 1)
        self._starts.append(start_s)
        self._ends.append(max(start_s, end_s))
        self._rows.append(row)
        self._facts.append(facts)
        if len(self._facts) > MAX_SPANS:
            self.forgotten_until_s = self._ends[MAX_SPANS // 2 - 1]
            self._keep(np.arange(MAX_SPANS // 2, len(self._facts)))

    def forget_after(self, time_s: float) -> None:
        """Drop the spans that end after ``time_s``."""
        ends = np.array(self._ends)
        if (ends > time_s).any():
            self._keep(np.flatnonzero(ends <= time_s))
        self._row_ends = [min(end, time_s) for end in self._row_ends]

    def window(self, from_s: float, to_s: float, num_bins: int, max_spans: int) -> dict[str, Any]:
        """Return what lies in a window: ``spans`` as (start, end, row, facts), or ``bins`` if there are too many spans.

        The value of a bin is the mean number of concurrent spans.
        """
        starts, ends = np.array(self._starts), np.array(self._ends)
        found = np.flatnonzero((ends >= from_s) & (starts <= to_s))
        if len(found) > max_spans:
            return {"bins": _occupancy(starts[found], ends[found], from_s, to_s, num_bins)}
        return {
            "spans": [(starts[i].item(), ends[i].item(), self._rows[i], self._facts[i]) for i in found.tolist()],
        }

    def _free_row(self, start_s: float, end_s: float) -> int:
        """Return the row that has been free for the shortest time, so that as few rows as possible are used."""
        free = [(end, row) for row, end in enumerate(self._row_ends) if end <= start_s]
        if not free:
            self._row_ends.append(end_s)
            return len(self._row_ends) - 1
        row = max(free)[1]
        self._row_ends[row] = end_s
        return row

    def _keep(self, kept: Array) -> None:
        self._starts = array("d", np.array(self._starts)[kept].tobytes())
        self._ends = array("d", np.array(self._ends)[kept].tobytes())
        self._rows = array("i", np.array(self._rows, dtype=np.int32)[kept].tobytes())
        self._facts = [self._facts[i] for i in kept.tolist()]


def _occupancy(starts: Array, ends: Array, from_s: float, to_s: float, num_bins: int) -> list[float]:
    """Return the mean number of concurrent spans in each bin."""
    edges = np.linspace(from_s, to_s, num_bins + 1)
    busy = _seconds_after(starts, edges) - _seconds_after(ends, edges)
    return rounded(np.diff(busy) / max((to_s - from_s) / num_bins, 1e-9), 3)


def _seconds_after(times: Array, edges: Array) -> Array:
    """Return, for each edge, the seconds from each earlier time to the edge, added up."""
    ordered = np.sort(times)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    before = np.searchsorted(ordered, edges)
    result: Array = before * edges - sums[before]
    return result
