"""Micro-batches as messages: their layouts as JSON, their fields as named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from inflight.types import MicroBatch

_FIELDS = (
    "token_ids_T",
    "position_ids_T",
    "segment_ids_T",
    "loss_mask_T",
    "behaviour_logprobs_T",
    "advantages_T",
    "temperature_T",
    "versions_T",
    "group_ids_S",
)


def message_of(batches: Sequence[MicroBatch]) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Return the segment lengths of each micro-batch, and all tensors by name."""
    tensors = {f"{i}.{name}": getattr(batch, name) for i, batch in enumerate(batches) for name in _FIELDS}
    return [list(batch.segment_lengths) for batch in batches], tensors


def micro_batches_of(layouts: Sequence[Sequence[int]], tensors: Mapping[str, torch.Tensor]) -> list[MicroBatch]:
    """Return the micro-batches that `message_of` took apart."""
    return [
        MicroBatch(segment_lengths=tuple(lengths), **{name: tensors[f"{i}.{name}"] for name in _FIELDS})
        for i, lengths in enumerate(layouts)
    ]
