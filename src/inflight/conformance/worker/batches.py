"""Micro-batches and losses that checks are made of; seeded, so that every rank makes the same.

Shape suffixes: T packed tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from inflight.conformance.worker.subject import VOCAB_SIZE
from inflight.contracts import TrainerWorker
from inflight.types import MicroBatch


def make_batch(
    lengths: Sequence[int], seed: int, *, temperature: float | None = 1.0, targets: bool = True
) -> MicroBatch:
    """Return packed segments of random tokens, with holes in the mask and advantages of both signs, on the CPU.

    ``temperature`` None: another one at every token, from 0.5 to 1.5.
    """
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    positions_T = torch.cat([torch.arange(length) for length in (*lengths, 0)])
    mask_T = (torch.rand(num_tokens, generator=random) < 0.7) & (positions_T > 0) & torch.tensor(targets)
    token_ids_T = torch.randint(VOCAB_SIZE, (num_tokens,), generator=random)
    advantages_T = torch.randn(num_tokens, generator=random)
    temperature_T = 0.5 + torch.rand(num_tokens, generator=random)
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


def every_target(batch: MicroBatch) -> MicroBatch:
    """Return the batch with every token a target that can be one."""
    return replace(batch, loss_mask_T=batch.position_ids_T > 0)


def part_of(batch: MicroBatch, segments: Sequence[int]) -> MicroBatch:
    """Return some segments of a batch, packed in this order."""
    rows = segment_rows(batch.segment_lengths)
    rows_T = torch.cat([torch.arange(0), *(torch.arange(rows[i].start, rows[i].stop) for i in segments)])
    lengths = tuple(batch.segment_lengths[i] for i in segments)
    return MicroBatch(
        token_ids_T=batch.token_ids_T[rows_T],
        position_ids_T=batch.position_ids_T[rows_T],
        segment_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        segment_lengths=lengths,
        loss_mask_T=batch.loss_mask_T[rows_T],
        behaviour_logprobs_T=batch.behaviour_logprobs_T[rows_T],
        advantages_T=batch.advantages_T[rows_T],
        temperature_T=batch.temperature_T[rows_T],
        versions_T=batch.versions_T[rows_T],
    )


def segment_rows(lengths: Sequence[int]) -> list[slice]:
    """Return where each of the packed segments lies."""
    return [slice(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)])]


def loss_of(logprobs_T: torch.Tensor, batch: MicroBatch, scale: float = 1.0) -> torch.Tensor:
    """Return a plain sum over the targets, each with a weight of its own."""
    weighted_T = logprobs_T * batch.advantages_T.to(logprobs_T.device)
    return -scale * weighted_T[batch.loss_mask_T.to(logprobs_T.device)].sum()


def accumulate(worker: TrainerWorker, batches: Sequence[MicroBatch], scale: float = 1.0) -> None:
    """Forward and backward over the micro-batches."""
    for batch in batches:
        worker.backward(loss_of(worker.forward(batch), batch, scale))
