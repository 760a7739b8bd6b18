"""Turns finished groups into the requests of one optimizer step: advantages, staleness, packing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inflight.contracts import BatchComposer, StalenessPolicy
from inflight.errors import TrainerError
from inflight.losses import collate
from inflight.model.images import ImageProcessor
from inflight.rollouts import AdvantageEstimator, Credit, TurnCritic, token_advantages, trained_mask
from inflight.rollouts.packing import Packing
from inflight.run.ranks.channel import encode
from inflight.run.ranks.messages import Members, Train, tensors_of
from inflight.types import Group, Sample


class StepData(Protocol):
    """The data of one optimizer step as the trainer ranks need it."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def samples(self) -> Sequence[Sample]: ...


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The data of one optimizer step, and the groups from which it was made."""

    groups: Sequence[Group]
    samples: Sequence[Sample]
    version: int
    """Version of the weights from which the step starts."""
    token_lags: Counter[int]
    """Number of trained tokens by lag."""
    num_stale_tokens: int
    """Number of tokens that are masked because they are too old."""
    kept: Sequence[Sequence[bool]]
    """For each group, which of its completions have a token that is not too old."""

    @property
    def ages(self) -> list[int]:
        """For each sample, the step's version minus the version that sampled the first token of the completion."""
        return [self.version - sample.rollout.version_spans[0].version for sample in self.samples]

    @property
    def num_tokens(self) -> int:
        """Number of training tokens: prompts, observations and the unmasked tokens of turns."""
        return sum(sample.rollout.num_context_tokens + sum(sample.loss_mask) for sample in self.samples)


def make_batch(
    groups: Sequence[Group],
    version: int,
    estimator: AdvantageEstimator,
    staleness: StalenessPolicy,
    composer: BatchComposer | None = None,
    credit: Credit = "episode",
    discount: float = 1.0,
    critic: TurnCritic | None = None,
) -> StepBatch:
    """Return the batch of a step that starts from ``version``, made from finished groups.

    If there is a ``composer``, it shapes the batch.

    A rollout whose tokens are all too old yields no sample, but denominators that count rollouts still count it. The
    critic, if there is one, learns from the groups after their advantages are computed.
    """
    samples: list[Sample] = []
    kept: list[list[bool]] = [[] for _ in groups]
    num_stale = 0
    advantages = token_advantages(groups, estimator, credit, discount, critic)
    if critic is not None:
        critic.learn([rollout for group in groups for rollout in group.rollouts])
    for index, group in enumerate(groups):
        for rollout, of_tokens in zip(group.rollouts, advantages[index], strict=True):
            loss_mask = trained_mask(rollout, staleness, version)
            num_stale += rollout.num_sampled_tokens - sum(loss_mask)
            kept[index].append(any(loss_mask))
            if any(loss_mask):
                samples.append(Sample(rollout, of_tokens, loss_mask, group_index=index))
    shaped = samples if composer is None else composer.shaped(samples, version)
    lags: Counter[int] = Counter()
    for sample in shaped:
        for span in sample.rollout.version_spans:
            lags[version - span.version] += sum(sample.loss_mask[span.start : span.end])
    return StepBatch(groups, shaped, version, +lags, num_stale, kept)


def refuse_newer(groups: Sequence[Group], version: int) -> None:
    """Raise `TrainerError` if a step that starts from ``version`` would train on tokens of a later version."""
    newest = max((span.version for it in groups for r in it.rollouts for span in r.version_spans), default=version)
    if newest > version:
        raise TrainerError(
            f"the step that starts from version {version} has tokens of version {newest}, which this run has not "
            "produced: another trainer is updating the same servers. Give each run its own servers"
        )


def frames_of(
    batch: StepData,
    packing: Packing,
    *,
    publish: Members | None,
    images: ImageProcessor | None = None,
    returns_logprobs: bool = False,
) -> list[bytes]:
    """Return a request frame for each share of the data; all shares have the same number of micro-batches.

    ``images`` is the processor of a model that accepts images. With ``returns_logprobs``, the answers contain the
    logprobs for `logprobs_of_samples`.
    """
    image_tensors = None if images is None else images.tensors
    frames = []
    for micro_batches in packing.pack(batch.samples):
        # Without any samples, it is an empty micro-batch.
        collated = [
            collate([batch.samples[i] for i in ids], image_tensors=image_tensors, share_prefixes=packing.share_prefixes)
            for ids in micro_batches
        ]
        request = Train(
            segment_lengths=tuple(micro_batch.segment_lengths for micro_batch in collated),
            num_groups=len(batch.groups),
            num_sequences=sum(len(group.rollouts) for group in batch.groups),
            publish=publish,
            returns_logprobs=returns_logprobs,
        )
        frames.append(encode(request, tensors_of(collated)))
    return frames


def logprobs_of_samples(
    samples: Sequence[Sample], packing: Packing, by_share: Sequence[Sequence[npt.NDArray[np.float32]]]
) -> list[Sequence[float]]:
    """Return the trainer logprobs of the completion tokens of each sample.

    ``by_share`` contains, for each share of the data, the logprobs of its micro-batches.

    ``packing`` must be the one passed to `frames_of`, because it assigns samples to micro-batches.
    """
    lengths = [sample.rollout.num_tokens for sample in samples]
    found: list[Sequence[float]] = [()] * len(samples)
    for micro_batches, arrays in zip(packing.pack(samples), by_share, strict=True):
        for ids, logprobs_T in zip(micro_batches, arrays, strict=True):
            end = 0
            for i in ids:
                end += lengths[i]
                found[i] = logprobs_T[end - len(samples[i].rollout.completion_token_ids) : end].tolist()
    return found
