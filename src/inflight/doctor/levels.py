"""Statistics of the differences between trainer and behaviour logprobs, and the levels by which parts of a run are
compared.

A level is the trimmed mean of absolute differences in nats, which a few huge differences do not affect. Shape suffix: N
tokens at lag 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from inflight.doctor.records import Floats, Integers, Observations

MIN_TOKENS = 300
"""No conclusion is drawn from fewer tokens than this."""
WARNING, FAULT = 3.0, 10.0
"""How many times as large as its baseline a level must be to count as a warning, and as a fault."""
_TRIMMED = 0.05
_MAX_BINS = 24
CERTAIN = -0.05
"""Tokens with a higher logprob differ little, whatever the fault."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The figures that a healthy run does not exceed, in the dtype of its computation."""

    mean: float
    """Limit of the mean absolute difference, in nats."""
    k3: float
    effective_sample_size: float
    """Lower limit of the effective sample size."""
    floor: float
    """The level below which a difference counts as rounding, regardless of the baseline."""
    huge: float
    """A single token with at least this absolute difference counts as an outlier."""

    @classmethod
    def of(cls, dtype: str) -> Limits:
        return cls(1e-3, 1e-5, 0.999, 3e-5, 0.1) if dtype == "float32" else cls(0.02, 1e-3, 0.99, 5e-3, 1.0)

    def exceeded_by(self, figures: Figures) -> bool:
        """Return whether the figures exceed a limit; the largest difference is not judged."""
        return not (
            figures.mean <= self.mean
            and figures.k3 <= self.k3
            and figures.effective_sample_size >= self.effective_sample_size
        )

    def times(self, level: float, baseline: float) -> float:
        """Return the ratio of a level to its baseline. For levels below ``floor``, it never reaches `WARNING`."""
        return level / max(baseline, self.floor / WARNING)


@dataclass(frozen=True, slots=True)
class Figures:
    """Differences of some tokens: d is the trainer logprob minus the behaviour logprob, in nats."""

    num_tokens: int
    mean: float
    """Mean of abs(d)."""
    trimmed: float
    """Mean of abs(d) without the largest 5 %."""
    signed: float
    """Mean of d."""
    k3: float
    """Mean of exp(d) - 1 - d, an estimate of KL(behaviour || trainer)."""
    k3_reverse: float
    """Mean of exp(-d) - 1 + d."""
    effective_sample_size: float
    """Effective sample size of the weights exp(d), as a share of the tokens."""
    largest: float


class Bin(NamedTuple):
    """One version, or several consecutive versions."""

    first: int
    last: int
    num_tokens: int
    level: float

    def __str__(self) -> str:
        return f"version {self.first}" if self.first == self.last else f"versions {self.first} to {self.last}"


def figures_of(difference_N: Floats) -> Figures:
    """Return the figures of differences in nats, [N] with N > 0. Arguments of exp are clamped to +-300."""
    size_N, clamped_N = np.abs(difference_N), np.clip(difference_N, -300, 300)
    weight_N = np.exp(clamped_N)
    return Figures(
        num_tokens=len(difference_N),
        mean=float(size_N.mean()),
        trimmed=level_of(difference_N),
        signed=float(difference_N.mean()),
        k3=float((np.expm1(clamped_N) - clamped_N).mean()),
        k3_reverse=float((np.expm1(-clamped_N) + clamped_N).mean()),
        effective_sample_size=float(weight_N.mean() ** 2 / np.square(weight_N).mean()),
        largest=float(size_N.max()),
    )


def level_of(difference_N: Floats) -> float:
    """Return the mean of the absolute differences without the largest 5 %, in nats; [N] with N > 0."""
    size_N = np.sort(np.abs(difference_N))
    return float(size_N[: len(size_N) - int(_TRIMMED * len(size_N))].mean())


def levels_apart(seen: Observations, label_N: Integers, *, same_versions: bool = True) -> dict[int, float] | None:
    """Return the level of each label that has enough tokens, or None if fewer than two labels do.

    Tokens with negative labels are omitted. If ``same_versions`` is set, only the versions that all these labels have
    are compared. A level is then the mean of the label's levels in these versions, with the same weights for every
    label, so that it does not depend on when a label was seen. The result is None if a label has too few tokens in
    these versions.
    """
    is_informative = seen.behaviour_N < CERTAIN
    if all((label_N == it)[is_informative].sum() >= MIN_TOKENS for it in np.unique(label_N[label_N >= 0])):
        seen, label_N = seen.select(is_informative), label_N[is_informative]
    labels = [int(it) for it in np.unique(label_N) if it >= 0 and (label_N == it).sum() >= MIN_TOKENS]
    if len(labels) < 2:
        return None
    if not same_versions:
        return {it: level_of(seen.difference_N[label_N == it]) for it in labels}
    shared = set.intersection(*({*seen.version_N[label_N == it].tolist()} for it in labels))
    rows = np.isin(seen.version_N, [*shared]) & np.isin(label_N, labels)
    seen, label_N = seen.select(rows), label_N[rows]
    if min((label_N == it).sum() for it in labels) < MIN_TOKENS:
        return None
    weights = {it.first: it.num_tokens for it in levels_by_version(seen)}
    return {
        label: sum(weights[it.first] * it.level for it in levels_by_version(seen.select(label_N == label))) / len(seen)
        for label in labels
    }


def informative(seen: Observations) -> Observations:
    """Return the tokens that were not nearly certain, or all tokens if those are too few."""
    is_informative = seen.behaviour_N < CERTAIN
    return seen.select(is_informative) if is_informative.sum() >= MIN_TOKENS else seen


def levels_by_version(seen: Observations) -> list[Bin]:
    """Return the level of each version, in order."""
    versions, starts = np.unique(seen.version_N[order := np.argsort(seen.version_N, kind="stable")], return_index=True)
    parts = np.split(seen.difference_N[order], starts[1:])
    return [Bin(int(it), int(it), len(part), level_of(part)) for it, part in zip(versions, parts, strict=True)]


def merge_versions(versions: Sequence[Bin]) -> list[Bin]:
    """Merge consecutive versions until each bin has enough tokens. Version 0 is merged only if it has too few."""
    least = max(MIN_TOKENS, sum(it.num_tokens for it in versions) // _MAX_BINS)
    bins: list[Bin] = []
    pending: list[Bin] = []
    for one in versions:
        pending.append(one)
        num_tokens = sum(it.num_tokens for it in pending)
        if num_tokens >= least or (one.last == 0 and num_tokens >= MIN_TOKENS):
            bins.append(pool_bins(pending))
            pending = []
    if pending and len(bins) > 1:
        bins[-1] = pool_bins([bins[-1], *pending])
    elif pending and not bins:
        bins = [pool_bins(pending)]
    return bins


def pool_bins(bins: Sequence[Bin]) -> Bin:
    """Return one bin in place of consecutive ones; its level is the mean of their levels, weighted by tokens."""
    total = sum(it.num_tokens for it in bins)
    return Bin(bins[0].first, bins[-1].last, total, sum(it.level * it.num_tokens for it in bins) / total)


def rank_correlation(a_N: Floats | Integers, b_N: Floats | Integers) -> float:
    """Return Spearman's rank correlation; tied values get their mean rank."""
    ranks = []
    for values in (a_N, b_N):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - counts / 2)[inverse])
    x, y = (it - it.mean() for it in ranks)
    return float((x * y).sum() / max(float(np.sqrt((x * x).sum() * (y * y).sum())), 1e-12))
