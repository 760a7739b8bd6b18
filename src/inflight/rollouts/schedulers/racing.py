"""Schedulers that start more groups than a step needs, and resume slow groups or collect them for a long round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Abort, Decision, Event, Scored, StepReady, StepWanted
from inflight.rollouts.board import Board
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.rounds import Rounds, issue_in_order, record_decision, unissued


class OverProvision(Scheduler):
    """Starts more groups than a step needs, and aborts the remaining ones once the step is ready.

    The number of groups that a step needs is multiplied by ``surplus``.

    Aborted completions are resumed first in the next step (APRIL, arXiv 2509.18521); they keep their tokens if their
    endpoint supports that. This helps if a step has to wait for its last completion, as in conventional mode.
    """

    def __init__(
        self,
        group_size: int,
        history: HistoryStore,
        seed: int = 0,
        *,
        groups_per_round: int | None = None,
        surplus: float = 2.0,
    ) -> None:
        self.surplus = surplus
        self._board = Board()
        self._rounds = Rounds(groups_per_round, surplus)
        self._is_collecting = False
        self._is_over = False
        """Whether the next decision aborts the running completions."""
        self._num_resumed_tokens = 0

    def observe(self, event: Event) -> None:
        self._board.observe(event)
        self._rounds.observe(event)
        match event:
            case StepWanted():
                self._is_collecting, self._is_over = True, False
            case StepReady():
                self._is_collecting, self._is_over = False, True

    def num_wanted(self) -> int:
        if not self._is_collecting:
            return 0
        return max(0, self._rounds.size - len(self._board.items))

    def decide(self, time_s: float) -> Sequence[Decision]:
        if self._is_over:
            self._is_over = False
            running = [Abort(item.index, item.running) for item in self._board.items.values() if item.running]
            return [record_decision(self._board, abort, time_s) for abort in running]
        if not self._is_collecting:
            return []
        decisions = issue_in_order(self._board, unissued(self._board), time_s)
        self._num_resumed_tokens += _num_resumed_tokens(self._board, decisions)
        return decisions

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        num_resumed, self._num_resumed_tokens = self._num_resumed_tokens, 0
        return {"resumed_tokens": num_resumed}


class TailRounds(Scheduler):
    """Starts more groups than a step needs, and keeps the slowest ones for a separate round.

    The number of groups that a step needs is multiplied by ``surplus``.

    Once a round has as many finished groups as it needs, the others are aborted and wait. When enough of these groups
    wait to fill a round, the next round consists of them and has no surplus. About 1 / (``surplus`` - 1) rounds with a
    surplus come before each such round (RollPacker, arXiv 2509.21009, with a surplus of 1.25). RollPacker also races
    more completions per group than it trains on. This scheduler does not, because a group is trained on as a whole.
    """

    def __init__(
        self,
        group_size: int,
        history: HistoryStore,
        seed: int = 0,
        *,
        groups_per_round: int | None = None,
        surplus: float = 1.25,
    ) -> None:
        self.surplus = surplus
        self._board = Board()
        self._rounds = Rounds(groups_per_round, surplus)
        self._round: dict[int, bool] = {}
        """Whether each item of the current round has been scored."""
        self._late: list[int] = []
        """Items that were too slow in their rounds, and wait for a long round."""
        self._num_needed = 0
        self._num_long_rounds = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, Scored) and event.item in self._round:
            self._round[event.item] = True
        self._board.observe(event)
        self._rounds.observe(event)
        self._round = {
            item: is_scored for item, is_scored in self._round.items() if is_scored or item in self._board.items
        }
        self._late = [item for item in self._late if item in self._board.items]

    def num_wanted(self) -> int:
        is_long_next = len(self._late) >= self._rounds.num_needed
        if self._is_under_way() or is_long_next:
            return 0
        return max(0, self._rounds.size - len(self._rounds.gathered))

    def _is_under_way(self) -> bool:
        return not all(self._round.values())

    def decide(self, time_s: float) -> Sequence[Decision]:
        decisions: list[Decision] = []
        if self._is_under_way() and sum(self._round.values()) >= self._num_needed:
            slow = [self._board.items[item] for item, is_scored in self._round.items() if not is_scored]
            self._late += [item.index for item in slow]
            self._round = {}
            aborts = [Abort(item.index, item.running) for item in slow if item.running]
            decisions += [record_decision(self._board, abort, time_s) for abort in aborts]
        if not self._is_under_way() and self._board.capacity:
            self._begin_round()
        members = [self._board.items[item] for item, is_scored in self._round.items() if not is_scored]
        order = [(item.index, i) for item in members for i in item.unissued]
        return [*decisions, *issue_in_order(self._board, order, time_s)]

    def _begin_round(self) -> None:
        rounds = self._rounds
        is_idle = self._board.num_running == 0
        if len(self._late) >= rounds.num_needed or (self._late and is_idle and not rounds.gathered):
            members, self._late = self._late[: rounds.num_needed], self._late[rounds.num_needed :]
            self._num_needed = len(members)
            self._num_long_rounds += 1
        elif len(rounds.gathered) >= rounds.size or (rounds.gathered and is_idle):
            members, rounds.gathered = rounds.gathered, []
            self._num_needed = min(rounds.num_needed, len(members))
        else:
            return
        self._round = dict.fromkeys(members, False)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        return {"late_groups": len(self._late), "long_rounds": self._num_long_rounds}


def _num_resumed_tokens(board: Board, decisions: Sequence[Decision]) -> int:
    pairs = [(d.item, i) for d in decisions if not isinstance(d, Abort) for i in d.completions]
    return sum(board.items[item].num_tokens[i] for item, i in pairs)
