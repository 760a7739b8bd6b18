"""The simulated trainer, and the data of a step."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.contracts import BatchComposer, StalenessPolicy
from inflight.planning.costs import TrainerCost
from inflight.planning.groups import kept_tokens
from inflight.planning.outcome import StepRow
from inflight.types import Group, Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, and the parts of these groups that the step trains on."""

    groups: Sequence[Group]
    version: int
    """The version from which the step starts."""
    num_tokens: int
    ages: Counter[int]
    """Number of completions by the lag of their first token."""
    lags: Counter[int]
    """Number of tokens by lag."""
    num_stale_tokens: int = 0

    def row(self, time: float, busy_time: float, slot_time: float, train_time: float) -> StepRow:
        age, lag = (statistics.fmean(counts, counts.values()) if counts else 0.0 for counts in (self.ages, self.lags))
        return StepRow(time, self.num_tokens, self.ages.total(), age, lag, busy_time, slot_time, train_time)

    def fields(self) -> dict[str, Any]:
        """Return those fields of a live run's step event that the simulation knows."""
        return {
            "num_step_tokens": self.num_tokens,
            "num_step_sequences": self.ages.total(),
            "num_stale_tokens": self.num_stale_tokens,
            "completions_by_age": {str(age): num for age, num in self.ages.items()},
            "lag_mean": statistics.fmean(self.lags, self.lags.values()) if self.lags else 0.0,
        }


def batch_of(
    groups: Sequence[Group], version: int, staleness: StalenessPolicy, composer: BatchComposer | None
) -> Batch:
    """Return the batch of a step that starts from ``version``, shaped by the composer if it shapes batches."""
    num_tokens, num_stale, ages, lags = 0, 0, Counter[int](), Counter[int]()
    shapes = composer is not None and type(composer).shaped is not BatchComposer.shaped
    samples = []
    for index, group in enumerate(groups):
        mean = statistics.fmean(rollout.reward for rollout in group.rollouts)
        for rollout in group.rollouts:
            kept = kept_tokens(rollout, staleness, version)
            spans = rollout.version_spans
            num_stale += sum(span.end - span.start for span, is_kept in zip(spans, kept, strict=True) if not is_kept)
            if not any(kept):
                continue
            if shapes:
                mask = [is_kept for span, is_kept in zip(rollout.version_spans, kept, strict=True)
                        for _ in range(span.start, span.end)]  # fmt: skip
                advantages = [rollout.reward - mean] * len(mask)
                samples.append(Sample(rollout, advantages, mask, group_index=index))
                continue
            num_tokens += len(rollout.prompt_token_ids)
            ages[version - rollout.version_spans[0].version] += 1
            for span, is_kept in zip(rollout.version_spans, kept, strict=True):
                if is_kept:
                    lags[version - span.version] += span.end - span.start
                    num_tokens += span.end - span.start
    for sample in composer.shaped(samples, version) if composer is not None and shapes else ():
        rollout = sample.rollout
        num_tokens += len(rollout.prompt_token_ids) + sum(sample.loss_mask)
        ages[version - rollout.version_spans[0].version] += 1
        for span in rollout.version_spans:
            lags[version - span.version] += sum(sample.loss_mask[span.start : span.end])
    return Batch(groups, version, num_tokens, ages, +lags, num_stale)


@dataclass(slots=True, eq=False)
class SimulatedTrainer:
    """Trains on one batch at a time, more slowly while other processes share its cores."""

    cost: TrainerCost
    groups: Sequence[Group] = ()
    """Groups of the current batch, until its version is published."""
    busy_time: float = 0.0
    began: float = 0.0
    """The time at which the last step began."""
    publishes: bool = False
    stamp: int = 0
    """Incremented by every change that affects `end`."""
    _batch: Batch | None = None
    _left: float = 0.0
    """Remaining time without slowdown."""
    _since: float = 0.0
    _slowdown: float = 1.0

    @property
    def is_busy(self) -> bool:
        return self._batch is not None

    @property
    def is_working(self) -> bool:
        """Whether the trainer is training or publishing."""
        return self.is_busy or self.publishes

    @property
    def end(self) -> float:
        """The time at which the step ends if nothing changes before then."""
        return self._since + self._left * self._slowdown

    def begin(self, now: float, batch: Batch, slowdown: float) -> None:
        self._batch, self._left, self._since, self._slowdown = batch, self.cost(batch.num_tokens), now, slowdown
        self.began = now
        self.stamp += 1

    def slow_down(self, now: float, slowdown: float) -> None:
        self._advance(now)
        self._slowdown = slowdown
        self.stamp += 1

    def finish(self, now: float) -> Batch:
        self._advance(now)
        batch, self._batch = self._batch, None
        assert batch is not None
        self.stamp += 1
        return batch

    def _advance(self, now: float) -> None:
        self.busy_time += now - self._since
        self._left = max(0.0, self._left - (now - self._since) / self._slowdown)
        self._since = now
