"""Shortest-first scheduling of groups (SortedRL, arXiv 2603.23414)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Decision, Event, Offered, Scored, StepWanted, Withdrawn
from inflight.rollouts.board import Board, OpenItem
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import make_predictor, predicted_length
from inflight.rollouts.rounds import issue_in_order, unissued


class ShortestFirst(Scheduler):
    """Issues the groups with the shortest expected length first, but lets no group wait more than ``max_wait`` steps.

    Groups of similar length run together, so fewer slots wait for a long one. The order of training then depends on the
    length of groups: the run reports when long groups are left out of training (`BiasAudit`), but not when they are
    only trained on later.
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

    def observe(self, event: Event) -> None:
        match event:
            case StepWanted(_, version, _):
                self._version = version
            case Offered(_, item):
                self._offered_at.setdefault(item, self._version)
            case Scored(_, item) | Withdrawn(_, item):
                self._offered_at.pop(item, None)
        self._board.observe(event)

    def num_wanted(self) -> int:
        missing = self._lookahead * self._board.capacity - self._board.num_open
        return max(0, round(missing / self._group_size))

    def decide(self, time_s: float) -> Sequence[Decision]:
        if self._board.capacity <= self._board.num_running:
            return []
        median = self._board.median_length()

        def rank(item: OpenItem) -> tuple[bool, float]:
            has_waited = self._version - self._offered_at[item.index] >= self._max_wait
            return not has_waited, predicted_length(self._predictor, item, median)

        return issue_in_order(self._board, unissued(self._board, rank), time_s)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
