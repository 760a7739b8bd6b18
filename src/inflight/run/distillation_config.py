"""The section ``distillation`` of a run: the teachers, and which tasks each of them scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from inflight.base.toml import Section
from inflight.wire import MAX_ALTERNATIVES


class TeacherSection(Section):
    """A model that scores what the trained model samples: behind a URL, or computed by the trainer ranks.

    It must have the vocabulary of the trained model.
    """

    url: str | None = None
    """URL of a server that supports scoring, such as one of ``inflight serve``. The run neither starts it nor sends it
    weights. INFLIGHT_TOKEN sets its token."""
    path: Path | None = None
    """Directory of a checkpoint. Each trainer rank loads it beside the trained model, and computes its logprobs."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks of a ``mixture`` whose completions it scores. Empty: all tasks that no other teacher names."""

    @model_validator(mode="after")
    def _is_in_one_place(self) -> TeacherSection:
        if (self.url is None) == (self.path is None):
            raise ValueError("a teacher has either a url or a path")
        return self


class DistillationSection(Section):
    """The teachers, whose logprobs the loss uses: choose a loss such as ``opd``."""

    teachers: tuple[TeacherSection, ...] = ()
    top_k: int = Field(default=0, ge=0, le=MAX_ALTERNATIVES)
    """How many of a teacher's likeliest tokens to request in the place of each token, for losses that use them."""
    max_concurrent: int = Field(default=8, ge=1)
    """How many completions each teacher behind a URL scores at a time. Scoring has this bound of its own, so that a
    teacher on a server that also samples leaves it time to sample."""
    timeout_s: float = Field(default=300.0, gt=0)
    """How long a teacher may fail to score a completion before the run ends. Until then, failed requests are
    repeated."""

    @model_validator(mode="after")
    def _each_task_has_one_teacher(self) -> DistillationSection:
        named = [task for teacher in self.teachers for task in teacher.tasks]
        if twice := sorted({task for task in named if named.count(task) > 1}):
            raise ValueError(f"task {twice[0]!r} has more than one teacher")
        if sum(not teacher.tasks for teacher in self.teachers) > 1:
            raise ValueError("more than one teacher has no tasks: name the tasks of all of them but one")
        if self.top_k and any(teacher.url is None for teacher in self.teachers):
            raise ValueError("top_k needs teachers with a url: trainer ranks only compute the logprobs of given tokens")
        return self

    def teacher_of(self, task: str) -> int | None:
        """Return which teacher scores a task, None if there is none."""
        for index, teacher in enumerate(self.teachers):
            if task in teacher.tasks:
                return index
        return next((index for index, teacher in enumerate(self.teachers) if not teacher.tasks), None)

    def tasks_without_teacher(self, tasks: Sequence[str]) -> list[str]:
        """Return those of these tasks that no teacher scores."""
        return [task for task in tasks if self.teacher_of(task) is None]

    def unknown_tasks(self, tasks: Sequence[str]) -> list[str]:
        """Return the tasks that teachers name, but that do not exist."""
        return [task for teacher in self.teachers for task in teacher.tasks if task not in tasks]
