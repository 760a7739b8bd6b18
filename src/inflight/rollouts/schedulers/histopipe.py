"""HistoPipe: endpoints by expected length, in alternating order (RhymeRL, arXiv 2508.18588, section 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.rollouts.board import Board, Item
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.predictors import TailRecall, make_predictor, predicted
from inflight.rollouts.rounds import Queues, Rounds, carried_out, issue_in_order
from inflight.scheduling import Abort, Decision, Event, Returned, Scored


class HistoPipe(Scheduler):
    """Sorts each round by predicted length, and cuts it into one rank group for each endpoint.

    The work of the rank groups grows linearly with their rank, with the smallest slope that leaves the longest
    completions room; ``linear = False`` cuts into equal numbers instead. Odd rounds go from short to long over the
    endpoints and even ones from long to short, so that two rounds together take every endpoint equally long. Two rounds
    are open at a time: an endpoint that is done with one begins the next, so tokens are at most one round stale.

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
        alternate: bool = True,
        outlier: float = 2.0,
    ) -> None:
        self._group_size = group_size
        self._board = Board()
        self._rounds = Rounds(groups_per_round, max_open=2)
        self._queues = Queues()
        self._predictor = make_predictor(predictor, history)
        self._linear = linear
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
        gone = self._predicted.keys() - self._board.items.keys()
        for item in gone:
            del self._predicted[item], self._longest[item]
        if gone:
            self._migrated = {pair for pair in self._migrated if pair[0] not in gone}

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

    def _plan(self, items: list[Item]) -> None:
        """Give each endpoint its rank group of a round."""
        median = self._board.median_length()
        known = {item.index: predicted(self._predictor, item, math.inf) for item in items}
        lengths = {index: median if length == math.inf else length for index, length in known.items()}
        items.sort(key=lambda item: lengths[item.index])
        places = sorted(place.name for place in self._board.places.values() if place.is_open)
        if self._alternate and self._num_rounds % 2:
            places.reverse()
        self._num_rounds += 1
        in_order = [lengths[item.index] for item in items]
        room = self._board.capacity / len(places) / self._group_size
        cut = linear_cuts(in_order, len(places), room) if self._linear else equal_cuts(len(items), len(places))
        for name, start, end in zip(places, [0, *cut], [*cut, len(items)], strict=True):
            for item in items[start:end]:
                self._predicted[item.index] = lengths[item.index]
                is_known = known[item.index] < math.inf
                self._longest[item.index] = max(in_order[start:end]) if is_known else math.inf
                self._queues.put(name, item)

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
