"""From finished groups to the requests of one optimizer step: advantages, staleness, packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.contracts import BatchComposer, StalenessPolicy
from inflight.losses import collate, empty_micro_batch
from inflight.pipeline.channel import encode
from inflight.pipeline.messages import Members, Train, tensors_of
from inflight.rollouts import AdvantageEstimator, batch_advantages, pack
from inflight.types import Group, Sample


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The data of one optimizer step, and the groups it was made from."""

    groups: Sequence[Group]
    samples: Sequence[Sample]
    version: int
    """Version of the weights that the step starts from."""
    token_lags: Sequence[int]
    """Lag of every trained token."""
    num_stale_tokens: int
    """Tokens that are masked because they are too old."""
    kept: Sequence[Sequence[bool]]
    """For each group, which of its completions have a token that is not too old."""

    @property
    def ages(self) -> list[int]:
        """For each sample, the step's version minus the one that sampled the completion's first token."""
        return [self.version - sample.rollout.version_spans[0].version for sample in self.samples]

    @property
    def num_tokens(self) -> int:
        """Training tokens: prompts and the unmasked tokens of completions."""
        return sum(len(sample.rollout.prompt_token_ids) + sum(sample.loss_mask) for sample in self.samples)


def make_batch(
    groups: Sequence[Group],
    version: int,
    estimator: AdvantageEstimator,
    staleness: StalenessPolicy,
    composer: BatchComposer | None = None,
) -> StepBatch:
    """Return the batch of finished groups, for a step that starts from ``version``, shaped by ``composer`` if given.

    A completion whose tokens are all too old gives no sample, but denominators that count completions still count it.
    """
    samples: list[Sample] = []
    kept: list[list[bool]] = [[] for _ in groups]
    num_stale = 0
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    lengths = [[len(rollout.completion_token_ids) for rollout in group.rollouts] for group in groups]
    advantages = batch_advantages(rewards, estimator, lengths)
    for index, group in enumerate(groups):
        for rollout, advantage in zip(group.rollouts, advantages[index], strict=True):
            versions = rollout.token_versions()
            loss_mask = staleness.mask(versions, version)
            num_stale += len(loss_mask) - sum(loss_mask)
            kept[index].append(any(loss_mask))
            if any(loss_mask):
                samples.append(Sample(rollout, [advantage] * len(versions), loss_mask, group_index=index))
    shaped = samples if composer is None else composer.shaped(samples, version)
    lags = [
        version - v
        for sample in shaped
        for v, is_kept in zip(sample.rollout.token_versions(), sample.loss_mask, strict=True)
        if is_kept
    ]
    return StepBatch(groups, shaped, version, lags, num_stale, kept)


def split_evenly(groups: Sequence[Group], num_parts: int) -> list[list[Group]]:
    """Return the groups, in order, as ``num_parts`` parts of about equal tokens; fewer if there are too few groups."""
    total = sum(group.num_tokens for group in groups)
    parts: list[list[Group]] = [[] for _ in range(num_parts)]
    before = 0
    for group in groups:
        middle = before + group.num_tokens / 2
        parts[min(num_parts - 1, int(middle * num_parts / total))].append(group)
        before += group.num_tokens
    return [part for part in parts if part]


def frames_of(batch: StepBatch, max_tokens: int, num_ranks: int, *, publish: Members | None) -> list[bytes]:
    """Return the frame of each rank's request; all have the same number of micro-batches."""
    lengths = [sample.rollout.num_tokens for sample in batch.samples]
    frames = []
    for micro_batches in pack(lengths, max_tokens, num_ranks):
        collated = [
            collate([batch.samples[i] for i in indices]) if indices else empty_micro_batch()
            for indices in micro_batches
        ]
        request = Train(
            segment_lengths=tuple(micro_batch.segment_lengths for micro_batch in collated),
            num_groups=len(batch.groups),
            num_sequences=sum(len(group.rollouts) for group in batch.groups),
            publish=publish,
        )
        frames.append(encode(request, tensors_of(collated)))
    return frames
