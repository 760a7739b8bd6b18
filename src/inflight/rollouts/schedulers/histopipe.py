"""Assigns groups to endpoints by expected length, in alternating order (RhymeRL, arXiv 2508.18588, section 5)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Abort, Decision, Event, Returned, Scored, Withdrawn
from inflight.rollouts.board import Board, OpenItem
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import TailRecall, make_predictor, predicted_length
from inflight.rollouts.rounds import Queues, Rounds, issue_in_order, record_decision


class HistoPipe(Scheduler):
    """Sorts each round by predicted length, and cuts it into one rank group for each endpoint.

    The work of the rank groups grows linearly with their rank, with the smallest slope at which the last group can
    still hold the longest completions; ``linear = False`` makes groups of equal size instead. Odd rounds assign the
    groups to the endpoints from short to long, and even rounds from long to short, so that two consecutive rounds
    together take the same time on every endpoint. Two rounds are open at a time: an endpoint that has finished one
    begins the next, so tokens are at most one round stale.

    If ``rank_groups`` is set, each round is cut into that many groups of equal size, and whole endpoints are allocated
    to the groups so that the groups' times grow roughly linearly, as RhymeRL allocates workers. This works only with
    several times as many endpoints as groups; without ``rank_groups``, the times grow roughly linearly with any number
    of endpoints.

    A completion that is ``outlier`` times as long as the longest prediction of its rank group is aborted once, if its
    endpoint keeps the sampled tokens, and continues on the least loaded endpoint. RhymeRL also moves such completions,
    but recomputes them; its threshold is not published.
    """

    def __init__(
        self,
        group_size: int,
        history: HistoryStore,
        seed: int = 0,
        *,
        groups_per_round: int | None = None,
        predictor: str = "history",
        linear: bool = True,
        rank_groups: int | None = None,
        alternate: bool = True,
        outlier: float = 2.0,
    ) -> None:
        self._group_size = group_size
        self._board = Board()
        self._rounds = Rounds(groups_per_round, max_open=2)
        self._queues = Queues()
        self._predictor = make_predictor(predictor, history)
        self._linear = linear
        self._rank_groups = rank_groups
        self._alternate = alternate
        self._outlier = outlier
        self._num_rounds = 0
        self._longest: dict[int, float] = {}
        """The longest prediction in each item's rank group; infinite for an item without history."""
        self._predicted: dict[int, float] = {}
        self._migrated: set[tuple[int, int]] = set()
        self._returned: list[tuple[int, int]] = []
        """Returned completions, to be issued to the least loaded endpoint."""
        self._recall = TailRecall()
        self._num_migrated = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, Scored) and event.item in self._predicted:
            self._recall.note(self._predicted[event.item], max(event.lengths))
        self._board.observe(event)
        self._rounds.observe(event)
        if isinstance(event, Returned) and event.item in self._board.items:
            self._returned.append((event.item, event.completion))
        if isinstance(event, Scored | Withdrawn) and event.item in self._predicted:
            del self._predicted[event.item], self._longest[event.item]
            self._migrated = {pair for pair in self._migrated if pair[0] != event.item}

    def num_wanted(self) -> int:
        return self._rounds.num_wanted()

    def decide(self, time_s: float) -> Sequence[Decision]:
        is_idle = self._board.num_running == 0 and not len(self._queues)
        if self._board.capacity and (items := self._rounds.take(is_idle=is_idle)):
            self._plan([self._board.items[item] for item in items])
        self._returned = [pair for pair in self._returned if self._is_unissued(pair)]
        decisions = issue_in_order(self._board, self._returned, time_s)
        del self._returned[: len(decisions)]
        return [*decisions, *self._queues.issue(self._board, time_s), *self._outliers(time_s)]

    def _is_unissued(self, pair: tuple[int, int]) -> bool:
        item = self._board.items.get(pair[0])
        return item is not None and pair[1] in item.unissued

    def _plan(self, items: list[OpenItem]) -> None:
        """Assign a rank group of the round to each endpoint."""
        median = self._board.median_length()
        known = {item.index: predicted_length(self._predictor, item, math.inf) for item in items}
        lengths = {index: median if length == math.inf else length for index, length in known.items()}
        items.sort(key=lambda item: lengths[item.index])
        endpoints = sorted(endpoint.name for endpoint in self._board.endpoints.values() if endpoint.is_open)
        if self._alternate and self._num_rounds % 2:
            endpoints.reverse()
        self._num_rounds += 1
        for group_endpoints, start, end in self._rank(endpoints, [lengths[item.index] for item in items]):
            members = items[start:end]
            longest = max((lengths[item.index] for item in members), default=0.0)
            work = dict.fromkeys(group_endpoints, 0.0)
            for item in members:
                length = lengths[item.index]
                self._predicted[item.index] = length
                self._longest[item.index] = longest if known[item.index] < math.inf else math.inf
                name = min(work, key=work.__getitem__)
                work[name] += length
                self._queues.put(name, item)

    def _rank(self, endpoints: Sequence[str], lengths: Sequence[float]) -> Iterator[tuple[Sequence[str], int, int]]:
        """Yield the endpoints of each rank group, and where the group begins and ends in the ascending ``lengths``."""
        num_groups = min(self._rank_groups, len(endpoints), len(lengths)) if self._rank_groups else len(endpoints)
        cut = equal_cuts(len(lengths), num_groups)
        endpoint_cuts = equal_cuts(len(endpoints), num_groups)
        if self._linear and self._rank_groups:
            works = [sum(lengths[start:end]) for start, end in itertools.pairwise([0, *cut, len(lengths)])]
            endpoint_cuts = [*itertools.accumulate(whole_endpoints(works, len(endpoints)))][:-1]
        elif self._linear:
            cut = linear_cuts(lengths, num_groups, self._board.capacity / len(endpoints) / self._group_size)
        bounds = zip(
            [0, *cut], [*cut, len(lengths)], [0, *endpoint_cuts], [*endpoint_cuts, len(endpoints)], strict=True
        )
        for start, end, first, last in bounds:
            yield endpoints[first:last], start, end

    def _outliers(self, time_s: float) -> list[Decision]:
        """Abort the completions that have outgrown their rank group, on endpoints for which other completions wait."""
        decisions: list[Decision] = []
        full = {name for name, it in self._board.endpoints.items() if it.keeps_partials and self._queues.waits(name)}
        for index, longest in self._longest.items() if full else ():
            item = self._board.items[index]
            for i in item.running:
                if item.running_on[i] not in full or (index, i) in self._migrated:
                    continue
                if self._board.estimated_tokens(item, i, time_s) > self._outlier * longest:
                    self._migrated.add((index, i))
                    self._num_migrated += 1
                    decisions.append(record_decision(self._board, Abort(index, (i,)), time_s))
        return decisions

    def state(self) -> dict[str, Any]:
        return {"num_rounds": self._num_rounds}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_rounds = int(state["num_rounds"])

    def metrics(self) -> Mapping[str, float]:
        recall, num_migrated = self._recall.value(), self._num_migrated
        self._num_migrated = 0
        return {"migrated": num_migrated, **({} if recall is None else {"predictor_recall": recall})}


def equal_cuts(num_items: int, num_parts: int) -> list[int]:
    """Return where to cut a sequence into parts with about equal numbers of items."""
    return [round(num_items * part / num_parts) for part in range(1, num_parts)]


def whole_endpoints(works: Sequence[float], num_endpoints: int) -> list[int]:
    """Return the number of endpoints for each rank group, so that the groups' times grow about linearly with rank.

    The line begins with the first group on one endpoint, and has the smallest slope, found by binary search, for which
    there are enough endpoints (RhymeRL, section 5, first tier). The slowest groups receive the endpoints left over by
    rounding.
    """

    def numbers(slope: float) -> list[int]:
        first = max(1.0, works[0])
        return [max(1, round(work / (first * (1 + slope * rank)))) for rank, work in enumerate(works)]

    low, high = 0.0, max(1.0, *works)  # a line so steep that each group gets one
    for _ in range(60):
        slope = (low + high) / 2
        low, high = (low, slope) if sum(numbers(slope)) <= num_endpoints else (slope, high)
    nums = numbers(high)
    for _ in range(num_endpoints - sum(nums)):
        nums[max(range(len(works)), key=lambda rank: works[rank] / nums[rank])] += 1
    return nums


def linear_cuts(lengths: Sequence[float], num_parts: int, num_at_once: float = 1.0) -> list[int]:
    """Return where to cut ascending lengths into parts whose sums grow linearly from the first to the last.

    An endpoint samples ``num_at_once`` completions at a time, so a part takes at least its sum divided by
    ``num_at_once``, and at least its longest length. The last part receives the larger of its equal share and the
    longest length, the first part receives the amount that keeps the mean unchanged, and the others lie on the line
    between them.
    """
    share = sum(lengths) / num_parts / num_at_once
    last = min(max(share, lengths[-1]), 1.9 * share)
    targets = [
        num_at_once * (2 * share - last + (last - share) * 2 * part / max(1, num_parts - 1))
        for part in range(num_parts)
    ]
    cuts, before, bound = [], 0.0, 0.0
    position = 0
    for target in targets[:-1]:
        bound += target
        while position < len(lengths) and before + lengths[position] / 2 < bound:
            before += lengths[position]
            position += 1
        cuts.append(position)
    return cuts
