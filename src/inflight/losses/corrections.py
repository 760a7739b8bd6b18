"""Corrections: weights and rejections for tokens that another policy sampled than the one that is trained.

A correction multiplies the policy term of a target by a weight, or rejects the target: loss and gradient of its policy
term are 0 then. None carries a gradient. Penalties are not corrected. The module knows nothing of gates.

Shape suffixes: N targets, S segments.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from inflight.errors import InvalidRequestError
from inflight.losses.pieces import Piece
from inflight.losses.targets import Between, Level, Targets

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a float64 tensor on the CPU over all ranks that share an optimizer step; every rank calls it alike."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """What a correction says of each target; None where it says nothing."""

    weight_N: torch.Tensor | None = None
    keep_N: torch.Tensor | None = None


class Truncate(Piece):
    """Weight min(max(w, low), high): truncated importance sampling (TIS), or plain importance sampling without bounds.

    w is a ratio at a level, by default of the proximal to the behaviour policy: with the gate's ratio of trainer to
    proximal that is decoupled PPO (AReaL, arXiv 2505.24298, eq. 5).
    """

    kind: Literal["truncate"] = "truncate"
    level: Level = "token"
    between: Between = "proximal/behaviour"
    low: float = Field(default=0.0, ge=0)
    high: float | None = Field(default=None, ge=0)

    def __call__(self, targets: Targets, threshold: float | None) -> Corrected:
        """Return the weight of each target."""
        ratio_N = targets.at_level(targets.log_ratio(self.between).detach(), self.level).exp()
        return Corrected(weight_N=ratio_N.clamp(self.low, self.high))


class Band(Piece):
    """Rejects targets whose ratio lies outside [low, high] (IcePop, Ring-1T, arXiv 2510.18855), or whole segments.

    ``level`` makes the ratio that of a segment (geometric mean or product); ``whole_segments`` rejects every target of
    a segment that has one outside.
    """

    kind: Literal["band"] = "band"
    level: Level = "token"
    between: Between = "proximal/behaviour"
    low: float = Field(default=0.0, ge=0)
    high: float | None = Field(default=None, ge=0)
    whole_segments: bool = False

    def __call__(self, targets: Targets, threshold: float | None) -> Corrected:
        """Return which targets are kept."""
        ratio_N = targets.at_level(targets.log_ratio(self.between).detach(), self.level).exp()
        keep_N = ratio_N >= self.low
        if self.high is not None:
            keep_N &= ratio_N <= self.high
        if self.whole_segments:
            keep_N = (targets.segment_sum((~keep_N).double()) == 0)[targets.segments_N]
        return Corrected(keep_N=keep_N)


class TrustTv(Piece):
    """Rejects targets whose probability has moved too far already (DPPO-TV, arXiv 2602.04879).

    With pi of the trainer and mu of the behaviour policy, rejected are A > 0 with pi - mu > ``high``, and A < 0 with
    mu - pi > ``low``. Without ``by_sign``, both bounds hold whatever the advantage (prime-rl's IPO).
    """

    kind: Literal["trust_tv"] = "trust_tv"
    low: float = Field(default=0.2, ge=0)
    high: float = Field(default=0.2, ge=0)
    by_sign: bool = True

    def __call__(self, targets: Targets, threshold: float | None) -> Corrected:
        """Return which targets are kept."""
        change_N = targets.trainer_N.detach().exp() - targets.behaviour_N.exp()
        too_high_N, too_low_N = change_N > self.high, change_N < -self.low
        if self.by_sign:
            too_high_N, too_low_N = too_high_N & (targets.advantages_N > 0), too_low_N & (targets.advantages_N < 0)
        return Corrected(keep_N=~(too_high_N | too_low_N))


class TrustKl(Piece):
    """Rejects targets that move on in the direction of their advantage beyond a bound of KL (DPPO-KL, 2602.04879).

    The KL is that of two coins, mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), in nats; rejected are targets
    above ``bound`` with A > 0 and pi > mu, or A < 0 and pi < mu.
    """

    kind: Literal["trust_kl"] = "trust_kl"
    bound: float = Field(default=0.05, ge=0)

    def __call__(self, targets: Targets, threshold: float | None) -> Corrected:
        """Return which targets are kept."""
        pi_N, mu_N = targets.trainer_N.detach().exp(), targets.behaviour_N.exp()
        rest_N = torch.special.xlogy(1 - mu_N, 1 - mu_N) - torch.special.xlogy(1 - mu_N, (1 - pi_N).clamp(min=0))
        kl_N = mu_N * (targets.behaviour_N - targets.trainer_N.detach()) + rest_N
        onwards_N = (targets.advantages_N * (pi_N - mu_N)) > 0
        return Corrected(keep_N=~(onwards_N & (kl_N > self.bound)))


class Opsm(Piece):
    """Rejects segments of negative advantage that have drifted away (off-policy sequence masking, DeepSeek-V3.2).

    Rejected are targets with A < 0 in segments whose mean of log mu - log pi exceeds ``bound`` (arXiv 2512.02556).
    """

    kind: Literal["opsm"] = "opsm"
    bound: float = Field(ge=0)
    between: Literal["trainer/behaviour", "trainer/proximal"] = "trainer/behaviour"

    def __call__(self, targets: Targets, threshold: float | None) -> Corrected:
        """Return which targets are kept."""
        drift_S = -targets.segment_mean(targets.log_ratio(self.between).detach())
        return Corrected(keep_N=~((targets.advantages_N < 0) & (drift_S > self.bound)[targets.segments_N]))


class SecondMoment(Piece):
    """Rejects the targets of largest squared log ratio until the mean of the rest is at most ``bound`` (M2PO,
    arXiv 2510.01161).

    The mean is over all targets of the optimizer step; which square is the largest that stays is a statistic of
    `prepare`. Targets of equal squares stay or go together.
    """

    kind: Literal["second_moment"] = "second_moment"
    bound: float = Field(default=0.04, ge=0)
    between: Between = "proximal/behaviour"

    def squares(self, targets: Targets) -> torch.Tensor:
        """Return the squared log ratio of each target."""
        return targets.log_ratio(self.between).detach().square()

    def __call__(self, targets: Targets, threshold: float | None) -> Corrected:
        """Return which targets are kept."""
        assert threshold is not None
        return Corrected(keep_N=self.squares(targets) <= threshold)


class MaxAge(Piece):
    """Rejects targets that were sampled more than ``versions`` weight versions ago."""

    kind: Literal["max_age"] = "max_age"
    versions: int = Field(ge=0)

    def __call__(self, targets: Targets, threshold: float | None) -> Corrected:
        """Return which targets are kept."""
        if targets.lag_N is None:
            raise InvalidRequestError("max_age needs the versions of the targets: give prepare the current_version")
        return Corrected(keep_N=targets.lag_N <= self.versions)


Correction = Annotated[Truncate | Band | TrustTv | TrustKl | Opsm | SecondMoment | MaxAge, Field(discriminator="kind")]


def depends_on_trainer(correction: Correction) -> bool:
    """Return whether the correction changes with the weights that are trained, and not only with the step's data."""
    if isinstance(correction, (TrustTv, TrustKl, Opsm)):
        return True
    return not isinstance(correction, MaxAge) and correction.between.startswith("trainer")


def couples_segments(correction: Correction) -> bool:
    """Return whether what becomes of a target depends on the trainer logprobs of others."""
    if isinstance(correction, Opsm):
        return True
    if isinstance(correction, (Truncate, Band)) and depends_on_trainer(correction):
        return correction.level != "token" or getattr(correction, "whole_segments", False)
    return False


def second_moment_threshold(correction: SecondMoment, step: Sequence[Targets], add: Reduce) -> float:
    """Return a threshold up to which squares may stay so that the mean of all of those is within the bound.

    The mean grows with the threshold, so halving the range of floats finds the largest one with sums over ranks alone.
    It lies half-way between the largest square that stays and the smallest that goes: squares that are computed once
    more, with another rounding, fall on the same side.
    """
    squares = torch.cat([torch.zeros(0, dtype=torch.float64), *(correction.squares(targets).cpu() for targets in step)])

    def count_and_total(bits: int) -> list[float]:
        below = squares[squares <= _float_of(bits)]
        counted: list[float] = add(torch.tensor([float(len(below)), float(below.sum())], dtype=torch.float64)).tolist()
        return counted

    low, high = 0, _bits_of(float("inf"))
    while low < high:
        middle = (low + high + 1) // 2
        count, total = count_and_total(middle)
        if total <= correction.bound * count:
            low = middle
        else:
            high = middle - 1
    largest, (num_kept, _) = low, count_and_total(low)
    low = 0
    while low < high:
        middle = (low + high) // 2
        if count_and_total(middle)[0] == num_kept:
            high = middle
        else:
            low = middle + 1
    return (_float_of(low) + _float_of(largest)) / 2


def _bits_of(number: float) -> int:
    """Return the bits of a float as an integer, which grows with floats of at least 0."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float_of(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
