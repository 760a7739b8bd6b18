"""Finished groups before training: which ones are kept, when a step is composed, and how many more are admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.contracts import BatchComposer, StalenessPolicy
from inflight.contracts.scheduling import Settled, StepReady, StepWanted
from inflight.rollouts.admission import Admission
from inflight.rollouts.batching import WaitingGroups, split_evenly
from inflight.rollouts.credit import Credit, teaches
from inflight.rollouts.driver_commands import ComposedPhase, ComposedStep, DroppedGroup, FinishedGroup, Outbox
from inflight.rollouts.ledger import Ledger
from inflight.rollouts.littles_law import LittlesLaw
from inflight.rollouts.staleness import num_trained_tokens
from inflight.types import Group


@dataclass(frozen=True, slots=True)
class StepRules:
    """The settings of a run that determine how its finished groups are used."""

    step_size: int
    """The number of tokens in a step, or of whatever else ``size_of`` and ``kept_size_of`` count."""
    expected_size: float
    """The assumed size of a group until four groups have finished."""
    burst: int = 1
    """The same as `Admission.burst`."""
    steps_per_phase: int = 0
    """Number of steps in a phase of conventional mode, in which sampling and training alternate; 0 in pipeline mode."""
    trains_on_equal_rewards: bool = False
    credit: Credit = "episode"
    size_of: Callable[[Group], int] = lambda group: group.num_tokens
    kept_size_of: Callable[[Group, StalenessPolicy, int], int] = num_trained_tokens
    """Returns the size of the part of a group that a step from a given version trains on."""


@dataclass(slots=True)
class StepQueue:
    """Finished groups until they are settled: they wait for a step and are trained on, or are dropped."""

    outbox: Outbox
    ledger: Ledger
    staleness: StalenessPolicy
    composer: BatchComposer
    rules: StepRules
    law: LittlesLaw = field(default_factory=LittlesLaw)
    waiting: WaitingGroups = field(init=False)
    admission: Admission = field(init=False)
    version: int = 0
    """The version from which the last requested step or phase starts."""
    is_wanted: bool = False
    """Whether groups are being collected for that step; False once there are enough."""
    has_waited: bool = True
    """Whether there were too few groups for the step when it was requested, so that the trainer had to wait."""
    is_phase_ending: bool = False
    """Whether a phase has enough groups, and waits until nothing is running."""
    num_training: int = 0
    """The number of groups that were composed and are not settled yet."""

    def __post_init__(self) -> None:
        self.waiting = WaitingGroups(self.staleness, self.composer, self.rules.kept_size_of)
        self.admission = Admission(self.rules.step_size, self.rules.expected_size, self.rules.burst)

    def may_offer(self, num_open: int, num_outstanding: int, oldest: int, surplus: float) -> bool:
        """Return whether another group may be offered.

        ``oldest`` has the same meaning as in `StalenessPolicy.trainable`, and ``surplus`` is that of the scheduler.
        """
        steps = self.rules.steps_per_phase
        if steps:
            num_waiting = self.waiting.num_tokens
            return self.is_wanted and self.admission.in_phase(num_waiting, num_open, steps, surplus)
        return self.admission.in_pipeline(
            self.staleness,
            num_outstanding,
            num_waiting_tokens=self.waiting.num_tokens,
            num_open=num_open,
            surplus=surplus,
            has_waited=self.has_waited,
            is_step_ready=self._is_step_ready(oldest),
            is_idle=num_open == 0 and self.num_training == 0,
        )

    def want(self, version: int, oldest: int, now: float) -> None:
        """Collect groups for the step or phase that starts from ``version``.

        ``oldest`` has the same meaning as in `may_offer`.
        """
        self.is_wanted = True
        self.has_waited = not self._is_step_ready(oldest)
        self.outbox.notify(StepWanted(now, version, self.admission.num_groups(self.rules.steps_per_phase or 1)))

    def add(self, group: Group, num_rewritten: int, now: float, *, is_new: bool = True) -> None:
        """Queue a finished group for a step, or drop it.

        ``is_new`` is False if the run was resumed since the group first finished.
        """
        reason: str | None = None
        if not self.rules.trains_on_equal_rewards and not teaches(group, self.rules.credit):
            reason = "equal rewards"
        elif not self.composer.accepts(group):
            reason = "filtered"
        elif not self.waiting.add(group):
            reason = "stale"
        if reason != "stale":
            self.admission.finished(0 if reason else self.rules.size_of(group))
        self.outbox.command(FinishedGroup(group, reason is None, num_rewritten, is_new))
        if reason is not None:
            self._drop(group, reason, now)

    def drop_stale(self, now: float) -> None:
        """Drop the queued groups that the requested step cannot train on."""
        for group in self.waiting.advance(self.version):
            self._drop(group, "stale", now)

    def compose_if_ready(self, oldest: int, now: float) -> None:
        """Compose the requested step, or let a phase end, if there are enough groups."""
        if not self.is_wanted:
            return
        steps = self.rules.steps_per_phase
        if not (self.waiting.num_tokens >= steps * self.rules.step_size if steps else self._is_step_ready(oldest)):
            return
        self.is_wanted = False
        if steps:
            self.is_phase_ending = True
        else:
            groups = self.waiting.take(oldest, self.admission.groups_per_step)
            self.num_training += len(groups)
            self.outbox.command(ComposedStep(self.version, groups))
        self.outbox.notify(StepReady(now, self.version))

    def end_phase(self, now: float) -> None:
        """Divide all queued groups among the steps of a phase."""
        self.is_phase_ending = False
        self.drop_stale(now)
        groups = self.waiting.take_all()
        self.num_training += len(groups)
        self.outbox.command(ComposedPhase(split_evenly(groups, self.rules.steps_per_phase)))

    def settle(self, groups: Sequence[Group], num_open: int, num_issued: int, now: float) -> None:
        """Settle groups that a step has trained on.

        Of the ``num_open`` groups that are still open, ``num_issued`` have been issued.
        """
        num_queued = self.ledger.outstanding - num_open - len(groups)
        for group in groups:
            self._leave(group, is_trained=True)
            self.ledger.train(group.item_index)
            self.outbox.notify(Settled(now, group.item_index, is_trained=True))
        self.num_training -= len(groups)
        self.admission.stepped(now)
        self.law.stepped(num_issued, num_queued, len(groups))

    def _drop(self, group: Group, reason: str, now: float) -> None:
        self.ledger.drop(group.item_index, reason)
        self._leave(group, is_trained=False)
        self.outbox.command(DroppedGroup(group, reason))
        self.outbox.notify(Settled(now, group.item_index, is_trained=False))

    def _leave(self, group: Group, *, is_trained: bool) -> None:
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        if versions:
            self.law.left(min(versions), is_trained=is_trained)

    def _is_step_ready(self, oldest: int) -> bool:
        return self.waiting.ready(oldest, self.admission.groups_per_step)
