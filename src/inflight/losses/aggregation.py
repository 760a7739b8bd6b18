"""Denominators: how much each target weighs in the loss. The only place that has any.

The loss is a plain sum over tokens. Its weights are made of counts over the whole optimizer step, so any split of the
segments into micro-batches and ranks gives the same gradient. The module knows nothing of losses.

Shape suffixes: T packed tokens, S no fewer than the segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, assert_never

import torch

from inflight.types import GlobalCounts, Sample

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
"""Weight of a target of sequence i, with L_i targets: ``token_mean`` 1 / N_tokens (DAPO, arXiv 2503.14476),
``sequence_mean`` 1 / (N_sequences L_i) (GRPO, arXiv 2402.03300), ``sequence_sum`` 1 / N_sequences (PipelineRL)."""


def global_counts(samples: Iterable[Sample]) -> GlobalCounts:
    """Return the denominators of one optimizer step, from the samples of all its micro-batches on all ranks.

    Masked tokens, and completions of which every token is masked, are counted nowhere.
    """
    targets = [sum(sample.loss_mask) for sample in samples]
    return GlobalCounts(num_tokens=sum(targets), num_sequences=sum(count > 0 for count in targets))


def token_weights(
    loss_mask_T: torch.Tensor, segment_ids_T: torch.Tensor, counts: GlobalCounts, aggregation: Aggregation
) -> torch.Tensor:
    """Return the weight of each token, float64 [T], 0 where there is no target. Segments must be whole."""
    mask_T = loss_mask_T.double()
    # A step without targets has counts of 0, and every weight is 0 then.
    num_tokens, num_sequences = max(counts.num_tokens, 1), max(counts.num_sequences, 1)
    match aggregation:
        case "token_mean":
            return mask_T / num_tokens
        case "sequence_sum":
            return mask_T / num_sequences
        case "sequence_mean":
            targets_S = torch.bincount(segment_ids_T[loss_mask_T], minlength=len(segment_ids_T))
            return mask_T / (num_sequences * targets_S.clamp(min=1)[segment_ids_T])
        case _:
            assert_never(aggregation)
