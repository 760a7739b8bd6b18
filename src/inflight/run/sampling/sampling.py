"""Produces the batches of optimizer steps from a task, through the dispatcher, and records what happens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.base.clock import unix_time
from inflight.errors import TrainerError
from inflight.observe.trace import events
from inflight.rollouts import Ledger, TurnCritic
from inflight.rollouts.curriculum import Curriculum
from inflight.rollouts.dispatcher import Dispatcher
from inflight.rollouts.driver_commands import (
    ComposedPhase,
    ComposedStep,
    DroppedGroup,
    DroppedItem,
    FinishedGroup,
    RequeuedItem,
)
from inflight.rollouts.step_queue import StepRules
from inflight.run.config import RunConfig
from inflight.run.machines.time_limits import STEP_S
from inflight.run.record.journal import Journal
from inflight.run.sampling.actor import Actor, EndedRequest, FailedEpisode, Outcome
from inflight.run.sampling.batches import StepBatch, make_batch, refuse_newer
from inflight.run.sampling.drafts import FinishedGroups
from inflight.run.sampling.policies import Policies
from inflight.run.sampling.teachers import Teachers
from inflight.run.sampling.warnings import SamplingWarnings
from inflight.run.sampling.work import Sampled, Work
from inflight.types import Group
from inflight.wire import Completion

_RUN_ID_LENGTH = 128
"""How many characters of the run's id are part of the ids of requests, whose length is limited."""


def _step_rules(config: RunConfig, work: Work) -> StepRules:
    return StepRules(
        config.tokens_per_step,
        work.size * (64 + config.sampling.max_tokens / 2),
        burst=config.rollouts.burst,
        steps_per_phase=config.run.conventional_steps if config.run.mode == "conventional" else 0,
        trains_on_equal_rewards=(
            config.train.train_on_equal_rewards or config.loss.policy_loss().has_terms_without_advantage
        ),
        credit=config.rollouts.credit,
    )


class Sampling:
    """Makes batches from the groups that the dispatcher composes, and records what happens to groups.

    `batch` requests the step that starts from a version, and returns its batch once the dispatcher has composed it.
    """

    def __init__(
        self,
        config: RunConfig,
        work: Work,
        policies: Policies,
        *,
        ledger: Ledger,
        curriculum: Curriculum | None,
        journal: Journal,
        note: Callable[[str], None],
        run_id: str,
        teachers: Teachers | None = None,
    ) -> None:
        self._config = config
        self.curriculum = curriculum
        self._journal = journal
        self._composer = policies.composer
        rollouts = config.rollouts
        self._critic = TurnCritic(rollouts.critic_target, rollouts.discount) if rollouts.credit == "critic" else None
        self.dispatcher = Dispatcher(
            policies.scheduler,
            policies.staleness,
            policies.composer,
            policies.history,
            _step_rules(config, work),
            ledger=ledger,
            version=journal.version,
            is_one_request=work.is_one_request,
            knows_versions=config.updates.followed is None,
            is_enough=work.is_enough,
            request_prefix=f"{run_id[-_RUN_ID_LENGTH:]}-{uuid.uuid4().hex[:8]}-",
        )
        self.actor = Actor(
            work,
            self.dispatcher,
            seed=config.run.seed,
            on_outcome=self._record_outcome,
            teachers=teachers,
            run_id=run_id,
        )
        self.warnings = SamplingWarnings(note, ledger.num_dropped)
        self.draft_source = FinishedGroups()
        """Finished groups to send to the servers that draft from them."""
        self.num_rewritten = 0
        """Number of conversations that continue as a separate rollout because their history was rendered differently.
        """
        self.is_training = False
        """Whether a batch has been returned and is not settled yet."""
        self._groups: Sequence[Group] = ()
        self._phase: Sequence[Sequence[Group]] = ()
        self._is_composed = asyncio.Event()

    def state(self) -> dict[str, Any]:
        """Return the state that determines what is sampled next.

        It consists of JSON values, and is passed to `restore`.
        """
        return {
            **self.dispatcher.state(lambda sampled: sampled.model_dump(mode="json")),
            "scheduler_name": self._config.rollouts.scheduler,
            "staleness_name": self._config.rollouts.staleness,
            "critic": None if self._critic is None else self._critic.state(),
            "curriculum": None if self.curriculum is None else self.curriculum.state(),
            "failed_episodes": dict(self.warnings.num_failed_episodes),
            "num_rewritten": self.num_rewritten,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned; the ledger, however, is passed to the constructor.

        Raises `CheckpointError`. A scheduler or staleness policy that differs from the saved one starts from scratch.
        """
        self.warnings.num_failed_episodes.update(state.get("failed_episodes", {}))
        self.num_rewritten = state.get("num_rewritten", 0)
        if self._critic is not None and state.get("critic") is not None:
            self._critic.restore(state["critic"])
        if self.curriculum is not None and state.get("curriculum") is not None:
            self.curriculum.restore(state["curriculum"])
        rollouts = self._config.rollouts
        others = {
            policy
            for policy, name in (("scheduler", rollouts.scheduler), ("staleness", rollouts.staleness))
            if state.get(f"{policy}_name") != name
        }
        kept = {key: value for key, value in state.items() if key not in others}
        self.dispatcher.restore(kept, self.actor.work.parse)

    @property
    def num_running(self) -> int:
        """Number of groups that are being sampled or scored."""
        return len(self.dispatcher.open)

    @property
    def num_waiting(self) -> int:
        """Number of groups that wait to be trained on."""
        return self.dispatcher.steps.waiting.num_groups

    def progress(self) -> str:
        """Return the progress of the next batch as text."""
        teachers = self.actor.teachers
        scoring = (
            f", {teachers.num_waiting} completions wait for a teacher" if teachers and teachers.num_waiting else ""
        )
        return (
            f"{self.dispatcher.steps.waiting.num_tokens:,} of {self._config.tokens_per_step:,} tokens are ready, "
            f"{self.num_running} groups are running{scoring}{self._waits_for_the_task()}{self.warnings.drops()}"
        )

    def _waits_for_the_task(self) -> str:
        """Return a text about the calls to the user's code that have not returned yet."""
        num_scoring = sum(group.is_scoring for group in self.dispatcher.open.values())
        making = self.actor.making
        return (f", {num_scoring} of them wait for rewards" if num_scoring else "") + (
            ""
            if making is None
            else f", the task has been working on item {making[0]} for {self.actor.clock() - making[1]:.0f} s"
        )

    async def batch(self, version: int) -> StepBatch:
        """Return the batch of the step that starts from ``version``, and drop groups that are too old for it.

        Raises `TrainerError` if it is not ready in time.
        """
        await self._until_composed(version)
        return self.batch_of(self._groups, version)

    async def phase(self, version: int) -> Sequence[Sequence[Group]]:
        """Sample the groups of one phase in conventional mode, and no others; return the groups of each step.

        Raises `TrainerError` if they are not ready in time.
        """
        await self._until_composed(version)
        return self._phase

    def batch_of(self, groups: Sequence[Group], version: int) -> StepBatch:
        """Return the batch of one step, and record that its training has begun."""
        refuse_newer(groups, version)
        self.is_training = True
        rollouts = self._config.rollouts
        return make_batch(
            groups,
            version,
            self._config.loss.estimator(),
            self.dispatcher.steps.staleness,
            self._composer,
            rollouts.credit,
            rollouts.discount,
            self._critic,
        )

    def settle(self, batch: StepBatch) -> None:
        """Settle the groups of a batch after its step."""
        self.is_training = False
        self.dispatcher.settle(batch.groups, self.actor.clock())
        for group, kept in zip(batch.groups, batch.kept, strict=True):
            self.warnings.group_settled(group, kept)
        self.warnings.check_littles_law(self.dispatcher.steps.law)
        self.actor.carry_out_commands()

    def report_step(self, version: int, effective_sample_size: float | None) -> None:
        """Report a step to the staleness policy. Raises `TrainerError` if the policy stops the run."""
        self.dispatcher.steps.staleness.after_step(version, effective_sample_size)

    def _record_outcome(self, outcome: Outcome) -> None:
        match outcome:
            case ComposedStep(_, groups):
                self._groups = groups
                self._is_composed.set()
            case ComposedPhase(steps):
                self._phase = steps
                self._is_composed.set()
            case FinishedGroup():
                self._record_group(outcome)
            case DroppedGroup(group, reason):
                self._journal.event(events.ItemDropped, reason=reason, item=group.item_index)
                self.warnings.group_dropped(group, reason)
            case DroppedItem(item, reason, what):
                self._journal.event(events.ItemDropped, reason=reason, item=item, what=what)
                self.warnings.item_dropped(outcome)
            case FailedEpisode(item, kind, what):
                self._journal.event(events.EpisodeFailed, item=item, reason=kind, what=what)
                self.warnings.episode_failed(kind, what)
            case EndedRequest():
                self._record_request(outcome)
            case RequeuedItem():
                pass

    def _record_group(self, finished: FinishedGroup) -> None:
        group = finished.group
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        self._journal.event(
            events.GroupFinished,
            endpoint=group.endpoint,
            item=group.item_index,
            oldest=min(versions, default=None),
            newest=max(versions, default=None),
            rewards=tuple(rollout.reward for rollout in group.rollouts),
            lengths=tuple(rollout.num_sampled_tokens for rollout in group.rollouts),
        )
        if finished.is_new:
            self._journal.group_finished(group)
            self.num_rewritten += finished.num_rewritten
            self._count_in_curriculum(group)
        self.draft_source.finished(group)
        if finished.is_waiting:
            self.warnings.group_kept()

    def _count_in_curriculum(self, group: Group) -> None:
        if self.curriculum is not None:
            rewards = [rollout.reward for rollout in group.rollouts]
            if (change := self.curriculum.record_group(group.item_index, rewards)) is not None:
                self.warnings.note(change)

    def _record_request(self, ended: EndedRequest) -> None:
        order, since = ended.order, self._journal.since
        parts = tuple(_part(number, one, since) for number, one in zip(order.numbers, ended.sampled, strict=False))
        self._journal.event(
            events.RequestEnded,
            (ended.began_at, unix_time()),
            endpoint=ended.endpoint,
            item=order.item.index,
            request_id=order.request_id,
            numbers=order.numbers,
            parts=parts,
            error=ended.error,
        )

    async def _until_composed(self, version: int) -> None:
        """Request the step or phase that starts from ``version``, and return once its groups are composed.

        Raises `TrainerError` if that takes too long.
        """
        timeout_s = self._config.run.step_timeout_s or STEP_S
        self._is_composed.clear()
        self.dispatcher.want_step(version, self.actor.clock())
        self.actor.carry_out_commands()
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_composed.wait()
        except TimeoutError as error:
            raise TrainerError(
                f"no batch of {self._config.tokens_per_step} tokens was ready within {timeout_s:g} s: "
                f"{self.dispatcher.steps.waiting.num_tokens} tokens are ready, {self.num_running} groups are "
                f"running{self.warnings.drops()}. Check whether all rewards are equal"
            ) from error


def _part(number: int, sampled: Sampled, since: Callable[[float], float]) -> events.SampledPart:
    """Return the event entry of one completion, or of one episode with its turns in order."""
    calls = [] if isinstance(sampled, Completion) else sampled.calls
    turns = [(since(call.span[0]), since(call.span[1]), call.completion.num_tokens) for call in calls if call.span]
    completions = [sampled] if isinstance(sampled, Completion) else [call.completion for call in sampled.calls]
    spans: list[tuple[int, int, int]] = []
    before = 0
    for completion in completions:
        spans += [(before + it.start, before + it.end, it.version) for it in completion.version_spans]
        before += completion.num_tokens
    reason = completions[-1].finish_reason if completions else "failed"
    return events.SampledPart(
        number=number, num_tokens=before, spans=tuple(spans), finish_reason=reason, turns=tuple(turns)
    )
