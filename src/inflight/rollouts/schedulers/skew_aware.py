"""Longest-first scheduling with separate endpoints for the long tail (StreamRL, arXiv 2504.15930, algorithm 2)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Decision, Event, Returned, Scored, Withdrawn
from inflight.rollouts.board import Board, OpenItem
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import TailRecall, make_predictor, predicted_length
from inflight.rollouts.rounds import Queues, Rounds


class SkewAware(Scheduler):
    """Reserves endpoints for the items of a round with the longest predictions, and issues the longest items first.

    The long part consists of the items with the longest predictions, a share of ``tail``; the short part is the rest.
    The long part receives the number of endpoints that minimizes the larger of the two parts' latencies (algorithm 2,
    with a tail of 20 %). The latency of a part is the time per token at the resulting batch size times a length: for
    the long part, the 90th percentile of the round's predictions, and for the short part, their median. The time per
    token is constant up to a batch of ``knee`` and proportional to the batch beyond it. If ``knee`` is None, the
    capacity of an endpoint is used, so that the batch never slows tokens down.

    Within each part, items are assigned to the endpoint with the least predicted work, longest first (LPT, within 4/3
    of the optimum, Graham 1969). ``tail = 0`` is LPT alone.
    """

    def __init__(
        self,
        group_size: int,
        history: HistoryStore,
        seed: int = 0,
        *,
        groups_per_round: int | None = None,
        predictor: str = "history",
        tail: float = 0.2,
        knee: float | None = None,
    ) -> None:
        self._group_size = group_size
        self._board = Board()
        self._rounds = Rounds(groups_per_round, max_open=2)
        self._queues = Queues()
        self._predictor = make_predictor(predictor, history)
        self._tail = tail
        self._knee = knee
        self._predicted: dict[int, float] = {}
        self._recall = TailRecall()

    def observe(self, event: Event) -> None:
        if isinstance(event, Scored) and event.item in self._predicted:
            self._recall.note(self._predicted[event.item], max(event.lengths))
        self._board.observe(event)
        self._rounds.observe(event)
        if isinstance(event, Returned) and (item := self._board.items.get(event.item)) is not None:
            endpoint = self._board.least_loaded(1)
            self._queues.put("" if endpoint is None else endpoint.name, item)
        if isinstance(event, Scored | Withdrawn):
            self._predicted.pop(event.item, None)

    def num_wanted(self) -> int:
        return self._rounds.num_wanted()

    def decide(self, time_s: float) -> Sequence[Decision]:
        is_idle = self._board.num_running == 0 and not len(self._queues)
        if self._board.capacity and (indices := self._rounds.take(is_idle=is_idle)):
            self._plan([self._board.items[index] for index in indices])
        return self._queues.issue(self._board, time_s)

    def _plan(self, items: list[OpenItem]) -> None:
        median = self._board.median_length()
        lengths = {item.index: predicted_length(self._predictor, item, median) for item in items}
        self._predicted |= lengths
        items.sort(key=lambda item: -lengths[item.index])
        endpoints = sorted(endpoint.name for endpoint in self._board.endpoints.values() if endpoint.is_open)
        num_long = math.ceil(self._tail * len(items))
        num_endpoints = self._split(items[:num_long], items[num_long:], lengths, len(endpoints))
        self._assign(items[:num_long], lengths, endpoints[:num_endpoints] or endpoints)
        self._assign(items[num_long:], lengths, endpoints[num_endpoints:] or endpoints)

    def _split(
        self, long: Sequence[OpenItem], short: Sequence[OpenItem], lengths: Mapping[int, float], num_endpoints: int
    ) -> int:
        """Return the number of endpoints for the long part; 0 if both parts share all endpoints."""
        if not long or not short or num_endpoints < 2:
            return 0
        known = sorted(lengths.values())
        long_length, short_length = known[math.ceil(0.9 * len(known)) - 1], statistics.median(known)
        capacity = self._board.capacity / num_endpoints

        def latency(num_items: int, num_of_them: int, length: float) -> float:
            batch = num_items * self._group_size / num_of_them
            at_a_time = min(batch, capacity)
            return length * max(1.0, at_a_time / (self._knee or capacity)) * math.ceil(batch / capacity)

        return min(
            range(1, num_endpoints),
            key=lambda n: max(latency(len(long), n, long_length), latency(len(short), num_endpoints - n, short_length)),
        )

    def _assign(self, items: Sequence[OpenItem], lengths: Mapping[int, float], endpoints: Sequence[str]) -> None:
        work = dict.fromkeys(endpoints, 0.0)
        for item in items:
            name = min(endpoints, key=lambda endpoint: work[endpoint])
            work[name] += lengths[item.index] * len(item.unissued)
            self._queues.put(name, item)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        recall = self._recall.value()
        return {} if recall is None else {"predictor_recall": recall}
