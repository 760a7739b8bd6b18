"""Tasks: any reasoning-gym dataset, or the user's own factory, through the `Task` protocol."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import field_validator

from inflight.base.extensions import find_entry_points, make
from inflight.base.toml import Section
from inflight.contracts import Environment, Task
from inflight.errors import ConfigError, TaskError
from inflight.types import TaskItem

_NUM_ITEMS = 2**31 - 1
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_QUESTION = "{question}"


class AnswerFormat(Section):
    """How the problem of a task becomes a user message, and which part of a completion is the answer."""

    prompt_template: str | None = None
    """The user message, in which ``{question}`` stands for the problem. None: the problem itself."""
    answer_pattern: str | None = None
    """A regular expression. The answer is what its last match captures (its group, or the whole match if it has none);
    a completion without a match has reward 0. ``.`` also matches line breaks. None: the task reads the whole
    completion; reasoning-gym datasets use the last ``<answer>`` tag if there is one."""

    @field_validator("prompt_template")
    @classmethod
    def _contains_the_question(cls, value: str | None) -> str | None:
        if value is not None and _QUESTION not in value:
            raise ValueError(f"{value!r} does not contain {_QUESTION}, where the problem is inserted")
        return value

    @field_validator("answer_pattern")
    @classmethod
    def _captures_one_answer(cls, value: str | None) -> str | None:
        if value is None:
            return value
        try:
            num_groups = re.compile(value, re.DOTALL).groups
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        if num_groups > 1:
            raise ValueError(f"{value!r} has {num_groups} groups, but one answer is read: write (?:...) for the others")
        return value


AS_GIVEN = AnswerFormat()
"""Problems and completions are not changed."""


def load_task(
    name: str, params: Mapping[str, Any], seed: int, answer_format: AnswerFormat = AS_GIVEN
) -> Task | Environment:
    """Return a task or environment by name: a reasoning-gym dataset, or what a factory makes.

    A factory takes ``seed`` and ``params``. It is installed under the entry points ``inflight.tasks``, or named as
    ``module:attribute``. ``answer_format`` applies to tasks only. Raises `TaskError` for an unknown name (with the
    nearest known one) and for parameters that the task rejects.
    """
    task: Task | Environment
    if ":" not in name and name not in find_entry_points("tasks"):
        task = ReasoningGymTask(name, params, seed)
    else:
        try:
            task = make((Task, Environment), "task", "tasks", name, {"seed": seed}, params, {})
        except ConfigError as error:
            raise TaskError(str(error)) from error
    if isinstance(task, Environment) or answer_format == AS_GIVEN:
        return task
    return FormattedTask(task, answer_format)


@dataclass(frozen=True)
class FormattedTask(Task):
    """A task with an answer format."""

    task: Task
    answer_format: AnswerFormat

    @property
    def name(self) -> str:
        return self.task.name

    def item(self, index: int) -> TaskItem:
        item = self.task.item(index)
        template = self.answer_format.prompt_template
        return item if template is None else replace(item, prompt=template.replace(_QUESTION, item.prompt))

    def score(self, item: TaskItem, completion: str) -> float:
        """Return the reward of the answer; 0 if the completion has none."""
        pattern = self.answer_format.answer_pattern
        if pattern is None:
            return self.task.score(item, completion)
        matches = list(re.finditer(pattern, completion, re.DOTALL))
        if not matches:
            return 0.0
        return self.task.score(item, (matches[-1][matches[-1].re.groups] or "").strip())


def reasoning_gym_names() -> list[str]:
    """Return the names of all reasoning-gym datasets. Raises `TaskError` if it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError("the tasks of reasoning-gym need it: pip install 'inflight[local]'") from error
    return sorted(DATASETS)


class ReasoningGymTask(Task):
    """A reasoning-gym dataset; item i is its i-th procedurally generated problem under ``seed``.

    The answer is the content of the last ``<answer>`` tag, or the whole completion if there is none.
    """

    def __init__(self, name: str, params: Mapping[str, Any], seed: int) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise TaskError(f"task {name!r} needs reasoning-gym: pip install 'inflight[local]'") from error
        if name not in (names := reasoning_gym_names()):
            nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
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
