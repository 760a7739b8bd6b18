"""A curriculum: new items become harder or easier as the rewards rise or fall."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from inflight.contracts import Task
from inflight.errors import CheckpointError
from inflight.types import TaskItem

FIRST_EVALUATION_ITEM = 1_000_000_000
"""Items from this index on are for evaluations. They cycle through the levels of a curriculum."""
NUM_GROUPS = 16
"""Number of groups of one level whose mean reward decides whether the level changes."""
RAISING_REWARD, LOWERING_REWARD = 0.75, 0.2
"""With groups of 8 and rewards of 0 and 1, at least 80 % of the groups have different rewards while the mean lies
between these values.
"""


class Curriculum(Task):
    """A task with several levels, easiest first, which begins at the first level.

    `record_group` changes the level by one when the last groups of the current level were easy or hard. The change
    affects items that have not been requested yet, so an item keeps its level, even after `restore`.
    """

    def __init__(self, levels: Sequence[Task]) -> None:
        self.levels = tuple(levels)
        self._first_items = [0]
        """The first item of each stretch of items with the same level; ``_stretches`` holds these levels."""
        self._stretches = [0]
        self._next_item = 0
        self._rewards: list[float] = []
        """The mean rewards of the latest groups of the current level."""

    @property
    def name(self) -> str:
        return self.levels[0].name

    @property
    def level(self) -> int:
        """The level of new items, from 0."""
        return self._stretches[-1]

    def level_of(self, index: int) -> int:
        """Return the level of an item."""
        if index >= FIRST_EVALUATION_ITEM:
            return index % len(self.levels)
        return self._stretches[bisect_right(self._first_items, index) - 1]

    def item(self, index: int) -> TaskItem:
        return self.item_at(self.begin_item(index), index)

    def begin_item(self, index: int) -> int:
        """Fix and return the level of an item that is about to be made."""
        if index < FIRST_EVALUATION_ITEM:
            self._next_item = max(self._next_item, index + 1)
        return self.level_of(index)

    def item_at(self, level: int, index: int) -> TaskItem:
        """Return item ``index`` of a level; its metadata contains the level."""
        item = self.levels[level].item(index)
        return replace(item, metadata={**item.metadata, "level": level})

    def score(self, item: TaskItem, completion: str) -> float:
        level = item.metadata["level"]
        assert isinstance(level, int)
        return self.levels[level].score(item, completion)

    def record_group(self, index: int, rewards: Sequence[float]) -> str | None:
        """Record the rewards of an item; if they change the level, return a message for the user."""
        if not rewards or self.level_of(index) != self.level:
            return None
        self._rewards = [*self._rewards, statistics.fmean(rewards)][-NUM_GROUPS:]
        if len(self._rewards) < NUM_GROUPS:
            return None
        mean = statistics.fmean(self._rewards)
        new = self.level + (mean >= RAISING_REWARD) - (mean <= LOWERING_REWARD)
        if new == self.level or not 0 <= new < len(self.levels):
            return None
        if self._next_item == self._first_items[-1]:  # the current level has no items yet
            del self._first_items[-1], self._stretches[-1]
        self._first_items.append(self._next_item)
        self._stretches.append(new)
        self._rewards = []
        return (
            f"the curriculum is at level {new + 1} of {len(self.levels)} from item {self._next_item} on: the mean "
            f"reward of the last {NUM_GROUPS} groups is {mean:.2f}"
        )

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` needs, as JSON values."""
        return {
            "first_items": self._first_items,
            "levels": self._stretches,
            "next_item": self._next_item,
            "rewards": self._rewards,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `CheckpointError` if it has levels that this task lacks."""
        if (highest := max(state["levels"])) >= len(self.levels):
            raise CheckpointError(
                f"the checkpoint has items of level {highest + 1}, but the highest level of the task is "
                f"{len(self.levels)}: do not lower task.levels"
            )
        self._first_items, self._stretches = [*state["first_items"]], [*state["levels"]]
        self._next_item, self._rewards = state["next_item"], [*state["rewards"]]
