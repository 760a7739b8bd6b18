"""HistoPipe: endpoints by expected length, in alternating order (RhymeRL, arXiv 2508.18588, section 5)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Abort, Decision, Event, Returned, Scored, Withdrawn
from inflight.rollouts.board import Board, OpenItem
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import TailRecall, make_predictor, predicted
from inflight.rollouts.rounds import Queues, Rounds, carried_out, issue_in_order


class HistoPipe(Scheduler):
    """Sorts each round by predicted length, and cuts it into one rank group for each endpoint.

    The work of the rank groups grows linearly with their rank, with the smallest slope that leaves the longest
    completions room; ``linear = False`` cuts into equal numbers instead. Odd rounds go from short to long over the
    endpoints and even ones from long to short, so that two rounds together take every endpoint equally long. Two rounds
    are open at a time: an endpoint that is done with one begins the next, so tokens are at most one round stale.

    ``rank_groups``: so many rank groups of equal numbers, to each of which as many whole endpoints are given as make
    the times of the groups grow linearly, as RhymeRL allocates workers. It takes several times as many endpoints as
    groups to come near a line; cuts come nearer with any number.

    A completion that is ``outlier`` times as long as the longest prediction of its rank group is aborted once, and
    continued where there is most room, if its endpoint keeps what it has sampled. (RhymeRL recomputes it elsewhere too.
    It does not publish its threshold.)
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
        """By item, the longest prediction in its rank group; infinite for an item without history."""
        self._predicted: dict[int, float] = {}
        self._migrated: set[tuple[int, int]] = set()
        self._homeless: list[tuple[int, int]] = []
        """Completions that were returned, to be issued wherever there is room."""
        self._recall = TailRecall()
        self._num_migrated = 0

    def tell(self, event: Event) -> None:
        if isinstance(event, Scored) and event.item in self._predicted:
            self._recall.note(self._predicted[event.item], max(event.lengths))
        self._board.tell(event)
        self._rounds.tell(event)
        if isinstance(event, Returned) and event.item in self._board.items:
            self._homeless.append((event.item, event.completion))
        if isinstance(event, Scored | Withdrawn) and event.item in self._predicted:
            del self._predicted[event.item], self._longest[event.item]
            self._migrated = {pair for pair in self._migrated if pair[0] != event.item}

    def num_wanted(self) -> int:
        return self._rounds.num_wanted()

    def decide(self, time_s: float) -> Sequence[Decision]:
        is_idle = self._board.num_running == 0 and not len(self._queues)
        if self._board.capacity and (items := self._rounds.take(is_idle=is_idle)):
            self._plan([self._board.items[item] for item in items])
        self._homeless = [pair for pair in self._homeless if self._is_unissued(pair)]
        decisions = issue_in_order(self._board, self._homeless, time_s)
        del self._homeless[: len(decisions)]
        return [*decisions, *self._queues.issue(self._board, time_s), *self._outliers(time_s)]

    def _is_unissued(self, pair: tuple[int, int]) -> bool:
        item = self._board.items.get(pair[0])
        return item is not None and pair[1] in item.unissued

    def _plan(self, items: list[OpenItem]) -> None:
        """Give each endpoint its rank group of a round."""
        median = self._board.median_length()
        known = {item.index: predicted(self._predictor, item, math.inf) for item in items}
        lengths = {index: median if length == math.inf else length for index, length in known.items()}
        items.sort(key=lambda item: lengths[item.index])
        places = sorted(place.name for place in self._board.places.values() if place.is_open)
        if self._alternate and self._num_rounds % 2:
            places.reverse()
        self._num_rounds += 1
        for places_of_group, start, end in self._rank(places, [lengths[item.index] for item in items]):
            members = items[start:end]
            longest = max((lengths[item.index] for item in members), default=0.0)
            work = dict.fromkeys(places_of_group, 0.0)
            for item in members:
                length = lengths[item.index]
                self._predicted[item.index] = length
                self._longest[item.index] = longest if known[item.index] < math.inf else math.inf
                name = min(work, key=work.__getitem__)
                work[name] += length
                self._queues.put(name, item)

    def _rank(self, places: Sequence[str], lengths: Sequence[float]) -> Iterator[tuple[Sequence[str], int, int]]:
        """Yield each rank group of ascending lengths: its endpoints, and where it begins and ends."""
        num_groups = min(self._rank_groups, len(places), len(lengths)) if self._rank_groups else len(places)
        cut = equal_cuts(len(lengths), num_groups)
        place_cut = equal_cuts(len(places), num_groups)
        if self._linear and self._rank_groups:
            works = [sum(lengths[start:end]) for start, end in itertools.pairwise([0, *cut, len(lengths)])]
            place_cut = [*itertools.accumulate(whole_endpoints(works, len(places)))][:-1]
        elif self._linear:
            cut = linear_cuts(lengths, num_groups, self._board.capacity / len(places) / self._group_size)
        bounds = zip([0, *cut], [*cut, len(lengths)], [0, *place_cut], [*place_cut, len(places)], strict=True)
        for start, end, first, last in bounds:
            yield places[first:last], start, end

    def _outliers(self, time_s: float) -> list[Decision]:
        """Abort the completions that outgrew their rank group, where something waits behind them."""
        decisions: list[Decision] = []
        full = {name for name, it in self._board.places.items() if it.keeps_partials and self._queues.waits(name)}
        for index, longest in self._longest.items() if full else ():
            item = self._board.items[index]
            for i in item.running:
                if item.running_on[i] not in full or (index, i) in self._migrated:
                    continue
                if self._board.tokens_so_far(item, i, time_s) > self._outlier * longest:
                    self._migrated.add((index, i))
                    self._num_migrated += 1
                    decisions.append(carried_out(self._board, Abort(index, (i,)), time_s))
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
    """Return where to cut a sequence into parts of about equal numbers."""
    return [round(num_items * part / num_parts) for part in range(1, num_parts)]


def whole_endpoints(works: Sequence[float], num_endpoints: int) -> list[int]:
    """Return how many endpoints each rank group gets, so that times of groups grow about linearly with their rank.

    The line begins with the first group on one endpoint, and has the smallest slope, found by binary search, for which
    there are enough endpoints (RhymeRL, section 5, its first tier). What rounding leaves goes to the slowest groups.
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


def linear_cuts(lengths: Sequence[float], num_parts: int, room: float = 1.0) -> list[int]:
    """Return where to cut ascending lengths into parts whose sums grow linearly from the first to the last.

    An endpoint samples ``room`` of them at a time, so a part takes at least its sum divided by ``room``, and at least
    its longest length. The last part is given the larger of its equal share and the longest length, and the first what
    makes the mean right; the rest lie on the line between them.
    """
    share = sum(lengths) / num_parts / room
    last = min(max(share, lengths[-1]), 1.9 * share)
    targets = [
        room * (2 * share - last + (last - share) * 2 * part / max(1, num_parts - 1)) for part in range(num_parts)
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
