"""Seeded micro-batches and losses for checks. Every rank creates the same ones.

Shape suffixes: T packed tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from inflight.conformance.worker.subject import VOCAB_SIZE
from inflight.contracts import TrainerWorker
from inflight.types import MicroBatch, StepResult

OF_SEVERAL_CHUNKS = (290, 330, 240, 310)
"""Lengths of segments that have more than 1,024 targets in total. A head that never holds all logits usually computes
those of at most 1,024 targets at a time."""


def make_batch(
    lengths: Sequence[int], seed: int, *, temperature: float | None = 1.0, targets: bool = True
) -> MicroBatch:
    """Return packed segments of random tokens, with gaps in the mask and advantages of both signs, on the CPU.

    Some advantages are 0, as happens where a loss is clipped or all completions of a group have the same reward.
    If ``temperature`` is None, every token has a temperature of its own, from 0.5 to 1.5.
    """
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    positions_T = torch.cat([torch.arange(length) for length in (*lengths, 0)])
    mask_T = (torch.rand(num_tokens, generator=random) < 0.7) & (positions_T > 0) & torch.tensor(targets)
    token_ids_T = torch.randint(VOCAB_SIZE, (num_tokens,), generator=random)
    advantages_T = torch.randn(num_tokens, generator=random)
    temperature_T = 0.5 + torch.rand(num_tokens, generator=random)
    advantages_T *= torch.rand(num_tokens, generator=random) < 0.85
    return MicroBatch(
        token_ids_T=token_ids_T,
        position_ids_T=positions_T,
        segment_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        segment_lengths=tuple(lengths),
        loss_mask_T=mask_T,
        behaviour_logprobs_T=torch.where(mask_T, -2.0 * torch.rand(num_tokens, generator=random), 0.0),
        advantages_T=advantages_T,
        temperature_T=temperature_T if temperature is None else torch.full((num_tokens,), temperature),
        versions_T=torch.where(mask_T, 0, -1),
    )


def with_targets(batch: MicroBatch, seed: int) -> MicroBatch:
    """Return the batch with random tokens to score at every position; the last two at each position are equal."""
    random = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(VOCAB_SIZE, (batch.num_tokens, 4), generator=random)
    ids_TK[:, 3] = ids_TK[:, 2]
    return replace(batch, target_ids_TK=ids_TK)


def segments_of_a_tree() -> MicroBatch:
    """Return segments that share a prompt, and an unrelated one.

    They include a branch from one of the segments, a repeated segment, and a copy of that segment with a different
    token in the middle.
    """
    ids = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(62)).tolist()
    prompt = ids[:9]
    first = [*prompt, *ids[9:15]]
    segments = [
        *(first, [*prompt, *ids[15:17]], ids[17:21], [*first[:12], *ids[21:29]], first, [*prompt, *ids[29:36]]),
        [*first[:4], ids[36], *first[5:]],
    ]
    return replace(
        make_batch([len(segment) for segment in segments], seed=62, temperature=None),
        token_ids_T=torch.tensor([token for segment in segments for token in segment]),
        prefix_ids_T=prefix_ids_of(segments),
    )


def prefix_ids_of(segments: Sequence[Sequence[Hashable]]) -> torch.Tensor:
    """Return `MicroBatch.prefix_ids_T` for segments whose tokens are given as their ids, or as the image that they
    stand for."""
    prefixes = [tuple(segment[: i + 1]) for segment in segments for i in range(len(segment))]
    return torch.tensor([prefixes.index(prefix) for prefix in prefixes])


def every_target(batch: MicroBatch) -> MicroBatch:
    """Return the batch with every possible target in its loss mask."""
    return replace(batch, loss_mask_T=batch.position_ids_T > 0)


def part_of(batch: MicroBatch, segments: Sequence[int]) -> MicroBatch:
    """Return some segments of a batch, packed in this order."""
    rows = segment_rows(batch.segment_lengths)
    rows_T = torch.cat([torch.arange(0), *(torch.arange(rows[i].start, rows[i].stop) for i in segments)])
    lengths = tuple(batch.segment_lengths[i] for i in segments)
    packed = {field.name: getattr(batch, field.name) for field in fields(batch)}
    parts: dict[str, Any] = {n: value[rows_T] for n, value in packed.items() if isinstance(value, torch.Tensor)}
    parts["segment_ids_T"] = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
    )
    return replace(batch, segment_lengths=lengths, **parts)


def segment_rows(lengths: Sequence[int]) -> list[slice]:
    """Return the rows of each packed segment."""
    return [slice(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)])]


def loss_of(logprobs_T: torch.Tensor, batch: MicroBatch, scale: float = 1.0) -> torch.Tensor:
    """Return minus ``scale`` times the sum of the targets' logprobs, each weighted by its advantage.

    If the logprobs are [T, K], column k is also weighted by k + 1, and in every other row by its difference from the
    mean of these weights: the gradients of a row then add up to 0.
    """
    advantages_T = batch.advantages_T.to(logprobs_T.device)
    if logprobs_T.dim() == 2:
        weights_K = torch.arange(1, logprobs_T.shape[1] + 1).to(logprobs_T)
        weights_TK = weights_K.repeat(len(logprobs_T), 1)
        weights_TK[1::2] -= weights_K.mean()
        logprobs_T = (logprobs_T * weights_TK).sum(1)
    weighted_T = logprobs_T * advantages_T
    return -scale * weighted_T[batch.loss_mask_T.to(logprobs_T.device)].sum()


def take_steps(worker: TrainerWorker, batches: Sequence[MicroBatch]) -> list[StepResult]:
    """Take an optimizer step over each batch; return the results. All ranks call this, each with its own batches."""
    results = []
    for batch in batches:
        accumulate(worker, [batch])
        results.append(worker.step())
    return results


def accumulate(worker: TrainerWorker, batches: Sequence[MicroBatch], scale: float = 1.0) -> None:
    """Accumulate the gradients of the micro-batches."""
    for batch in batches:
        worker.backward(loss_of(worker.forward(batch), batch, scale))


def logprobs_of(worker: TrainerWorker, batch: MicroBatch) -> torch.Tensor:
    """Return the logprobs [T] that a worker computes without gradients, in float64, on the CPU."""
    with torch.no_grad():
        return worker.forward(batch).detach().double().cpu()
