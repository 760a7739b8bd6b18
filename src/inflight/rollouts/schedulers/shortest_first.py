"""The shortest groups first (SortedRL, arXiv 2603.23414)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.rollouts.board import Board, Item
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import make_predictor, predicted
from inflight.rollouts.rounds import issue_in_order, unissued
from inflight.scheduling import Decision, Event, StepWanted


class ShortestFirst(Scheduler):
    """Issues the shortest expected groups first, and no group later than ``max_wait`` steps.

    Groups of like length run together, so fewer slots wait for a long one. Which groups are trained first then depends
    on their length: the run compares what is trained with what was sampled, and says so when they part.
    """

    def __init__(
        self,
        group_size: int,
        history: HistoryStore,
        seed: int = 0,
        *,
        predictor: str = "history",
        lookahead: float = 2.0,
        max_wait: int = 2,
    ) -> None:
        self._group_size = group_size
        self._board = Board()
        self._predictor = make_predictor(predictor, history)
        self._lookahead = lookahead
        self._max_wait = max_wait
        self._offered_at: dict[int, int] = {}
        self._version = 0

    def tell(self, event: Event) -> None:
        if isinstance(event, StepWanted):
            self._version = event.version
        self._board.tell(event)
        self._offered_at = {item: self._offered_at.get(item, self._version) for item in self._board.items}

    def num_wanted(self) -> int:
        num_open = sum(len(item.unissued) + len(item.running) for item in self._board.items.values())
        return max(0, round((self._lookahead * self._board.capacity - num_open) / self._group_size))

    def decide(self, time_s: float) -> Sequence[Decision]:
        if self._board.capacity <= self._board.num_running:
            return []
        return issue_in_order(self._board, unissued(self._board, self._rank), time_s)

    def _rank(self, item: Item) -> tuple[bool, float]:
        has_waited = self._version - self._offered_at[item.index] >= self._max_wait
        return not has_waited, predicted(self._predictor, item, self._board.median_length())

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
