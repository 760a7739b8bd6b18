"""Statistics of the differences between two sides' logprobs of the same tokens.

Shape suffixes: N targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inflight.losses.metrics import metric_values, ratio_metrics


@dataclass(frozen=True, slots=True)
class Figures:
    """Statistics of the differences between trainer and behaviour logprobs of some tokens, in nats."""

    num_tokens: int
    k1: float
    """Estimate of KL(behaviour || trainer) per token (see `inflight.losses.metrics.ratio_metrics`)."""
    k3: float
    """Another estimate of the same KL, which is never negative."""
    ess: float
    """Effective sample size of the importance ratios, as a share between 0 and 1."""
    largest: float
    """Maximum absolute difference."""
    mean: float
    """Mean absolute difference."""

    def agree(self, tolerance: float) -> bool:
        """Return whether the two sides count as equal, given that one logprob may differ by ``tolerance``."""
        return self.largest <= tolerance and self.k3 <= tolerance**2 and self.ess >= 1 - tolerance


@dataclass(frozen=True, slots=True)
class Limits:
    """The figures above which a pair counts as different, for the dtype that the endpoint computes in.

    In float32, logprobs differ by 1e-6 nats (with the same kernels) to 1e-4 nats on average. In 16 bits, single tokens
    of healthy pairs differ by up to 0.7 nats, so only the mean and k3 are judged. A fault exceeds a healthy baseline
    tenfold.
    """

    mean: float
    k3: float

    @classmethod
    def of(cls, dtype: str, *baselines: Figures) -> Limits:
        """Return the limits of a dtype.

        If the smallest baseline is within the limits, the limits are raised to at least ten times that baseline.
        """
        limits = cls(0.02, 1e-3) if dtype in ("bfloat16", "float16") else cls(2e-4, 1e-6)
        if not baselines or limits.exceeded_by(least := min(baselines, key=lambda it: it.mean)):
            return limits
        return cls(max(limits.mean, 10 * least.mean), max(limits.k3, 10 * least.k3))

    def exceeded_by(self, figures: Figures) -> bool:
        """Return whether these figures exceed a limit, so that the two sides count as different."""
        return not (figures.mean <= self.mean and figures.k3 <= self.k3)


def figures_of(trainer_N: torch.Tensor, behaviour_N: torch.Tensor) -> Figures:
    """Return the statistics of two sides' logprobs of the same tokens."""
    values = metric_values(ratio_metrics(trainer_N, behaviour_N))
    return Figures(
        num_tokens=len(trainer_N),
        k1=values["behaviour_kl_k1"],
        k3=values["behaviour_kl_k3"],
        ess=values["effective_sample_size"],
        largest=values["max_abs_log_ratio"],
        mean=mean_difference(trainer_N, behaviour_N),
    )


def mean_difference(a_N: torch.Tensor, b_N: torch.Tensor) -> float:
    """Return the mean absolute difference."""
    return float((a_N.double() - b_N.double()).abs().mean())
