"""Corrections: weights and rejections for tokens that were sampled by a policy other than the trained one.

A correction multiplies the policy term of a target by a weight, or rejects the target, so that the loss and gradient of
its policy term are 0. A call returns either the weights or booleans that indicate which targets are kept, without a
gradient. Penalties are not corrected.

Shape suffixes: N targets, S segments.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field

from inflight.errors import InvalidRequestError
from inflight.losses.pieces import Piece
from inflight.losses.targets import Between, Level, Targets

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a float64 tensor on the CPU over all ranks that share an optimizer step; every rank makes the same calls."""


class Truncate(Piece):
    """Weight min(max(w, low), high): truncated importance sampling (TIS), or plain importance sampling without bounds.

    w is a ratio at a level, by default that of the proximal to the behaviour policy. If the gate then uses the ratio of
    the trainer to the proximal policy, this is decoupled PPO (AReaL, arXiv 2505.24298, eq. 5).
    """

    kind: Literal["truncate"] = "truncate"
    level: Level = "token"
    between: Between = "proximal/behaviour"
    low: float = Field(default=0.0, ge=0)
    high: float | None = Field(default=None, ge=0)

    def __call__(self, targets: Targets, threshold: float | None) -> torch.Tensor:
        ratio_N = targets.at_level(targets.log_ratio(self.between).detach(), self.level).exp()
        return ratio_N.clamp(self.low, self.high)


class Band(Piece):
    """Rejects targets, or whole segments, with a ratio outside [low, high] (IcePop, Ring-1T, arXiv 2510.18855).

    A segment ``level`` uses the ratio of a segment (geometric mean or product). ``whole_segments`` rejects all targets
    of a segment if the ratio of one of them is outside.
    """

    kind: Literal["band"] = "band"
    level: Level = "token"
    between: Between = "proximal/behaviour"
    low: float = Field(default=0.0, ge=0)
    high: float | None = Field(default=None, ge=0)
    whole_segments: bool = False

    def __call__(self, targets: Targets, threshold: float | None) -> torch.Tensor:
        ratio_N = targets.at_level(targets.log_ratio(self.between).detach(), self.level).exp()
        keep_N = ratio_N >= self.low
        if self.high is not None:
            keep_N &= ratio_N <= self.high
        if self.whole_segments:
            keep_N = (targets.segment_sum((~keep_N).double()) == 0)[targets.segments_N]
        return keep_N


class TrustTv(Piece):
    """Rejects targets whose probability has already moved too far (DPPO-TV, arXiv 2602.04879).

    pi is the trainer's probability and mu the behaviour policy's. Rejects targets with A > 0 and pi - mu > ``high``,
    and targets with A < 0 and mu - pi > ``low``. Without ``by_sign``, both bounds apply whatever the advantage
    (prime-rl's IPO).
    """

    kind: Literal["trust_tv"] = "trust_tv"
    low: float = Field(default=0.2, ge=0)
    high: float = Field(default=0.2, ge=0)
    by_sign: bool = True

    def __call__(self, targets: Targets, threshold: float | None) -> torch.Tensor:
        change_N = targets.trainer_N.detach().exp() - targets.behaviour_N.exp()
        too_high_N, too_low_N = change_N > self.high, change_N < -self.low
        if self.by_sign:
            too_high_N, too_low_N = too_high_N & (targets.advantages_N > 0), too_low_N & (targets.advantages_N < 0)
        return ~(too_high_N | too_low_N)


class TrustKl(Piece):
    """Rejects targets that have moved beyond a KL bound in the direction of their advantage (DPPO-KL, 2602.04879).

    The KL is between Bernoulli distributions, mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), in nats. Targets
    above ``bound`` are rejected if A > 0 and pi > mu, or A < 0 and pi < mu.
    """

    kind: Literal["trust_kl"] = "trust_kl"
    bound: float = Field(default=0.05, ge=0)

    def __call__(self, targets: Targets, threshold: float | None) -> torch.Tensor:
        pi_N, mu_N = targets.trainer_N.detach().exp(), targets.behaviour_N.exp()
        rest_N = torch.special.xlogy(1 - mu_N, 1 - mu_N) - torch.special.xlogy(1 - mu_N, (1 - pi_N).clamp(min=0))
        kl_N: torch.Tensor = mu_N * (targets.behaviour_N - targets.trainer_N.detach()) + rest_N
        onwards_N = (targets.advantages_N * (pi_N - mu_N)) > 0
        return ~(onwards_N & (kl_N > self.bound))


class Opsm(Piece):
    """Rejects segments with negative advantages that have drifted away (off-policy sequence masking, DeepSeek-V3.2).

    Targets with A < 0 are rejected in segments whose mean of log mu - log pi exceeds ``bound`` (arXiv 2512.02556).
    """

    kind: Literal["opsm"] = "opsm"
    bound: float = Field(ge=0)
    between: Literal["trainer/behaviour", "trainer/proximal"] = "trainer/behaviour"

    def __call__(self, targets: Targets, threshold: float | None) -> torch.Tensor:
        drift_S = -targets.segment_mean(targets.log_ratio(self.between).detach())
        return ~((targets.advantages_N < 0) & (drift_S > self.bound)[targets.segments_N])


class SecondMoment(Piece):
    """Rejects the largest squared log ratios until the mean of the rest is at most ``bound`` (M2PO, arXiv 2510.01161).

    The mean is over all targets of the optimizer step, so `prepare` computes the largest square that is kept. Targets
    with equal squares are kept or rejected together.
    """

    kind: Literal["second_moment"] = "second_moment"
    bound: float = Field(default=0.04, ge=0)
    between: Between = "proximal/behaviour"

    def squares(self, targets: Targets) -> torch.Tensor:
        """Return the squared log ratio of each target."""
        return targets.log_ratio(self.between).detach().square()

    def __call__(self, targets: Targets, threshold: float | None) -> torch.Tensor:
        assert threshold is not None
        return self.squares(targets) <= threshold


class MaxAge(Piece):
    """Rejects targets that were sampled more than ``versions`` weight versions ago."""

    kind: Literal["max_age"] = "max_age"
    versions: int = Field(ge=0)

    def __call__(self, targets: Targets, threshold: float | None) -> torch.Tensor:
        if targets.lag_N is None:
            raise InvalidRequestError("max_age needs the versions of the targets: pass current_version to prepare")
        return targets.lag_N <= self.versions


Correction = Annotated[Truncate | Band | TrustTv | TrustKl | Opsm | SecondMoment | MaxAge, Field(discriminator="kind")]
"""A weight or a mask for targets that corrects for the policy that sampled them."""


def depends_on_trainer(correction: Correction) -> bool:
    """Return whether the correction depends on the trained weights, and not only on the step's data."""
    if isinstance(correction, (TrustTv, TrustKl, Opsm)):
        return True
    return not isinstance(correction, MaxAge) and correction.between.startswith("trainer")


def couples_segments(correction: Correction) -> bool:
    """Return whether the correction of a target depends on the trainer logprobs of other targets."""
    if isinstance(correction, Opsm):
        return True
    if isinstance(correction, (Truncate, Band)) and depends_on_trainer(correction):
        return correction.level != "token" or getattr(correction, "whole_segments", False)
    return False


def second_moment_threshold(correction: SecondMoment, step: Sequence[Targets], add: Reduce) -> float:
    """Return the largest threshold such that the squares up to it have a mean within the bound.

    The mean grows with the threshold, so bisection over floats finds the threshold using only sums over ranks. It lies
    halfway between the largest square kept and the smallest rejected, so that squares that are recomputed with
    different rounding fall on the same side.
    """
    squares = torch.cat([torch.zeros(0, dtype=torch.float64), *(correction.squares(targets).cpu() for targets in step)])

    def count_and_total(bits: int) -> list[float]:
        below = squares[squares <= _float_of(bits)]
        counted: list[float] = add(torch.tensor([float(len(below)), float(below.sum())], dtype=torch.float64)).tolist()
        return counted

    def is_beyond(bits: int) -> bool:
        count, total = count_and_total(bits)
        return total > correction.bound * count

    largest = bisect_left(range(1, _bits_of(float("inf")) + 1), True, key=is_beyond)
    num_kept = count_and_total(largest)[0]
    smallest = bisect_left(range(largest), num_kept, key=lambda bits: count_and_total(bits)[0])
    return (_float_of(smallest) + _float_of(largest)) / 2


def _bits_of(number: float) -> int:
    """Return the bits of a nonnegative float as an integer, which increases with the float."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float_of(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
