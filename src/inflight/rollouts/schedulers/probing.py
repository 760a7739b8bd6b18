"""One completion of each group first, then the longest groups first (Seer, arXiv 2511.14617)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.rollouts.board import Board, Item
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import TailRecall
from inflight.rollouts.rounds import issue_in_order
from inflight.scheduling import Decision, Event, Finished, Scored


class ProbeFirst(Scheduler):
    """Issues one completion of each offered group, and the others in the order of the length that it shows.

    A group whose probe still runs counts as long as the probe is by now. Completions go one by one to where there is
    most room, so a group may be spread. ``lookahead`` times the completions that the endpoints take are offered at a
    time, so that there is something to choose from.
    """

    def __init__(self, group_size: int, history: HistoryStore, seed: int = 0, *, lookahead: float = 1.5) -> None:
        self._group_size = group_size
        self._board = Board()
        self._lookahead = lookahead
        self._probes: dict[int, int] = {}
        """By item, the length of the completion that finished first."""
        self._recall = TailRecall()

    def tell(self, event: Event) -> None:
        match event:
            case Finished(_, item, _, num_tokens):
                self._probes.setdefault(item, num_tokens)
            case Scored(_, item, _, lengths) if len(lengths) > 1 and item in self._probes:
                self._recall.note(self._probes[item], max(lengths))
        self._board.tell(event)
        self._probes = {item: length for item, length in self._probes.items() if item in self._board.items}

    def num_wanted(self) -> int:
        num_open = sum(len(item.unissued) + len(item.running) for item in self._board.items.values())
        missing = self._lookahead * self._board.capacity - num_open
        return max(0, round(missing / self._group_size))

    def decide(self, time_s: float) -> Sequence[Decision]:
        waiting = self._board.unissued()
        if not waiting or not self._board.capacity > self._board.num_running:
            return []
        probes = [(item.index, item.unissued[0]) for item in waiting if len(item.unissued) == self._group_size]
        waiting.sort(key=lambda item: -self._expected(item, time_s))
        chosen = {*probes}
        others = [(item.index, i) for item in waiting for i in item.unissued if (item.index, i) not in chosen]
        return issue_in_order(self._board, [*probes, *others], time_s)

    def _expected(self, item: Item, time_s: float) -> float:
        finished = self._probes.get(item.index, 0)
        return max([finished, *(self._board.tokens_so_far(item, i, time_s) for i in item.running)])

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        recall = self._recall.value()
        return {} if recall is None else {"predictor_recall": recall}
