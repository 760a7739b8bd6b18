"""Finished groups on their way to steps: which are kept, when a step is composed, and how many more are admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.contracts import BatchComposer, StalenessPolicy
from inflight.rollouts.admission import Admission
from inflight.rollouts.batching import WaitingGroups, split_evenly
from inflight.rollouts.credit import Credit, teaches
from inflight.rollouts.littles_law import LittlesLaw
from inflight.rollouts.staleness import num_trained_tokens
from inflight.types import Group


@dataclass(frozen=True, slots=True)
class StepRules:
    """The settings of a run that decide what becomes of its finished groups."""

    step_size: int
    """Tokens of a step, or whatever else ``size_of`` and ``kept_size_of`` count."""
    expected_size: float
    """Of a group, before four have finished."""
    steps_per_phase: int = 0
    """Steps of a phase of the conventional mode, in which sampling and training take turns. 0: the pipeline."""
    trains_on_equal_rewards: bool = False
    credit: Credit = "episode"
    size_of: Callable[[Group], int] = lambda group: group.num_tokens
    kept_size_of: Callable[[Group, StalenessPolicy, int], int] = num_trained_tokens
    """Of a group, what a step from a version trains on."""


@dataclass(slots=True)
class StepQueue:
    """Finished groups that wait for a step, and the counts of those that have left."""

    staleness: StalenessPolicy
    composer: BatchComposer
    rules: StepRules
    law: LittlesLaw = field(default_factory=LittlesLaw)
    waiting: WaitingGroups = field(init=False)
    admission: Admission = field(init=False)
    wanted: int | None = None
    """Version of the step or phase that groups are collected for; None once there are enough."""
    num_training: int = 0
    """Groups that were composed and are not settled yet."""

    def __post_init__(self) -> None:
        self.waiting = WaitingGroups(self.staleness, self.composer, self.rules.kept_size_of)
        self.admission = Admission(self.rules.step_size, self.rules.expected_size)

    @property
    def groups_wanted(self) -> int:
        """Groups that the step or the phase needs, by the estimate."""
        return self.admission.num_groups(self.rules.steps_per_phase or 1)

    def may_offer(self, num_open: int, num_outstanding: int, oldest: int, surplus: float) -> bool:
        """Return whether another group may be offered.

        ``oldest`` is as in `StalenessPolicy.trainable`, and ``surplus`` is the scheduler's.
        """
        steps = self.rules.steps_per_phase
        if steps:
            num_waiting = self.waiting.num_tokens
            return self.wanted is not None and self.admission.in_phase(num_waiting, num_open, steps, surplus)
        return self.admission.in_pipeline(
            self.staleness,
            num_outstanding,
            is_step_ready=self._is_step_ready(oldest),
            is_idle=num_open == 0 and self.num_training == 0,
        )

    def add(self, group: Group) -> str | None:
        """Let a finished group wait for a step; return the reason if it is dropped instead."""
        if not self.rules.trains_on_equal_rewards and not teaches(group, self.rules.credit):
            self.admission.finished(0)
            return "equal rewards"
        if not self.composer.accepts(group):
            self.admission.finished(0)
            return "filtered"
        if not self.waiting.add(group):
            return "stale"
        self.admission.finished(self.rules.size_of(group))
        return None

    def is_ready(self, oldest: int) -> bool:
        """Return whether there are enough groups for what is wanted."""
        if self.wanted is None:
            return False
        if steps := self.rules.steps_per_phase:
            return self.waiting.num_tokens >= steps * self.rules.step_size
        return self._is_step_ready(oldest)

    def take_step(self, oldest: int) -> Sequence[Group]:
        """Remove and return the groups of the step that is ready."""
        groups = self.waiting.take(oldest, self.admission.groups_per_step)
        self.num_training += len(groups)
        return groups

    def take_phase(self) -> Sequence[Sequence[Group]]:
        """Remove all groups, and return those of each step of a phase."""
        groups = self.waiting.take_all()
        self.num_training += len(groups)
        return split_evenly(groups, self.rules.steps_per_phase)

    def leave(self, group: Group, *, is_trained: bool) -> None:
        """Count a finished group that is settled."""
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        if versions:
            self.law.left(min(versions), is_trained=is_trained)

    def _is_step_ready(self, oldest: int) -> bool:
        return self.waiting.ready(oldest, self.admission.groups_per_step)
