"""Rounds of groups that are planned together, for schedulers that sort or race the groups of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from inflight.contracts.scheduling import Decision, Event, Issue, Offered, Scored, StepWanted, Withdrawn
from inflight.rollouts.board import Board, OpenItem


@dataclass(slots=True)
class Rounds:
    """Collects offered items into rounds. A round stays open until its last item is scored or withdrawn."""

    groups_per_round: int | None = None
    """If None, as many groups as a step needs, according to the run."""
    surplus: float = 1.0
    """How many groups are offered for each group that a round needs."""
    max_open: int = 1
    gathered: list[int] = field(default_factory=list)
    """Items collected for the next round."""
    open: list[set[int]] = field(default_factory=list)
    _needed: int = 1

    @property
    def num_needed(self) -> int:
        """The number of groups that a round needs."""
        return self.groups_per_round or self._needed

    @property
    def size(self) -> int:
        """The number of groups that a round has, surplus included."""
        return math.ceil(self.surplus * self.num_needed)

    def num_wanted(self) -> int:
        """Return how many more items the next round needs; 0 while ``max_open`` rounds are open."""
        return max(0, self.size - len(self.gathered)) if len(self.open) < self.max_open else 0

    def observe(self, event: Event) -> None:
        """Update the rounds from an event."""
        match event:
            case StepWanted(_, _, num_groups):
                self._needed = max(1, num_groups)
            case Offered(_, item):
                self.gathered.append(item)
            case Scored(_, item) | Withdrawn(_, item):
                self.gathered = [other for other in self.gathered if other != item]
                for members in self.open:
                    members.discard(item)
                self.open = [members for members in self.open if members]
            case _:
                pass

    def take(self, *, is_idle: bool) -> list[int]:
        """Open the next round and return its items; return an empty list while the round is incomplete.

        If nothing is running (``is_idle``), an incomplete round is opened too, because no more items may be available.
        """
        if not self.gathered or len(self.open) >= self.max_open:
            return []
        if len(self.gathered) < self.size and not is_idle:
            return []
        items, self.gathered = self.gathered, []
        self.open.append({*items})
        return items


class Queues:
    """The completions that wait to be issued, in order, for each endpoint."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, int]]] = {}
        """Queued pairs of item and completion, by endpoint."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, endpoint: str, item: OpenItem) -> None:
        """Append the unissued completions of an item to the queue of an endpoint."""
        self._waiting.setdefault(endpoint, []).extend((item.index, i) for i in item.unissued)

    def waits(self, endpoint: str) -> bool:
        """Return whether any completion is waiting for an endpoint."""
        return bool(self._waiting.get(endpoint))

    def issue(self, board: Board, time_s: float) -> list[Decision]:
        """Fill each endpoint from its queue; completions whose endpoint has left are issued to the least loaded one."""
        decisions: list[Decision] = []
        for name, waiting in list(self._waiting.items()):
            endpoint = board.endpoints.get(name)
            is_gone = endpoint is None or not endpoint.is_open
            while waiting:
                index, completion = waiting[0]
                item = board.items.get(index)
                if item is None or completion not in item.unissued:
                    del waiting[0]
                    continue
                target = board.least_loaded(1) if is_gone else endpoint
                if target is None or target.num_free < 1:
                    break
                del waiting[0]
                decisions.append(record_decision(board, Issue(target.name, index, (completion,)), time_s))
        self._waiting = {name: waiting for name, waiting in self._waiting.items() if waiting}
        return decisions


def record_decision(board: Board, decision: Decision, time_s: float) -> Decision:
    """Record a decision on the board, and return it."""
    board.record(decision, time_s)
    return decision


def issue_in_order(board: Board, order: Iterable[tuple[int, int]], time_s: float) -> list[Decision]:
    """Issue (item, completion) pairs in order, each to the least loaded endpoint, until no slot is free."""
    decisions: list[Decision] = []
    for index, completion in order:
        endpoint = board.least_loaded(1)
        if endpoint is None:
            break
        decisions.append(record_decision(board, Issue(endpoint.name, index, (completion,)), time_s))
    return decisions


def unissued(board: Board, key: Callable[[OpenItem], object] | None = None) -> Iterator[tuple[int, int]]:
    """Yield the (item, completion) pairs that are neither running nor finished, oldest first or sorted by ``key``.

    The caller may issue a pair before it takes the next one.
    """
    items = board.unissued()
    if key is not None:
        items.sort(key=key)  # type: ignore[arg-type]
    for item in items:
        for completion in item.unissued:
            yield item.index, completion
