"""Metrics that stay exact when they are combined over micro-batches and ranks, and the result of a loss.

A mean is stored as a numerator and a denominator, each of which is summed, so no mean of means is taken.

Shape suffixes: T packed tokens, N targets (tokens with a true loss mask).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from inflight.losses.targets import Targets

_MAX_LOG_RATIO = 300.0
"""Bound on the log ratios that metrics exponentiate, so that even a sum of 1e40 squares is finite in float64. Losses do
not use it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A weighted mean as a numerator and a denominator; it is reduced by adding both."""

    sum: float
    weight: float

    @property
    def value(self) -> float:
        """The mean; NaN if the weight is 0."""
        return self.sum / self.weight if self.weight else math.nan


@dataclass(frozen=True, slots=True)
class Maximum:
    """The largest value seen; it is reduced by taking the larger one. NaN takes precedence."""

    value: float


Metrics = Mapping[str, Metric | Maximum]
"""The metrics of a micro-batch by name, which `add_metrics` adds up over micro-batches and ranks."""

WeightKind = Literal["ratio", "pull", "sequence_ratio", "sequence_pull"]

_SAMPLE_SIZES: Mapping[WeightKind, str] = {
    "ratio": "effective_sample_size",
    "pull": "effective_sample_size_used",
    "sequence_ratio": "effective_sample_size_sequences",
    "sequence_pull": "effective_sample_size_sequences_used",
}


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A term of the loss, and its metrics.

    ``loss`` is a differentiable scalar. Terms of micro-batches and ranks add up to the loss of the optimizer step.
    """

    loss: torch.Tensor
    metrics: Metrics


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Return the combined metrics of both parts. A metric may be missing from one part."""
    return {**a, **b, **{name: _add(a[name], b[name]) for name in a if name in b}}


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Return the values to log, with ``effective_sample_size`` if there are ratios. Call this after the reduction.

    A metric with a weight of 0, for which no token was counted, is omitted.
    """
    values = {name: m.value for name, m in metrics.items() if not (isinstance(m, Metric) and m.weight == 0)}
    for kind, name in _SAMPLE_SIZES.items():
        if values.get(f"{kind}_squared", 0.0) > 0:
            values[name] = effective_sample_size(metrics, kind)
    return values


def effective_sample_size(metrics: Metrics, kind: WeightKind = "ratio") -> float:
    """Return (sum w)^2 / (n sum w^2) of n weights w: 1 if all are equal, 1/n if one dwarfs the rest.

    ``ratio`` uses the raw ratios of tokens; with a tight cap, truncated ratios would give 1 at any staleness. ``pull``
    uses the weights that tokens have in the gradient after truncation, clipping and rejection. ``sequence_ratio`` uses
    the raw ratios of whole sequences, and ``sequence_pull`` the mean pull of each sequence's tokens.
    """
    return metrics[kind].value ** 2 / metrics[f"{kind}_squared"].value


def encode_metrics(metrics: Metrics) -> dict[str, list[float]]:
    """Return the metrics as JSON values: ``[sum, weight]`` for a mean, ``[value]`` for a maximum."""
    return {name: [m.sum, m.weight] if isinstance(m, Metric) else [m.value] for name, m in metrics.items()}


def decode_metrics(encoded: Mapping[str, Sequence[float]]) -> Metrics:
    """Return the metrics from the result of `encode_metrics`."""
    return {name: Metric(*numbers) if len(numbers) == 2 else Maximum(*numbers) for name, numbers in encoded.items()}


@torch.no_grad()
def ratio_metrics(trainer_logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor) -> Metrics:
    """Return metrics of the raw ratios w = exp(trainer - behaviour) of the targets, in float64.

    ``ratio`` and ``ratio_squared`` are the means of w and w^2 (see `effective_sample_size`); ``max_abs_log_ratio`` is
    the largest abs(log w). ``behaviour_kl_k1`` and ``behaviour_kl_k3`` estimate KL(behaviour || trainer) in nats per
    token, by the means of -log w and of w - 1 - log w (http://joschu.net/blog/kl-approx.html). Log ratios are clamped
    to +-300 for all metrics except the maximum.
    """
    raw_N = trainer_logprobs_N.double() - behaviour_logprobs_N.double()
    log_ratio_N = raw_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    k3_N = log_ratio_N.expm1() - log_ratio_N
    means = {
        "ratio": ratio_N,
        "ratio_squared": ratio_N.square(),
        "behaviour_kl_k1": -log_ratio_N,
        "behaviour_kl_k3": k3_N,
    }
    return {**mean_metrics(means), "max_abs_log_ratio": _maximum(raw_N.abs())}


@torch.no_grad()
def staleness_metrics(
    trainer_logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor, lag_N: torch.Tensor
) -> dict[str, Metric | Maximum]:
    """Return metrics of the age of the targets in versions, and of the mismatch of those at lag 0.

    ``lag`` and ``max_lag`` are the mean and the largest lag. ``mismatch_k1`` and ``mismatch_k3`` estimate KL(behaviour
    || trainer) as in `ratio_metrics`, but only over targets at lag 0: they measure the difference in numerics, without
    staleness. ``stale_k1`` and ``stale_k3`` cover the other targets.
    """
    parts = {"mismatch": (lag_N == 0).nonzero().squeeze(1), "stale": (lag_N != 0).nonzero().squeeze(1)}
    kl = {
        name: ratio_metrics(trainer_logprobs_N.index_select(0, rows), behaviour_logprobs_N.index_select(0, rows))
        for name, rows in parts.items()
    }
    return {
        **mean_metrics({"lag": lag_N}),
        "max_lag": _maximum(lag_N.double()),
        **{f"{name}_{k}": kl[name][f"behaviour_kl_{k}"] for name in parts for k in ("k1", "k3")},
    }


@torch.no_grad()
def pull_metrics(targets: Targets, pull_N: torch.Tensor) -> dict[str, Metric | Maximum]:
    """Return `ratio_metrics`, and metrics of the weights in the gradient and of the sequences that have a target.

    ``pull`` is the mean of the weights that targets have in the gradient, apart from advantage and denominator.
    ``sequence_pull`` is the mean of each sequence's mean pull, and ``sequence_ratio`` that of exp(sum of log ratios)
    over sequences, with the sum clamped to +-300. For each, ``NAME_squared`` is the mean of the squares.
    """
    counts_S = targets.segment_sum(torch.ones_like(targets.behaviour_N))
    with_targets = counts_S.nonzero().squeeze(1)
    log_ratio_S = targets.segment_sum(targets.log_ratio("trainer/behaviour")).index_select(0, with_targets)
    weights = {
        "pull": pull_N,
        "sequence_pull": targets.segment_mean(pull_N).index_select(0, with_targets),
        "sequence_ratio": log_ratio_S.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp(),
    }
    powers = [{name: weight, f"{name}_squared": weight.square()} for name, weight in weights.items()]
    means = mean_metrics({name: value for pair in powers for name, value in pair.items()})
    return {**ratio_metrics(targets.trainer_N, targets.behaviour_N), **means}


def mean_metrics(values: Mapping[str, torch.Tensor]) -> dict[str, Metric | Maximum]:
    """Return the mean of each tensor, with weight 1 for each element, in a single transfer from the device."""
    if not values:
        return {}
    sums = torch.stack([value_N.double().sum() for value_N in values.values()]).tolist()
    return {name: Metric(s, value_N.numel()) for s, (name, value_N) in zip(sums, values.items(), strict=True)}


def _maximum(values_N: torch.Tensor) -> Maximum:
    return Maximum(values_N.max().item() if values_N.numel() else 0.0)


def _add(a: Metric | Maximum, b: Metric | Maximum) -> Metric | Maximum:
    if isinstance(a, Metric) and isinstance(b, Metric):
        return Metric(a.sum + b.sum, a.weight + b.weight)
    if isinstance(a, Maximum) and isinstance(b, Maximum):
        return b if math.isnan(b.value) or b.value > a.value else a
    raise TypeError(f"{a} and {b} cannot be added: they are reduced in different ways")
