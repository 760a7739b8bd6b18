"""Tasks: any reasoning-gym dataset, or the user's own factory, through the `Task` protocol."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from inflight.base.extensions import find_entry_points, make
from inflight.contracts import Environment, Task
from inflight.errors import ConfigError, TaskError
from inflight.types import TaskItem

_NUM_ITEMS = 2**31 - 1
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def load_task(name: str, params: Mapping[str, Any], seed: int) -> Task | Environment:
    """Return a task or environment by name: a reasoning-gym dataset, or what a factory makes.

    A factory takes ``seed`` and ``params``. It is installed under the entry points ``inflight.tasks``, or named as
    ``module:attribute``. Raises
    `TaskError` for an unknown name (with the nearest known one) and for parameters that the task rejects.
    """
    if ":" not in name and name not in find_entry_points("tasks"):
        return ReasoningGymTask(name, params, seed)
    try:
        task: Task | Environment = make((Task, Environment), "task", "tasks", name, {"seed": seed}, params, {})
    except ConfigError as error:
        raise TaskError(str(error)) from error
    return task


class ReasoningGymTask(Task):
    """A reasoning-gym dataset; item i is its i-th procedurally generated problem under ``seed``.

    The answer is the content of the last ``<answer>`` tag, or the whole completion if there is none.
    """

    def __init__(self, name: str, params: Mapping[str, Any], seed: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise TaskError(f"task {name!r} needs reasoning-gym: pip install 'inflight[local]'") from error
        if name not in DATASETS:
            nearest = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.0)
            raise TaskError(f"unknown task {name!r}; nearest reasoning-gym datasets: {', '.join(nearest)}")
        self._name = name
        try:
            self._dataset = reasoning_gym.create_dataset(name, size=_NUM_ITEMS, seed=seed, **params)
        except (TypeError, AssertionError, ValueError) as error:
            raise TaskError(f"task {name!r} rejects its parameters {dict(params)}: {error}") from error

    @property
    def name(self) -> str:
        """Name of the dataset."""
        return self._name

    def item(self, index: int) -> TaskItem:
        entry = self._dataset[index]
        answer = entry.get("answer")
        return TaskItem(index, entry["question"], None if answer is None else str(answer), {"entry": entry})

    def score(self, item: TaskItem, completion: str) -> float:
        tagged = _ANSWER_TAG.findall(completion)
        answer = (tagged[-1] if tagged else completion).strip()
        return float(self._dataset.score_answer(answer, item.metadata["entry"]))
