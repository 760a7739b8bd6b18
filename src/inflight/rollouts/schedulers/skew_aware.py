"""Longest first, and endpoints of their own for the long tail (StreamRL, arXiv 2504.15930, algorithm 2)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Decision, Event, Returned, Scored, Withdrawn
from inflight.rollouts.board import Board, OpenItem
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import TailRecall, make_predictor, predicted
from inflight.rollouts.rounds import Queues, Rounds


class SkewAware(Scheduler):
    """Gives the ``tail`` of a round, by predicted length, endpoints of its own, and issues longest first on each.

    How many endpoints the tail gets minimises the larger latency of both parts: seconds per token at the batch that an
    endpoint then has, times a length, which is the 90th percentile of the predictions for the tail and the median for
    the rest (algorithm 2; tail of 20 %). A token takes as long as in a batch of ``knee`` up to that batch, and grows
    with the batch beyond it; None: an endpoint's capacity, so that a batch never slows its tokens down. On an endpoint
    completions go to where the predicted work is least, longest first (LPT, within 4/3 of the optimum, Graham 1969).
    ``tail = 0`` is LPT alone.
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

    def tell(self, event: Event) -> None:
        if isinstance(event, Scored) and event.item in self._predicted:
            self._recall.note(self._predicted[event.item], max(event.lengths))
        self._board.tell(event)
        self._rounds.tell(event)
        if isinstance(event, Returned) and (item := self._board.items.get(event.item)) is not None:
            place = self._board.least_loaded(1)
            self._queues.put("" if place is None else place.name, item)
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
        lengths = {item.index: predicted(self._predictor, item, median) for item in items}
        self._predicted |= lengths
        items.sort(key=lambda item: -lengths[item.index])
        places = sorted(place.name for place in self._board.places.values() if place.is_open)
        num_long = math.ceil(self._tail * len(items))
        num_places = self._split(items[:num_long], items[num_long:], lengths, len(places))
        self._assign(items[:num_long], lengths, places[:num_places] or places)
        self._assign(items[num_long:], lengths, places[num_places:] or places)

    def _split(
        self, long: Sequence[OpenItem], short: Sequence[OpenItem], lengths: Mapping[int, float], num_places: int
    ) -> int:
        """Return how many endpoints the long part gets; 0: the parts share all of them."""
        if not long or not short or num_places < 2:
            return 0
        known = sorted(lengths.values())
        long_length, short_length = known[math.ceil(0.9 * len(known)) - 1], statistics.median(known)
        capacity = self._board.capacity / num_places

        def latency(num_items: int, num_of_them: int, length: float) -> float:
            batch = num_items * self._group_size / num_of_them
            at_a_time = min(batch, capacity)
            return length * max(1.0, at_a_time / (self._knee or capacity)) * math.ceil(batch / capacity)

        return min(
            range(1, num_places),
            key=lambda n: max(latency(len(long), n, long_length), latency(len(short), num_places - n, short_length)),
        )

    def _assign(self, items: Sequence[OpenItem], lengths: Mapping[int, float], places: Sequence[str]) -> None:
        work = dict.fromkeys(places, 0.0)
        for item in items:
            name = min(places, key=lambda place: work[place])
            work[name] += lengths[item.index] * len(item.unissued)
            self._queues.put(name, item)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        recall = self._recall.value()
        return {} if recall is None else {"predictor_recall": recall}
