"""A mixture of tasks: each item belongs to one of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from inflight.base.toml import check_settings
from inflight.contracts import Environment, Task
from inflight.errors import ConfigError, TaskError
from inflight.rollouts.tasks import TaskSettings
from inflight.types import TaskItem

TASK = "task"
"""The metadata key for the name of an item's task."""


class MixedTask(TaskSettings):
    """One task of a mixture."""

    label: str | None = None
    """The task's name in the mixture. If not set, it is ``name``."""
    share: float = Field(default=1.0, gt=0)
    """The task's share of the items, relative to the shares of the other tasks."""


class Mixture(Task):
    """Tasks by name, each with its share of the items. The metadata of an item contains the name of its task.

    Item i of the mixture is item i of one task, which is chosen at random, depending only on
    ``seed`` and i.
    """

    def __init__(self, tasks: Mapping[str, Task], shares: Sequence[float], seed: int) -> None:
        self.tasks = dict(tasks)
        self._shares = tuple(shares)
        self._seed = seed

    @property
    def name(self) -> str:
        return "mixture"

    def item(self, index: int) -> TaskItem:
        (name,) = random.Random(f"{self._seed}:{index}").choices([*self.tasks], self._shares)
        item = self.tasks[name].item(index)
        return replace(item, metadata={**item.metadata, TASK: name})

    def score(self, item: TaskItem, completion: str) -> float:
        return self.tasks[str(item.metadata[TASK])].score(item, completion)


def create_mixture(seed: int, tasks: Sequence[Mapping[str, Any]]) -> Mixture:
    """Return a mixture of at least two tasks, each specified by the fields of `MixedTask`. Raises `TaskError`."""
    try:
        settings = [check_settings(MixedTask, it, f"task.params.tasks[{i}]") for i, it in enumerate(tasks)]
    except ConfigError as error:
        raise TaskError(str(error)) from error
    if len(settings) < 2:
        raise TaskError(f"a mixture needs at least two tasks, but task.params.tasks has {len(settings)}")
    found: dict[str, Task] = {}
    for it in settings:
        task, label = it.load(seed), it.label or it.name
        if isinstance(task, Environment):
            raise TaskError(f"a mixture can contain only tasks, but {it.name!r} is an environment")
        if it.levels is not None:
            raise TaskError(f"task {label!r} of the mixture has levels, which mixtures do not support: omit them")
        if label in found:
            raise TaskError(f"two tasks of the mixture are named {label!r}: set label for one of them")
        found[label] = task
    return Mixture(found, [it.share for it in settings], seed)


def task_names(task: Task | Environment) -> list[str]:
    """Return the names of the tasks of a run: the tasks in the mixture, or the run's only task."""
    return [*task.tasks] if isinstance(task, Mixture) else [task.name]


def task_of(item: TaskItem, name: str) -> str:
    """Return the name of an item's task; ``name`` is the name of the run's task or environment."""
    return str(item.metadata.get(TASK, name))
