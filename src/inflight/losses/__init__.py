"""Policy losses as pure functions, presets, additive metrics, and the chunked log-probability head.

A `PolicyLoss` consists of pieces: a ratio at a level, a gate, corrections, penalties, and an aggregation, which is the
only piece with denominators. The loss is a plain sum over the targets of packed micro-batches. Its weights come from
counts that `prepare` makes over the whole optimizer step, so any split into micro-batches and ranks gives the same
gradient. The package does not depend on models, workers or rollouts.
"""

from inflight.losses.aggregation import (
    Aggregation,
    Budget,
    Constant,
    Counts,
    PromptMean,
    SegmentMean,
    SegmentSum,
    Sum,
    TokenMean,
)
from inflight.losses.corrections import Band, Correction, MaxAge, Opsm, SecondMoment, Truncate, TrustKl, TrustTv
from inflight.losses.distillation import Distillation
from inflight.losses.gates import Gate, GeometricMean, PositiveUnclipped, PpoClip, Sapo, Score, Vespo
from inflight.losses.head import chunked_logprobs, chunked_logprobs_and_entropy, one_pass
from inflight.losses.head_arguments import KeptTokens
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
from inflight.losses.penalties import CrossEntropy, Entropy, Kl, Penalty, SquaredLogRatio, TeacherKl
from inflight.losses.plain import grpo_loss, reinforce_loss
from inflight.losses.policy import LossPlan, PolicyLoss
from inflight.losses.preparing import prepare
from inflight.losses.presets import PRESETS, Preset, preset

__all__ = [
    "PRESETS",
    "Aggregation",
    "Band",
    "Budget",
    "Constant",
    "Correction",
    "Counts",
    "CrossEntropy",
    "Distillation",
    "Entropy",
    "Gate",
    "GeometricMean",
    "KeptTokens",
    "Kl",
    "LossOutput",
    "LossPlan",
    "MaxAge",
    "Maximum",
    "Metric",
    "Metrics",
    "Opsm",
    "Penalty",
    "PolicyLoss",
    "PositiveUnclipped",
    "PpoClip",
    "Preset",
    "PromptMean",
    "Sapo",
    "Score",
    "SecondMoment",
    "SegmentMean",
    "SegmentSum",
    "SquaredLogRatio",
    "Sum",
    "TeacherKl",
    "TokenMean",
    "Truncate",
    "TrustKl",
    "TrustTv",
    "Vespo",
    "add_metrics",
    "chunked_logprobs",
    "chunked_logprobs_and_entropy",
    "collate",
    "decode_metrics",
    "effective_sample_size",
    "empty_micro_batch",
    "encode_metrics",
    "grpo_loss",
    "metric_values",
    "one_pass",
    "prepare",
    "preset",
    "ratio_metrics",
    "reinforce_loss",
    "staleness_metrics",
]
