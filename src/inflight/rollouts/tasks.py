"""Tasks: any reasoning-gym dataset, or the user's own factory, through the `Task` protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field, field_validator

from inflight.base.extensions import find_entry_points, make
from inflight.base.toml import Section
from inflight.base.unknown_names import nearest_names
from inflight.contracts import Environment, Task
from inflight.errors import ConfigError, TaskError
from inflight.rollouts.curriculum import Curriculum
from inflight.types import TaskItem

_NUM_ITEMS = 2**31 - 1
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_QUESTION = "{question}"
_FIELDS = ("field_name", "lower_field_name", "upper_field_name")
"""The attributes of reasoning-gym's curricula that name a parameter."""


class AnswerFormat(Section):
    """How the problem of a task becomes a user message, and which part of a completion is the answer."""

    prompt_template: str | None = None
    """The user message, in which ``{question}`` stands for the problem.

    If not set, the message is the problem itself.
    """
    answer_pattern: str | None = None
    """A regular expression. The answer is the group of its last match, or the whole match if the expression has no
    group; a completion without a match has reward 0. ``.`` also matches line breaks. If not set, the task reads the
    whole completion; reasoning-gym datasets use the last ``<answer>`` tag if there is one.
    """

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
            raise ValueError(
                f"{value!r} has {num_groups} groups, but only one answer is read: write (?:...) for the other groups"
            )
        return value


AS_GIVEN = AnswerFormat()
"""The format that leaves problems and completions unchanged."""


class TaskSettings(AnswerFormat):
    """The task or environment: a reasoning-gym dataset, an entry point in the group ``inflight.tasks``, or
    ``module:factory``."""

    name: str
    """The name of the dataset or entry point, or ``module:factory``."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the dataset or factory."""
    levels: int | tuple[dict[str, Any], ...] | None = None
    """A curriculum: the run begins at the first level, and moves to the next or the previous one when the mean reward
    of 16 groups is at least 0.75 or at most 0.2. A number selects that many levels of reasoning-gym's curriculum for
    the dataset. A list of tables specifies the parameters of each level, easiest first, in addition to ``params``. If
    not set, all items have the same parameters.
    """

    @field_validator("levels")
    @classmethod
    def _has_two_levels(cls, value: int | tuple[dict[str, Any], ...] | None) -> int | tuple[dict[str, Any], ...] | None:
        if value is not None and (value if isinstance(value, int) else len(value)) < 2:
            raise ValueError("a curriculum must have at least two levels")
        return value

    def load(self, seed: int) -> Task | Environment:
        """Return the task or environment. Raises the same errors as `load_task`."""
        answer_format = AnswerFormat(prompt_template=self.prompt_template, answer_pattern=self.answer_pattern)
        if self.levels is None:
            return load_task(self.name, self.params, seed, answer_format)
        tasks = []
        for params in _params_of_levels(self.name, self.params, self.levels):
            task = load_task(self.name, params, seed, answer_format)
            if isinstance(task, Environment):
                raise TaskError(f"task.levels is for tasks, but {self.name!r} is an environment: omit task.levels")
            tasks.append(task)
        return Curriculum(tasks)


def _params_of_levels(
    name: str, params: Mapping[str, Any], levels: int | Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parameters of each level."""
    if not isinstance(levels, int):
        return [{**params, **of_level} for of_level in levels]
    if name not in reasoning_gym_names():
        raise TaskError(
            f"task.levels = {levels} applies to datasets of reasoning-gym, and {name!r} is not one: list the "
            "parameters of each level"
        )
    from reasoning_gym.factory import CURRICULA

    if name not in CURRICULA:
        raise TaskError(f"reasoning-gym has no curriculum for {name!r}: list the parameters of each level")
    curriculum = CURRICULA[name]()
    num_levels = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    if levels > num_levels:
        raise TaskError(f"task.levels is {levels}, but the curriculum of {name!r} has {num_levels} levels")
    found = []
    for level in range(levels):
        curriculum.set_global_level(level)
        found.append({**_set_by(curriculum), **params})
    return found


def _set_by(curriculum: Any) -> dict[str, Any]:
    """Return the parameters that a reasoning-gym curriculum sets at its current level."""
    config, names = curriculum.generate_configuration(), set[str]()
    for attribute in curriculum.attributes.values():
        names |= {getattr(attribute, key) for key in _FIELDS if hasattr(attribute, key)}
    return {name: getattr(config, name) for name in names}


def load_task(
    name: str, params: Mapping[str, Any], seed: int, answer_format: AnswerFormat = AS_GIVEN
) -> Task | Environment:
    """Return a task or environment by name: a reasoning-gym dataset, or the result of a factory.

    A factory accepts ``seed`` and ``params``. It is an entry point in the group ``inflight.tasks``, or named as
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
    """Return the names of all reasoning-gym datasets. Raises `TaskError` if reasoning-gym is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(
            "reasoning-gym, which its tasks need, is not installed: pip install 'inflight[local]'"
        ) from error
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
            nearest = nearest_names(name, names, most=3, cutoff=0.0)
            raise TaskError(f"unknown task {name!r}; nearest reasoning-gym datasets: {', '.join(nearest)}")
        self._name = name
        try:
            self._dataset = reasoning_gym.create_dataset(name, size=_NUM_ITEMS, seed=seed, **params)
        except (TypeError, AssertionError, ValueError) as error:
            raise TaskError(
                f"task {name!r} rejects its parameters {dict(params)}: {error}. task.params belong to one dataset: "
                "set them together with task.name"
            ) from error

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
