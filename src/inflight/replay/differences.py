"""Compares a replay with its record: metrics, logprobs and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from inflight.losses import Metrics, add_metrics, decode_metrics, metric_values
from inflight.model.checkpoints import stored_tensors
from inflight.observe.trace.steps import RecordedStep, StepOutcome

ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}
"""Maximum differences that a different order of summation can explain, by dtype of the computation: relative for a
gradient norm, absolute for a logprob. Float32 has 24 bits of precision and bfloat16 has 8; a forward and backward pass
lose about 10 and 4 of them, respectively."""


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Differences between the recorded and replayed trainer logprobs of one step's targets, in nats."""

    num_targets: int
    largest: float
    mean: float
    num_equal: int
    """Number of targets whose logprobs are bit-equal."""


@dataclass(frozen=True, slots=True)
class StepDifference:
    """One step, as recorded and as replayed."""

    version: int
    """The version that the step produced."""
    gradient_norm: float
    recorded_gradient_norm: float | None
    """None if the record has no outcome of the step."""
    unequal: tuple[str, ...]
    """Names of the metrics that are not bit-equal."""
    figures: Mapping[str, tuple[float, float]]
    """Recorded and replayed values of the metrics that differ."""
    logprobs: LogprobDifference | None
    """None if the record has no trainer logprobs."""

    @property
    def is_bit_equal(self) -> bool:
        return not self.unequal and (self.logprobs is None or self.logprobs.num_equal == self.logprobs.num_targets)

    @property
    def gradient_norm_difference(self) -> float | None:
        """The difference between the gradient norms, relative to the larger one; None if no norm was recorded."""
        if self.recorded_gradient_norm is None:
            return None
        scale = max(abs(self.recorded_gradient_norm), abs(self.gradient_norm))
        return abs(self.gradient_norm - self.recorded_gradient_norm) / scale if scale else 0.0

    def exceeds(self, rounding: float) -> bool:
        """Return whether the gradient norm or the mean logprob differs by more than ``rounding``."""
        difference = self.gradient_norm_difference
        beyond = difference is not None and difference > rounding
        return beyond or (self.logprobs is not None and self.logprobs.mean > rounding)


@dataclass(frozen=True, slots=True)
class WeightDifference:
    """The difference between final weights: its L2 norm, divided by that of the change that training made, and its
    largest element.
    """

    relative: float
    largest: float


def step_difference(step: RecordedStep, outcome: StepOutcome, logprobs: Sequence[Sequence[float]]) -> StepDifference:
    """Return how a step differs from its record; ``logprobs`` are the replay's, for each sample's completion tokens."""
    recorded = step.outcome
    unequal: list[str] = []
    figures: dict[str, tuple[float, float]] = {}
    if recorded is not None:
        before, after = _figures(recorded), _figures(outcome)
        for name in sorted({*before} | {*after}):
            pair = before.get(name, float("nan")), after.get(name, float("nan"))
            if pair[0] != pair[1] and not (np.isnan(pair[0]) and np.isnan(pair[1])):
                figures[name] = pair
        unequal = [*figures]
    return StepDifference(
        version=step.version + 1,
        gradient_norm=outcome.gradient_norm,
        recorded_gradient_norm=None if recorded is None else recorded.gradient_norm,
        unequal=tuple(unequal),
        figures=figures,
        logprobs=_logprob_difference(step, logprobs),
    )


def _figures(outcome: StepOutcome) -> dict[str, float]:
    total: Metrics = {}
    for share in outcome.metrics:
        total = add_metrics(total, decode_metrics(share))
    own = {"gradient_norm": outcome.gradient_norm, "learning_rate": outcome.learning_rate}
    return {**metric_values(total), **own}


def _logprob_difference(step: RecordedStep, logprobs: Sequence[Sequence[float]]) -> LogprobDifference | None:
    if step.trainer_logprobs is None:
        return None
    masks = [np.asarray(sample.loss_mask, bool) for sample in step.samples]
    pairs = zip(step.trainer_logprobs, logprobs, masks, strict=True)
    parts = [np.abs(np.asarray(a)[mask] - np.asarray(b)[mask]) for a, b, mask in pairs]
    differences = np.concatenate(parts) if parts else np.empty(0)
    return LogprobDifference(
        num_targets=len(differences),
        largest=float(differences.max(initial=0.0)),
        mean=float(differences.mean()) if len(differences) else 0.0,
        num_equal=int((differences == 0).sum()),
    )


def weight_difference(start: Path, recorded: Path, again: Path) -> WeightDifference | None:
    """Return how two checkpoints trained from ``start`` differ, or None if their tensor names differ."""
    stored = [stored_tensors(path) for path in (start, recorded, again)]
    if not {*stored[0]} >= {*stored[1]} == {*stored[2]}:
        return None
    squared, changed, largest = 0.0, 0.0, 0.0
    for name in stored[1]:
        before, first, second = (_tensor(of[name].file, name) for of in stored)
        difference = (first - second).abs()
        squared += float(difference.square().sum())
        changed += float((first - before).square().sum())
        largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
    return WeightDifference(relative=(squared / changed) ** 0.5 if changed else float("inf"), largest=largest)


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        found: torch.Tensor = tensors.get_tensor(name)
    return found.double()
