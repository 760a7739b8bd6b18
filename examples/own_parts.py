"""A task, a scheduler, a staleness policy and a batch composer, for the run in examples/own_parts.toml."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.contracts import BatchComposer, Scheduler, StalenessPolicy, Task
from inflight.contracts.scheduling import Decision, Event, Issue
from inflight.rollouts import HistoryStore
from inflight.rollouts.board import Board
from inflight.types import Group, TaskItem


class CountLetters(Task):
    """Asks for a word and rewards the share of one letter in the answer."""

    def __init__(self, seed: int, letter: str = "e") -> None:
        self._seed = seed
        self._letter = letter

    @property
    def name(self) -> str:
        return f"count_{self._letter}"

    def item(self, index: int) -> TaskItem:
        number = random.Random(f"{self._seed} {index}").randrange(10_000)
        return TaskItem(index, f"Word {number:04d}:")

    def score(self, item: TaskItem, completion: str) -> float:
        return completion.count(self._letter) / max(1, len(completion))


@dataclass(frozen=True)
class WholeCompletions(StalenessPolicy):
    """Trains on a completion as a whole, or not at all once its first token is too old."""

    max_lag: int

    def mask(self, token_versions: Sequence[int], trainer_version: int) -> Sequence[bool]:
        is_young = trainer_version - min(token_versions, default=trainer_version) <= self.max_lag
        return [is_young] * len(token_versions)

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        return max(1, round((self.max_lag + 1) * groups_per_step))


@dataclass(frozen=True)
class FixedNumber(BatchComposer):
    """A step is the oldest ``num_groups`` groups, however long they are."""

    tokens_per_step: int
    num_groups: int

    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        return range(self.num_groups) if len(groups) >= self.num_groups else ()


class FillInOrder(Scheduler):
    """Gives work to the first endpoint with free slots for a whole group, so that the last ones stay free."""

    def __init__(self, group_size: int, history: HistoryStore, seed: int = 0) -> None:
        self._board = Board()
        self._group_size = group_size

    def observe(self, event: Event) -> None:
        self._board.observe(event)

    def num_wanted(self) -> int:
        return 1 if self._first_free() and not self._board.unissued() else 0

    def decide(self, time_s: float) -> Sequence[Decision]:
        decisions = []
        for item in self._board.unissued():
            if name := self._first_free():
                decisions.append(Issue(name, item.index, item.unissued))
                self._board.record(decisions[-1], time_s)
        return decisions

    def _first_free(self) -> str | None:
        num_free = {name: endpoint.num_free for name, endpoint in sorted(self._board.endpoints.items())}
        return next((name for name, num in num_free.items() if num >= self._group_size), None)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
