"""The ``distillation`` section of a run: the teachers, and the tasks that each of them scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from inflight.base.toml import Section
from inflight.wire import MAX_ALTERNATIVES


class TeacherSection(Section):
    """A model that scores the completions of the trained model, on a server at a URL or on the trainer ranks.

    It must have the same vocabulary as the trained model.
    """

    url: str | None = None
    """URL of a server that supports scoring, such as one started with ``inflight serve``. The run neither starts it nor
    sends it weights. INFLIGHT_TOKEN sets its token."""
    path: Path | None = None
    """Directory of a checkpoint. Each trainer rank loads it alongside the trained model and computes its logprobs."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks in a ``mixture`` that the teacher scores. If empty, it scores all tasks that no other teacher
    names.
    """

    @model_validator(mode="after")
    def _is_in_one_place(self) -> TeacherSection:
        if (self.url is None) == (self.path is None):
            has = "neither" if self.url is None else "both"
            raise ValueError(f"a teacher needs a url or a path, but this one has {has}")
        return self


class DistillationSection(Section):
    """The teachers, whose logprobs the loss uses. Choose a loss that needs teachers, such as ``opd``."""

    teachers: tuple[TeacherSection, ...] = ()
    top_k: int = Field(default=0, ge=0, le=MAX_ALTERNATIVES)
    """Number of the teacher's most likely tokens to request at each position, for losses that use them."""
    max_concurrent_scores: int = Field(default=8, ge=1)
    """Maximum number of completions that each teacher with a URL scores at a time. This limit is separate from the
    limits of sampling, so that a teacher does not starve sampling on a server that they share."""
    timeout_s: float = Field(default=300.0, gt=0)
    """How long a teacher may take to score a completion, retries included, before the run ends."""

    @model_validator(mode="after")
    def _each_task_has_one_teacher(self) -> DistillationSection:
        named = [task for teacher in self.teachers for task in teacher.tasks]
        if twice := sorted({task for task in named if named.count(task) > 1}):
            raise ValueError(f"task {twice[0]!r} has more than one teacher")
        if sum(not teacher.tasks for teacher in self.teachers) > 1:
            raise ValueError("more than one teacher has no tasks: set tasks for all teachers but one")
        if self.top_k and any(teacher.url is None for teacher in self.teachers):
            raise ValueError("top_k needs teachers with a url: trainer ranks compute only the logprobs of given tokens")
        return self

    def teacher_of(self, task: str) -> int | None:
        """Return the index of the teacher that scores a task, or None if no teacher does."""
        for index, teacher in enumerate(self.teachers):
            if task in teacher.tasks:
                return index
        return next((index for index, teacher in enumerate(self.teachers) if not teacher.tasks), None)

    def tasks_without_teacher(self, tasks: Sequence[str]) -> list[str]:
        """Return the tasks that no teacher scores."""
        return [task for task in tasks if self.teacher_of(task) is None]

    def unknown_tasks(self, tasks: Sequence[str]) -> list[str]:
        """Return the tasks that teachers name but that are not among ``tasks``."""
        return [task for teacher in self.teachers for task in teacher.tasks if task not in tasks]
