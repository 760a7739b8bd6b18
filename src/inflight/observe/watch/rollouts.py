"""The history of each item of a run: requests, completions, rewards, and the step that trained on it."""

from __future__ import annotations

import statistics
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_ITEMS = 5000
"""Maximum number of items that are kept; if there are more, the oldest are dropped."""

Part = tuple[int, Sequence[Sequence[int]], str]
"""The number of tokens sampled so far, their spans (start, end, version), and the finish reason."""


@dataclass
class ItemRow:
    """One group, from its first request on."""

    number: int
    start_s: float
    end_s: float
    state: str = "unfinished"
    """``waiting`` (finished), ``trained``, ``dropped``, or ``unfinished``."""
    reason: str = ""
    """Why the item was dropped."""
    version: int | None = None
    """The version that was produced by the step that trained on the item."""
    oldest: int | None = None
    newest: int | None = None
    endpoints: dict[str, None] = field(default_factory=dict)
    rewards: Sequence[float] = ()
    lengths: Sequence[int] = ()
    parts: dict[int, Part] = field(default_factory=dict)
    """Parts by the number of the completion or episode in its group."""
    turns: dict[int, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Start, end and number of tokens of each sampled turn of an episode, by the episode's number."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    what: list[str] = field(default_factory=list)
    """A description of each failure."""

    def row(self) -> dict[str, Any]:
        """Return the row of this item in the list of items."""
        return {
            "item": self.number,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "state": self.state,
            "reason": self.reason,
            "version": self.version,
            "oldest": self.oldest,
            "newest": self.newest,
            "endpoints": list(self.endpoints),
            "rewards": list(self.rewards),
            "lengths": list(self.lengths or (part[0] for _, part in sorted(self.parts.items()))),
            "num_failures": len(self.what) + sum(it["error"] not in (None, "cancelled") for it in self.requests),
        }

    def detail(self) -> dict[str, Any]:
        """Return everything that the events record about the item."""
        parts = [
            {
                "number": number,
                "num_tokens": num_tokens,
                "spans": [list(span) for span in spans],
                "finish_reason": reason,
                "turns": [list(turn) for turn in self.turns.get(number, ())],
            }
            for number, (num_tokens, spans, reason) in sorted(self.parts.items())
        ]
        return {**self.row(), "parts": parts, "requests": self.requests, "what": self.what}


class Items:
    """The newest items of a run."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, ItemRow] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ItemRow]:
        return iter(self._items.values())

    def get(self, number: int) -> ItemRow | None:
        return self._items.get(number)

    def at(self, number: int, start_s: float, end_s: float) -> ItemRow:
        """Return the item with this number, which is created if it is unknown, and extend its time span."""
        item = self._items.get(number)
        if item is None:
            item = self._items[number] = ItemRow(number, start_s, end_s)
            if len(self._items) > MAX_ITEMS:
                self._items.popitem(last=False)
        item.start_s, item.end_s = min(item.start_s, start_s), max(item.end_s, end_s)
        return item

    def forget_after(self, time_s: float, version: int) -> None:
        """Drop items with events after ``time_s``, and items on which versions after ``version`` were trained."""
        for number in [it.number for it in self if it.end_s > time_s or (it.version or 0) > version]:
            del self._items[number]

    def page(self, state: str, order: str, offset: int, limit: int) -> dict[str, Any]:
        """Return a page of the items in a state, sorted by ``newest``, ``reward``, ``length`` or ``age``.

        If ``state`` is empty, items in all states are included.
        """
        found = [item for item in self if state in ("", item.state)]
        found.sort(key=_ORDERS.get(order, _ORDERS["newest"]))
        counts = Counter(item.state for item in self)
        rows = [item.row() for item in found[offset : offset + limit]]
        return {"total": len(found), "counts": dict(counts), "offset": offset, "items": rows}


def _mean_reward(item: ItemRow) -> float:
    return -statistics.fmean(item.rewards) if item.rewards else 1e300


_ORDERS = {
    "newest": lambda item: (item.state == "unfinished", -item.end_s),
    "reward": _mean_reward,
    "length": lambda item: -sum(item.row()["lengths"]),
    "age": lambda item: -(item.version - item.oldest if item.version is not None and item.oldest is not None else -1),
}


def longest_part(parts: Sequence[Mapping[str, Any]], before: Mapping[int, Part]) -> list[tuple[float, int]]:
    """Return where each version ends in the longest completion of a request, as a share of its tokens.

    Tokens that earlier requests sampled (``before``) do not count.
    """
    longest, first = None, 0
    for part in parts:
        begun = before[part["number"]][0] if part["number"] in before else 0
        if longest is None or part["num_tokens"] - begun > longest["num_tokens"] - first:
            longest, first = part, begun
    if longest is None or longest["num_tokens"] <= first:
        return []
    num_tokens = longest["num_tokens"] - first
    return [(round((end - first) / num_tokens, 4), version) for _, end, version in longest["spans"] if end > first]
