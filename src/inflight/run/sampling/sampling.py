"""From a task to the batches of optimizer steps: groups are sampled, scored, and composed as they finish.

Knows nothing of trainers, and does not decide which endpoints get work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from inflight.contracts import BatchComposer, Scheduler, StalenessPolicy
from inflight.errors import TrainerError
from inflight.observe.trace import events
from inflight.rollouts import HistoryStore, Ledger, TurnCritic, WaitingGroups, teaches
from inflight.rollouts.admission import Admission
from inflight.rollouts.audit import BiasAudit, Comparison
from inflight.rollouts.batching import split_evenly
from inflight.rollouts.littles_law import LittlesLaw
from inflight.run.config import RunConfig
from inflight.run.machines.time_limits import STEP_S
from inflight.run.record.journal import Journal
from inflight.run.sampling.actor import Actor
from inflight.run.sampling.batches import StepBatch, make_batch
from inflight.run.sampling.drafts import FinishedGroups
from inflight.run.sampling.open_group import DroppedItem, Running
from inflight.run.sampling.work import Sampled, Work
from inflight.run.updates import updates_of
from inflight.types import Group
from inflight.wire import Completion

_NUM_DROPPED = 24
"""The user is told after this many dropped groups in a row, and after each doubling."""

_WHY_STALE = "Their tokens are older than rollouts.max_lag allows: are the servers behind the trainer?"


class Sampling:
    """Keeps the actor issuing groups, and makes batches of those that can be trained on.

    `compose` names the version of the next batch, which is then made as soon as enough tokens are ready.
    """

    def __init__(
        self,
        config: RunConfig,
        work: Work,
        staleness: StalenessPolicy,
        composer: BatchComposer,
        scheduler: Scheduler,
        ledger: Ledger,
        history: HistoryStore,
        journal: Journal,
        note: Callable[[str], None],
    ) -> None:
        self._config = config
        self._journal = journal
        self._note = note
        self._estimator = config.loss.estimator()
        self._trains_on_equal_rewards = (
            config.train.train_on_equal_rewards or config.loss.policy_loss().has_terms_without_advantage
        )
        self._staleness = staleness
        self._composer = composer
        rollouts = config.rollouts
        self._critic = TurnCritic(rollouts.critic_target, rollouts.discount) if rollouts.credit == "critic" else None
        self._waiting = WaitingGroups(staleness, composer)
        guess = work.size * (64 + config.sampling.max_tokens / 2)
        self._admission = Admission(config.tokens_per_step, guess)
        self._tokens_per_phase = config.tokens_per_step * config.run.conventional_steps
        self._is_in_phase = False
        self._num_dropped_in_a_row = 0
        self.num_failed_episodes: Counter[str] = Counter()
        """Episodes that count for nothing, by what went wrong."""
        self.audit = BiasAudit()
        self.littles_law = LittlesLaw(journal.version)
        self._told_reasons: set[str] = set()
        """Reasons of which the user was shown a dropped item."""
        self._wanted: int | None = None
        """Version of the batch that is being composed."""
        self._composed: StepBatch | None = None
        self._begun = 0.0
        self._arrived = asyncio.Event()
        self.history = FinishedGroups()
        self.ledger = ledger
        self.is_training = False
        """Whether a batch has been handed out and not settled yet."""
        self.actor = Actor(
            work,
            ledger,
            scheduler,
            history,
            seed=config.run.seed,
            may_issue=self._may_issue,
            on_end=self._group_ended,
            on_failed_episode=self._episode_failed,
            on_request=self._request_ended,
        )

    def state(self) -> dict[str, Any]:
        """Return, as JSON values, what decides what is sampled next, for `restore`."""
        return {
            "ledger": self.ledger.to_json(),
            "scheduler_name": self._config.rollouts.scheduler,
            "scheduler": self.actor.scheduler.state(),
            "staleness_name": self._config.rollouts.staleness,
            "staleness": self._staleness.state(),
            "history": self.actor.history.to_json(),
            "partials": self.actor.partials(),
            "critic": None if self._critic is None else self._critic.state(),
            "failed_episodes": dict(self.num_failed_episodes),
            "num_rewritten": self.actor.num_rewritten,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned; the ledger is given to the constructor.

        Raises `CheckpointError`. Another scheduler or staleness policy than then begins anew.
        """
        self.actor.history.restore(state.get("history", {}))
        self.num_failed_episodes.update(state.get("failed_episodes", {}))
        self.actor.num_rewritten = state.get("num_rewritten", 0)
        if self._critic is not None and state.get("critic") is not None:
            self._critic.restore(state["critic"])
        self.actor.continue_from(state.get("partials", {}))
        if state.get("scheduler_name") == self._config.rollouts.scheduler:
            self.actor.scheduler.restore(state["scheduler"])
        if state.get("staleness_name") == self._config.rollouts.staleness:
            self._staleness.restore(state["staleness"])

    @property
    def num_waiting(self) -> int:
        """Groups that wait to be trained on."""
        return self._waiting.num_groups

    def progress(self) -> str:
        """Return the progress of the next batch as text."""
        return (
            f"{self._waiting.num_tokens:,} of {self._config.tokens_per_step:,} tokens are ready, "
            f"{self.actor.num_running} groups are running{self._dropped()}"
        )

    def _dropped(self) -> str:
        """Return the end of a sentence that counts the dropped groups by reason."""
        counts = self.ledger.num_dropped.most_common()
        return "; dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in counts) if counts else ""

    def compose(self, version: int) -> None:
        """Begin the batch of the step that starts from ``version``, and drop groups that are too old for it."""
        self._drop_stale(version)
        self._drop_stale_running(version)
        self._wanted, self._composed, self._begun = version, None, asyncio.get_running_loop().time()
        self.actor.step_wanted(version, self._admission.num_groups())
        self._compose_if_ready()

    async def batch(self) -> StepBatch:
        """Return the batch that `compose` began. Raises `TrainerError` if it is not ready in time."""
        await self._until(lambda: self._composed is not None, self._begun)
        assert self._composed is not None
        self.is_training = True
        return self._composed

    async def phase(self, version: int) -> list[list[Group]]:
        """Sample only the groups of one phase of the conventional mode; return those of each step."""
        now = asyncio.get_running_loop().time
        self._drop_stale_running(version)
        self._is_in_phase = True
        self.actor.step_wanted(version, self._admission.num_groups(self._config.run.conventional_steps))
        await self._until(lambda: self._waiting.num_tokens >= self._tokens_per_phase, now())
        self._is_in_phase = False
        self.actor.step_ready(version)
        async with self._in_time(now()):
            await self.actor.quiet.wait()
        self._drop_stale(version)
        return split_evenly(self._waiting.take_all(), self._config.run.conventional_steps)

    def batch_of(self, groups: Sequence[Group], version: int) -> StepBatch:
        self.is_training = True
        return self._made_of(groups, version)

    def _made_of(self, groups: Sequence[Group], version: int) -> StepBatch:
        rollouts = self._config.rollouts
        return make_batch(
            groups,
            version,
            self._estimator,
            self._staleness,
            self._composer,
            rollouts.credit,
            rollouts.discount,
            self._critic,
        )

    def settle(self, batch: StepBatch) -> None:
        self.is_training = False
        queued = self.ledger.outstanding - self.actor.num_running - len(batch.groups)
        under_way = self.actor.num_issued, queued, len(batch.groups)
        for group, kept in zip(batch.groups, batch.kept, strict=True):
            self._leaves(group, is_trained=True)
            self.ledger.train(group.item_index)
            self.actor.settled(group.item_index, is_trained=True)
            self._audit(group, kept)
        self.littles_law.stepped(*under_way)
        self._check_littles_law()
        self.actor.wake()

    def _leaves(self, group: Group, *, is_trained: bool) -> None:
        """Tell Little's law of a group that is settled."""
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        if versions:
            self.littles_law.left(min(versions), is_trained=is_trained)

    def _check_littles_law(self) -> None:
        """Tell the user if ages and counts disagree: at once, and after each doubling of such windows."""
        terms = self.littles_law.alarm()
        if terms is None or self.littles_law.num_alarms.bit_count() != 1:
            return
        self._note(
            f"groups are {terms.age:.1f} steps old when they are settled, by their versions, but by Little's law they "
            f"should be {terms.expected_age:.1f}: {terms.in_flight:.0f} in flight, {terms.queued:.0f} queued and "
            f"{terms.training:.0f} in training, of which {terms.left:.1f} leave per step; this is alarm "
            f"{self.littles_law.num_alarms}. If they are older, servers are behind the trainer; if younger, requests "
            "wait in an engine (lower servers.max_concurrent), or the ledger holds groups that nothing will settle"
        )

    def _may_issue(self) -> bool:
        """Return whether the actor may offer another group."""
        num_running = self.actor.num_running
        if self._config.run.mode == "conventional":
            steps, surplus = self._config.run.conventional_steps, self.actor.scheduler.surplus
            return self._is_in_phase and self._admission.in_phase(self._waiting.num_tokens, num_running, steps, surplus)
        return self._admission.in_pipeline(
            self._staleness,
            self.ledger.outstanding,
            is_step_ready=self._is_ready(),
            is_idle=not self.is_training and num_running == 0,
        )

    def _order(self) -> tuple[int, float]:
        """Return the oldest group that is sampled, in the order of offers, and the groups of an average step."""
        return self.actor.oldest, self._admission.groups_per_step

    def _is_ready(self) -> bool:
        return self._waiting.ready(*self._order())

    def stepped(self, version: int, effective_sample_size: float | None) -> None:
        """Let the staleness policy look at a step. Raises `TrainerError` if it stops the run."""
        self._staleness.after_step(version, effective_sample_size)

    def _drop_stale(self, version: int) -> None:
        for group in self._waiting.advance(version):
            self._drop(group, "stale")

    def _drop_stale_running(self, version: int) -> None:
        """End groups that will be too old for the step that starts from ``version``, however they go on."""
        if updates_of(self._config).knows_versions:
            self.actor.drop_stale(lambda first_version: self._staleness.can_train(first_version, version))

    def _compose_if_ready(self) -> None:
        if self._wanted is not None and self._is_ready():
            groups = self._waiting.take(*self._order())
            self._composed = self._made_of(groups, self._wanted)
            self.actor.step_ready(self._wanted)
            self._wanted = None

    def _group_ended(self, ended: Group | DroppedItem | None) -> None:
        if isinstance(ended, Group):
            self._group_finished(ended)
        elif ended is not None:
            self._item_dropped(ended)
        self._compose_if_ready()  # any end may let the staleness policy allow more groups
        self._arrived.set()

    def _group_finished(self, group: Group) -> None:
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        oldest, newest = min(versions, default=None), max(versions, default=None)
        self._journal.event(
            events.GroupFinished,
            endpoint=group.endpoint,
            item=group.item_index,
            oldest=oldest,
            newest=newest,
            rewards=tuple(rollout.reward for rollout in group.rollouts),
            lengths=tuple(rollout.num_sampled_tokens for rollout in group.rollouts),
        )
        self._journal.group_finished(group)
        self.history.finished(group)
        if not self._trains_on_equal_rewards and not teaches(group, self._config.rollouts.credit):
            self._admission.finished(0)
            self._drop(group, "equal rewards")
        elif not self._composer.accepts(group):
            self._admission.finished(0)
            self._drop(group, "filtered")
        elif self._waiting.add(group):
            self._admission.finished(group.num_tokens)
            self._num_dropped_in_a_row = 0
        else:
            self._drop(group, "stale")

    def _drop(self, group: Group, reason: str) -> None:
        """Settle a finished group that no step will use; warn if that happens many times in a row."""
        self.ledger.drop(group.item_index, reason)
        self._leaves(group, is_trained=False)
        self._journal.event(events.ItemDropped, reason=reason, item=group.item_index)
        self.actor.settled(group.item_index, is_trained=False)
        why = "The composer accepts none like the last one: see rollouts.composer."
        if reason == "stale":  # what is dropped for its rewards is meant to differ from what is trained on
            self._audit(group, [False] * len(group.rollouts))
            why = _WHY_STALE
        if reason == "equal rewards":
            why = (
                f"All completions of the last one have the reward {group.rollouts[0].reward:g}, which teaches nothing: "
                "is the task too hard or too easy for the model, or is its reward wrong?"
            )
        self._count_drop(why)

    def _count_drop(self, why: str) -> None:
        self._num_dropped_in_a_row += 1
        num_doublings, rest = divmod(self._num_dropped_in_a_row, _NUM_DROPPED)
        if rest == 0 and num_doublings.bit_count() == 1:
            self._note(f"the last {self._num_dropped_in_a_row} groups were dropped{self._dropped()}. {why}")

    def _audit(self, group: Group, is_trained: Sequence[bool]) -> None:
        """Count a settled group for the audit of what is trained on."""
        lengths = [rollout.num_sampled_tokens for rollout in group.rollouts]
        self._tell_bias(self.audit.settled(lengths, is_trained, [rollout.reward for rollout in group.rollouts]))

    def _tell_bias(self, found: Mapping[str, Comparison]) -> None:
        """Tell the user if training prefers some completions: at once, and after each doubling of such windows."""
        if not found or self.audit.num_alarms.bit_count() != 1:
            return
        what = "; ".join(
            f"the median {name} of trained completions is {it.median_trained:g}, and of those left out "
            f"{it.median_left_out:g} (Kolmogorov-Smirnov distance {it.distance:.2f}, p {it.p:.1g})"
            for name, it in found.items()
        )
        self._note(
            f"training prefers some completions to others: {what}. They are left out because they are too old by "
            f"rollouts.max_lag; this is alarm {self.audit.num_alarms}. Raise rollouts.max_lag, or lower "
            "servers.max_concurrent, so that fewer groups are under way"
        )

    def _item_dropped(self, item: DroppedItem) -> None:
        """Record an item that the actor dropped; the first one of each reason is shown."""
        if item.reason not in self._told_reasons:
            self._told_reasons.add(item.reason)
            self._note(
                f"item {item.index} was dropped ({item.reason}): {item.what_happened}. The summary counts "
                "all items of this kind"
            )
        self._journal.event(events.ItemDropped, reason=item.reason, item=item.index, what=item.what_happened)
        if item.first_version is not None:
            self.littles_law.left(item.first_version, is_trained=False)
        if item.reason == "stale":
            if item.lengths:
                self._tell_bias(self.audit.settled(item.lengths, [False] * len(item.lengths)))
            self._count_drop(_WHY_STALE)

    def _request_ended(self, request: Running, sampled: Sequence[Sampled], error: str | None) -> None:
        order = request.order
        since = self._journal.since
        parts = tuple(_part(number, one, since) for number, one in zip(order.numbers, sampled, strict=False))
        self._journal.event(
            events.RequestEnded,
            (request.began_at, time.time()),
            endpoint=request.seat.name,
            item=order.item.index,
            request_id=order.request_id,
            numbers=order.numbers,
            parts=parts,
            error=error,
        )

    def _episode_failed(self, item: int, kind: str, what_happened: str) -> None:
        """Record an episode that counts for nothing; the first one of each kind is shown."""
        self.num_failed_episodes[kind] += 1
        if self.num_failed_episodes[kind] == 1:
            self._note(f"an episode failed ({kind}): {what_happened}. The summary counts all of this kind")
        self._journal.event(events.EpisodeFailed, item=item, reason=kind, what=what_happened)

    async def _until(self, condition: Callable[[], bool], begun: float) -> None:
        async with self._in_time(begun):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    @contextlib.asynccontextmanager
    async def _in_time(self, begun: float) -> AsyncIterator[None]:
        """Raise `TrainerError` if the body waits for too long for a batch that was begun at a time."""
        timeout_s = self._config.run.step_timeout_s or STEP_S
        try:
            async with asyncio.timeout_at(begun + timeout_s):
                yield
        except TimeoutError as error:
            raise TrainerError(
                f"no batch of {self._config.tokens_per_step} tokens was ready within {timeout_s:g} s: "
                f"{self._waiting.num_tokens} tokens are ready, {self.actor.num_running} groups are running"
                f"{self._dropped()}. Are all rewards equal?"
            ) from error


def _part(number: int, sampled: Sampled, since: Callable[[float], float]) -> events.SampledPart:
    """Return what a request brought of one completion, or the turns of one episode, one after the other."""
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
