"""The default scheduler, which issues whole groups to the least loaded endpoint (PipelineRL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Decision, Event, Issue
from inflight.rollouts.board import Board
from inflight.rollouts.history import HistoryStore


class LeastLoaded(Scheduler):
    """Issues each item as a whole to the least loaded endpoint, as soon as one has enough free slots.

    Like PipelineRL (arXiv 2509.19128), it keeps as many sequences in progress on each endpoint as the endpoint accepts,
    and issues new ones as others finish.
    """

    def __init__(self, group_size: int, history: HistoryStore | None = None, seed: int = 0) -> None:
        self._board = Board()
        self._group_size = group_size

    def observe(self, event: Event) -> None:
        self._board.observe(event)

    def num_wanted(self) -> int:
        return 1 if not self._board.unissued() and self._board.least_loaded(self._group_size) is not None else 0

    def decide(self, time_s: float) -> Sequence[Decision]:
        decisions: list[Decision] = []
        for item in self._board.unissued():
            endpoint = self._board.least_loaded(len(item.unissued))
            if endpoint is None:
                break
            issue = Issue(endpoint.name, item.index, item.unissued)
            self._board.record(issue, time_s)
            decisions.append(issue)
        return decisions

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
