"""From a task to the batches of optimizer steps: groups are sampled, scored, and composed as they finish.

Knows nothing of trainers; which endpoints get work is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.contracts import Task
from inflight.errors import TrainerError
from inflight.pipeline.actor import Actor, DroppedItem
from inflight.pipeline.admission import PhasedAdmission, TokensPerGroup, pipeline_admission
from inflight.pipeline.batches import StepBatch, make_batch, split_evenly
from inflight.pipeline.config import RunConfig
from inflight.pipeline.journal import Journal
from inflight.rollouts import BatchComposer, Ledger, StalenessPolicy, has_signal
from inflight.types import Group
from inflight.wire import SamplingParams

_NUM_DROPPED = 24
"""After so many dropped groups in a row a person is told, and after each doubling."""


class Sampling:
    """Keeps the actor issuing groups, and makes batches of those that can be trained on.

    A batch is made as soon as its tokens have come together, whatever else goes on: `compose` says for which version.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        tokenizer: Any,
        ledger: Ledger,
        journal: Journal,
        note: Callable[[str], None],
    ) -> None:
        self._config = config
        self._journal = journal
        self._estimator = config.loss.estimator()
        self._trains_on_equal_rewards = (
            config.train.train_on_equal_rewards or config.loss.policy_loss().has_terms_without_advantage
        )
        self._staleness = StalenessPolicy(config.loss.max_lag)
        self._composer = BatchComposer(config.train.tokens_per_worker, config.train.num_ranks, self._staleness)
        guess = config.sampling.group_size * (64 + config.sampling.max_tokens / 2)
        self._tokens_per_group = TokensPerGroup(guess)
        self._phase = PhasedAdmission(config.tokens_per_step * config.run.conventional_steps, self._tokens_per_group)
        self._drops = _Drops(ledger, journal, note)
        self._wanted: int | None = None
        """Version of the batch that is being composed."""
        self._composed: StepBatch | None = None
        self._begun = 0.0
        self._arrived = asyncio.Event()
        self.ledger = ledger
        self.is_training = False
        """Whether a batch was handed out that is not settled."""
        self.actor = Actor(
            {},
            task,
            tokenizer,
            SamplingParams(
                n=config.sampling.group_size,
                temperature=config.sampling.temperature,
                max_tokens=config.sampling.max_tokens,
            ),
            ledger,
            seed=config.run.seed,
            reward_timeout_s=config.task.reward_timeout_s,
            max_sequence_tokens=config.train.max_tokens_per_micro_batch,
            may_issue=self._admission(),
            on_end=self._group_ended,
        )

    @property
    def num_waiting(self) -> int:
        """Groups that wait to be trained on."""
        return self._composer.num_groups

    def progress(self) -> str:
        """Return how far the next batch is, in words."""
        return (
            f"{self._composer.num_tokens:,} of {self._config.tokens_per_step:,} tokens have come together, "
            f"{self.actor.num_running} groups are running{self._drops.told()}"
        )

    def compose(self, version: int) -> None:
        """Begin the batch of the step that starts from ``version``; groups that are too old for it are dropped."""
        self._drop_stale(version)
        self._wanted, self._composed, self._begun = version, None, asyncio.get_running_loop().time()
        self._compose_if_ready()
        self.actor.wake()

    async def batch(self) -> StepBatch:
        """Wait for the batch that was begun. Raises `TrainerError` if it is not composed in time."""
        await self._until(lambda: self._composed is not None, self._begun)
        assert self._composed is not None
        self.is_training = True
        return self._composed

    async def phase(self, version: int) -> list[list[Group]]:
        """Sample the groups of a whole phase of the conventional mode, and nothing more; return those of each step."""
        num_steps = self._config.run.conventional_steps
        now = asyncio.get_running_loop().time
        self._phase.begin()
        self.actor.wake()
        await self._until(lambda: self._composer.num_tokens >= self._config.tokens_per_step * num_steps, now())
        self._phase.end()
        await self._until(lambda: self.actor.num_running == 0, now())
        self._drop_stale(version)
        return split_evenly(self._composer.take_all(), num_steps)

    def batch_of(self, groups: Sequence[Group], version: int) -> StepBatch:
        """Return the batch of some groups for a step that starts from ``version``."""
        self.is_training = True
        return make_batch(groups, version, self._estimator, self._staleness)

    def settle(self, batch: StepBatch) -> None:
        """Note that an optimizer step has used a batch."""
        self.is_training = False
        for group in batch.groups:
            self.ledger.train(group.item_index)
        self.actor.wake()

    def _admission(self) -> Callable[[], bool]:
        if self._config.run.mode == "conventional":
            return lambda: self._phase.may_issue(self.actor.num_running, self._composer.num_tokens)
        return pipeline_admission(
            self._staleness,
            self._config.tokens_per_step,
            self._tokens_per_group,
            lambda: self.ledger.outstanding,
            lambda: self._composer.num_tokens,
            lambda: not self.is_training and self.actor.num_running == 0,
        )

    def _drop_stale(self, version: int) -> None:
        for group in self._composer.advance(version):
            self._drops.group(group, "stale")

    def _compose_if_ready(self) -> None:
        if self._wanted is not None and self._composer.ready():
            self._composed = make_batch(self._composer.take(), self._wanted, self._estimator, self._staleness)
            self._wanted = None

    def _group_ended(self, ended: Group | DroppedItem | None) -> None:
        if isinstance(ended, Group):
            self._group_finished(ended)
            self._compose_if_ready()
        elif ended is not None:
            self._drops.item(ended)
        self._arrived.set()

    def _group_finished(self, group: Group) -> None:
        now = time.time()
        versions = [span.version for rollout in group.rollouts for span in rollout.version_spans]
        facts = {"oldest": min(versions, default=None), "newest": max(versions, default=None)}
        self._journal.event("group", now, now, endpoint=group.endpoint, item=group.item_index, **facts)
        self._journal.group_finished(group)
        if not self._trains_on_equal_rewards and not has_signal([rollout.reward for rollout in group.rollouts]):
            self._tokens_per_group.add(0)
            self._drops.group(group, "equal rewards")
        elif self._composer.add(group):
            self._tokens_per_group.add(group.num_tokens)
            self._drops.used()
        else:
            self._drops.group(group, "stale")

    async def _until(self, condition: Callable[[], bool], begun: float) -> None:
        timeout_s = self._config.run.step_timeout_s
        try:
            async with asyncio.timeout_at(begun + timeout_s):
                while not condition():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as error:
            raise TrainerError(
                f"no batch of {self._config.tokens_per_step} tokens came together within {timeout_s:g} s: "
                f"{self._composer.num_tokens} tokens are finished, {self.actor.num_running} groups are running"
                f"{self._drops.told()}. Are all rewards equal?"
            ) from error


@dataclass(eq=False)
class _Drops:
    """Groups and items that no step will use; ``note`` tells a person before they are many."""

    ledger: Ledger
    journal: Journal
    note: Callable[[str], None]
    num_in_a_row: int = 0
    told_reasons: set[str] = field(default_factory=set)

    def told(self) -> str:
        """Return how many groups were dropped, by reason, as the end of a sentence."""
        counts = Counter(self.ledger.num_dropped).most_common()
        return "; dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in counts) if counts else ""

    def used(self) -> None:
        """Note that a group can be trained on."""
        self.num_in_a_row = 0

    def group(self, group: Group, reason: str) -> None:
        """Settle a finished group that no step will use; a person is told when that happens again and again."""
        self.ledger.drop(group.item_index, reason)
        self.num_in_a_row += 1
        num_doublings, rest = divmod(self.num_in_a_row, _NUM_DROPPED)
        if rest == 0 and num_doublings.bit_count() == 1:
            rewards = sorted({round(rollout.reward, 3) for rollout in group.rollouts})
            self.note(
                f"the last {self.num_in_a_row} groups were dropped{self.told()}. All completions of the last one "
                f"have the reward {rewards[0]:g}, which teaches nothing: is the task too hard or too easy for the "
                "model, or its reward wrong?"
                if reason == "equal rewards"
                else f"the last {self.num_in_a_row} groups were dropped{self.told()}. Their tokens are older than "
                "loss.max_lag allows: are the servers behind the trainer?"
            )

    def item(self, item: DroppedItem) -> None:
        """Note an item that the actor gave up; the first for each reason is told whole."""
        if item.reason not in self.told_reasons:
            self.told_reasons.add(item.reason)
            self.note(
                f"item {item.index} was dropped ({item.reason}): {item.what_happened}. More of this kind are counted "
                "in the summary"
            )
        now = time.time()
        self.journal.event("drop", now, now, reason=item.reason, item=item.index, what=item.what_happened)
