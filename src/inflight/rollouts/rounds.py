"""Rounds: as many groups as a step needs, planned together. For schedulers that sort or race the groups of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from inflight.contracts.scheduling import Decision, Event, Issue, Offered, Scored, StepWanted, Withdrawn
from inflight.rollouts.board import Board, OpenItem


@dataclass(slots=True)
class Rounds:
    """Collects offered items until a round is whole; a round is open until its last item is scored or withdrawn."""

    groups_per_round: int | None = None
    """None: as many as the run states that a step needs."""
    surplus: float = 1.0
    """How many times as many groups are offered as a round needs."""
    max_open: int = 1
    gathered: list[int] = field(default_factory=list)
    """Items of the next round."""
    open: list[set[int]] = field(default_factory=list)
    _needed: int = 1

    @property
    def num_needed(self) -> int:
        """Groups that a round needs."""
        return self.groups_per_round or self._needed

    @property
    def size(self) -> int:
        """Groups that a round has."""
        return math.ceil(self.surplus * self.num_needed)

    def num_wanted(self) -> int:
        """Return how many items are missing for the next round; 0 while enough rounds are open."""
        return max(0, self.size - len(self.gathered)) if len(self.open) < self.max_open else 0

    def tell(self, event: Event) -> None:
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
        """Open the next round and return its items, once it is whole; empty until then.

        If nothing runs (``is_idle``), a round that is not whole is opened too: no more items may be had.
        """
        if not self.gathered or len(self.open) >= self.max_open:
            return []
        if len(self.gathered) < self.size and not is_idle:
            return []
        items, self.gathered = self.gathered, []
        self.open.append({*items})
        return items


class Queues:
    """For each endpoint, the completions that wait to be issued there, in order."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, int]]] = {}
        """(item, completion), by endpoint."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, endpoint: str, item: OpenItem) -> None:
        """Put the unissued completions of an item at the end of an endpoint's queue."""
        self._waiting.setdefault(endpoint, []).extend((item.index, i) for i in item.unissued)

    def waits(self, endpoint: str) -> bool:
        return bool(self._waiting.get(endpoint))

    def issue(self, board: Board, time_s: float) -> list[Decision]:
        """Fill each endpoint from its queue; completions whose endpoint is gone go wherever there is room."""
        decisions: list[Decision] = []
        for name, waiting in list(self._waiting.items()):
            place = board.places.get(name)
            is_gone = place is None or not place.is_open
            while waiting:
                index, completion = waiting[0]
                item = board.items.get(index)
                if item is None or completion not in item.unissued:
                    del waiting[0]
                    continue
                target = board.least_loaded(1) if is_gone else place
                if target is None or target.room < 1:
                    break
                del waiting[0]
                decisions.append(carried_out(board, Issue(target.name, index, (completion,)), time_s))
        self._waiting = {name: waiting for name, waiting in self._waiting.items() if waiting}
        return decisions


def carried_out(board: Board, decision: Decision, time_s: float) -> Decision:
    """Note a decision on the board, and return it."""
    board.decided(decision, time_s)
    return decision


def issue_in_order(board: Board, order: Iterable[tuple[int, int]], time_s: float) -> list[Decision]:
    """Issue (item, completion) pairs in order, each where there is most room, until no endpoint has any."""
    decisions: list[Decision] = []
    for index, completion in order:
        place = board.least_loaded(1)
        if place is None:
            break
        decisions.append(carried_out(board, Issue(place.name, index, (completion,)), time_s))
    return decisions


def unissued(board: Board, key: Callable[[OpenItem], object] | None = None) -> Iterator[tuple[int, int]]:
    """Yield all (item, completion) pairs that neither run nor have finished, oldest first or sorted by ``key``.

    A pair may be issued before the next is taken.
    """
    items = board.unissued()
    if key is not None:
        items.sort(key=key)  # type: ignore[arg-type]
    for item in items:
        for completion in item.unissued:
            yield item.index, completion
