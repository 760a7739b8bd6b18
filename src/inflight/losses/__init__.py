"""Policy losses as pure functions, presets, metrics that add up, and the chunked log-probability head.

A loss is a plain sum over the targets of packed micro-batches, weighed by counts over the whole optimizer step, so any
split into micro-batches and ranks gives the same gradient. The room knows nothing of models, workers or rollouts.
"""

from inflight.losses.aggregation import Aggregation, global_counts, token_weights
from inflight.losses.head import chunked_logprobs
from inflight.losses.kl import reference_kl
from inflight.losses.metrics import (
    LossOutput,
    Maximum,
    Metric,
    Metrics,
    add_metrics,
    decode_metrics,
    effective_sample_size,
    encode_metrics,
    metric_values,
    ratio_metrics,
    staleness_metrics,
)
from inflight.losses.micro_batch import collate, empty_micro_batch
from inflight.losses.policy import (
    GRPO,
    PIPELINERL,
    PIPELINERL_PAPER,
    PRESETS,
    LossPreset,
    clipped_loss,
    grpo_loss,
    reinforce_loss,
)

__all__ = [
    "GRPO",
    "PIPELINERL",
    "PIPELINERL_PAPER",
    "PRESETS",
    "Aggregation",
    "LossOutput",
    "LossPreset",
    "Maximum",
    "Metric",
    "Metrics",
    "add_metrics",
    "chunked_logprobs",
    "clipped_loss",
    "collate",
    "decode_metrics",
    "effective_sample_size",
    "empty_micro_batch",
    "encode_metrics",
    "global_counts",
    "grpo_loss",
    "metric_values",
    "ratio_metrics",
    "reference_kl",
    "reinforce_loss",
    "staleness_metrics",
    "token_weights",
]
