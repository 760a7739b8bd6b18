"""Probe scheduling: one completion of each group first, then the longest groups (Seer, arXiv 2511.14617)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Decision, Event, Finished, Scored, Withdrawn
from inflight.rollouts.board import Board, OpenItem
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import TailRecall
from inflight.rollouts.rounds import issue_in_order


class ProbeFirst(Scheduler):
    """Issues one completion of each offered group, the probe, and then the groups with the longest probes first.

    While a probe is running, its current length counts. Completions are issued one by one to the least loaded endpoint,
    so a group may be spread over several. The scheduler asks for ``lookahead`` times as many completions as the
    endpoints accept, so that it has groups to choose from.
    """

    def __init__(self, group_size: int, history: HistoryStore, seed: int = 0, *, lookahead: float = 1.5) -> None:
        self._group_size = group_size
        self._board = Board()
        self._lookahead = lookahead
        self._probes: dict[int, int] = {}
        """The length of the completion that finished first, by item."""
        self._recall = TailRecall()

    def observe(self, event: Event) -> None:
        match event:
            case Finished(_, item, _, num_tokens) if item in self._board.items:
                self._probes.setdefault(item, num_tokens)
            case Scored(_, item, _, lengths):
                probe = self._probes.pop(item, None)
                if probe is not None and len(lengths) > 1:
                    self._recall.note(probe, max(lengths))
            case Withdrawn(_, item):
                self._probes.pop(item, None)
        self._board.observe(event)

    def num_wanted(self) -> int:
        missing = self._lookahead * self._board.capacity - self._board.num_open
        return max(0, round(missing / self._group_size))

    def decide(self, time_s: float) -> Sequence[Decision]:
        waiting = self._board.unissued()
        if not waiting or not self._board.capacity > self._board.num_running:
            return []
        return issue_in_order(self._board, self._in_order(waiting, time_s), time_s)

    def _in_order(self, waiting: list[OpenItem], time_s: float) -> Iterator[tuple[int, int]]:
        """Yield one completion of each group that has not started, then the others, longest group first.

        Lengths are computed before the first completion is yielded. The caller may issue each one immediately.
        """
        probes = [(item.index, item.unissued[0]) for item in waiting if len(item.unissued) == self._group_size]
        longest_first = sorted(waiting, key=lambda item: -self._expected(item, time_s))
        yield from probes
        for item in longest_first:
            for completion in item.unissued:
                yield item.index, completion

    def _expected(self, item: OpenItem, time_s: float) -> float:
        """Return the length of the probe, or that of the longest running completion if it is longer."""
        longest: float = self._probes.get(item.index, 0)
        for completion in item.running:
            longest = max(longest, self._board.estimated_tokens(item, completion, time_s))
        return longest

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        recall = self._recall.value()
        return {} if recall is None else {"predictor_recall": recall}
