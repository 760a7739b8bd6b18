"""Gates, which turn a log ratio and an advantage into the loss and the gradient weight of a token.

A gate is fully described by g = -d loss / d trainer logprob. Each docstring gives the loss and g. In these, w is the
ratio at the loss's level, A is the advantage, and sg stops the gradient.

Shape suffixes: N targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field

from inflight.losses.pieces import Piece
from inflight.losses.targets import Targets

_LARGEST_EXPONENT = 700.0
"""The largest log ratio that is exponentiated: the exponential of a larger one is close to the limit of float64."""


@dataclass(frozen=True, slots=True)
class GatedLoss:
    """The loss of each target before it is weighted, and its metrics."""

    loss_N: torch.Tensor
    pull_N: torch.Tensor
    """g / A of each target, detached: the weight of its score in the gradient, at the level of the ratio."""
    fractions: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Booleans [N] whose means are logged."""


class Score(Piece):
    """REINFORCE with detached weights: loss -A sg(c(w)) log pi, g = A c(w).

    c clamps w to [``low``, ``high``]; with ``outside = "drop"``, c(w) is w inside that range and 0 outside. Truncated
    from above, it is the loss of PipelineRL (arXiv 2509.19128), AIPO (LlamaRL, arXiv 2505.24034) and CISPO (MiniMax-M1,
    arXiv 2506.13585); with "drop", it is that of GLM-5 (arXiv 2602.15763). ``low = high = 1`` is plain REINFORCE.
    """

    kind: Literal["score"] = "score"
    low: float = Field(default=0.0, ge=0)
    high: float | None = Field(default=None, ge=0)
    """None means no upper bound."""
    outside: Literal["clamp", "drop"] = "clamp"
    positive_unweighted: bool = False
    """Whether c is 1 where A > 0 (TOPR, arXiv 2503.14286)."""

    def __call__(self, targets: Targets, log_ratio_N: torch.Tensor, live_N: torch.Tensor) -> GatedLoss:
        ratio_N = log_ratio_N.detach().exp()
        below_N = ratio_N < self.low
        above_N = torch.zeros_like(below_N) if self.high is None else ratio_N > self.high
        if self.outside == "clamp":
            pull_N = ratio_N.clamp(self.low, self.high)
        else:
            pull_N = torch.where(below_N | above_N, 0.0, ratio_N)
        if self.positive_unweighted:
            unweighted_N = targets.advantages_N > 0
            pull_N = torch.where(unweighted_N, 1.0, pull_N)
            below_N, above_N = below_N & ~unweighted_N, above_N & ~unweighted_N
        pull_N = torch.where(live_N, pull_N, 0.0)
        # Selected before the multiplication, so that a logprob of -inf at a dead target has no effect.
        trainer_N = torch.where(live_N, targets.trainer_N, 0.0)
        fractions = {"truncated_fraction": above_N & live_N}
        if self.low > 0:
            fractions["raised_fraction"] = below_N & live_N
        return GatedLoss(-pull_N * targets.advantages_N * trainer_N, pull_N, fractions)


class PpoClip(Piece):
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7): loss -min(w A, clip(w, 1 - low, 1 + high) A), g = A w.

    g is 0 where A > 0 and w > 1 + ``high``, or A < 0 and w < 1 - ``low``. Where A < 0, ``dual`` limits the loss to
    -dual A, so that g is 0 for w > dual (dual clip, arXiv 1912.09729). ``delta`` limits w from above before anything
    else, for both signs of A (INTELLECT-2, arXiv 2505.07291).
    """

    kind: Literal["ppo_clip"] = "ppo_clip"
    low: float | None = Field(default=0.2, ge=0)
    """None means no lower bound."""
    high: float | None = Field(default=0.2, ge=0)
    """None means no upper bound."""
    dual: float | None = Field(default=None, gt=1)
    delta: float | None = Field(default=None, gt=0)

    def __call__(self, targets: Targets, log_ratio_N: torch.Tensor, live_N: torch.Tensor) -> GatedLoss:
        return _clipped(targets, log_ratio_N, live_N, self._ceilings(), 1 - self.low if self.low is not None else None)

    def _ceilings(self) -> tuple[float | None, float | None]:
        """Return the ratios above which targets of positive and of negative advantage have no gradient."""
        positive = [bound for bound in (None if self.high is None else 1 + self.high, self.delta) if bound is not None]
        negative = [bound for bound in (self.dual, self.delta) if bound is not None]
        return min(positive, default=None), min(negative, default=None)


class PositiveUnclipped(Piece):
    """UP-GRPO (arXiv 2607.06987): for A > 0, loss -A log pi and g = A at any ratio; for A < 0, PPO with dual clip."""

    kind: Literal["positive_unclipped"] = "positive_unclipped"
    low: float = Field(default=0.2, ge=0)
    dual: float | None = Field(default=3.0, gt=1)

    def __call__(self, targets: Targets, log_ratio_N: torch.Tensor, live_N: torch.Tensor) -> GatedLoss:
        positive_N = live_N & (targets.advantages_N > 0)
        clipped = _clipped(targets, log_ratio_N, live_N & ~positive_N, (None, self.dual), 1 - self.low)
        score_N = -targets.advantages_N * torch.where(positive_N, targets.trainer_N, 0.0)
        return GatedLoss(
            torch.where(positive_N, score_N, clipped.loss_N),
            torch.where(positive_N, 1.0, clipped.pull_N),
            clipped.fractions,
        )


class Sapo(Piece):
    """SAPO (arXiv 2511.20347): loss -A (4 / tau) sigmoid(tau (w - 1)), g = A w sech^2(tau (w - 1) / 2).

    tau is ``tau_positive`` where A > 0 and ``tau_negative`` elsewhere.
    """

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    tau_negative: float = Field(default=1.05, gt=0)

    def __call__(self, targets: Targets, log_ratio_N: torch.Tensor, live_N: torch.Tensor) -> GatedLoss:
        # For a ratio beyond e^700 the sigmoid is 1 and its slope 0, and the gradient would be inf * 0.
        finite_N = live_N & (log_ratio_N.detach() < _LARGEST_EXPONENT)
        ratio_N = torch.where(finite_N, log_ratio_N, 0.0).exp()
        tau_N = _by_sign(targets.advantages_N > 0, self.tau_positive, self.tau_negative, ratio_N)
        gate_N = torch.where(finite_N, torch.sigmoid(tau_N * (ratio_N - 1)), live_N.to(ratio_N.dtype))
        slope_N = ratio_N / torch.cosh((tau_N * (ratio_N - 1) / 2).clamp(max=_LARGEST_EXPONENT)).square()
        pull_N = torch.where(finite_N, slope_N.detach(), 0.0)
        return GatedLoss(-targets.advantages_N * 4 / tau_N * gate_N, pull_N)


class Vespo(Piece):
    """VESPO (arXiv 2602.10693): loss -A sg(phi(w)) log pi, phi(w) = w^k exp(lambda (1 - w)), g = A phi(w).

    (k, lambda) are ``positive`` where A >= 0 and ``negative`` elsewhere; w is the ratio of the whole sequence.
    """

    kind: Literal["vespo"] = "vespo"
    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)

    def __call__(self, targets: Targets, log_ratio_N: torch.Tensor, live_N: torch.Tensor) -> GatedLoss:
        log_ratio_N = torch.where(live_N, log_ratio_N.detach(), 0.0)
        positive_N = targets.advantages_N >= 0
        k_N = _by_sign(positive_N, self.positive[0], self.negative[0], log_ratio_N)
        lambda_N = _by_sign(positive_N, self.positive[1], self.negative[1], log_ratio_N)
        phi_N = (k_N * log_ratio_N + lambda_N * (1 - log_ratio_N.exp())).exp()
        pull_N = torch.where(live_N, phi_N, 0.0)
        return GatedLoss(-pull_N * targets.advantages_N * torch.where(live_N, targets.trainer_N, 0.0), pull_N)


class GeometricMean(Piece):
    """GMPO (arXiv 2507.20673): loss -A exp((1/L) sum_t c(log w_t)), g_t = A exp(...) / L inside, 0 outside.

    c limits the log ratio of each token where that lowers the objective: to at most ``high`` where A > 0, and to at
    least -``low`` where A < 0. The mean is over the targets of a segment; the ratio is passed at level ``token``.
    """

    kind: Literal["geometric_mean"] = "geometric_mean"
    low: float = Field(default=0.4, ge=0)
    high: float = Field(default=0.4, ge=0)

    def __call__(self, targets: Targets, log_ratio_N: torch.Tensor, live_N: torch.Tensor) -> GatedLoss:
        advantages_N = targets.advantages_N
        too_high_N = (advantages_N > 0) & (log_ratio_N > self.high)
        too_low_N = (advantages_N < 0) & (log_ratio_N < -self.low)
        bound_N = torch.full_like(log_ratio_N, -self.low).masked_fill(too_high_N, self.high)
        inert_N = too_high_N | too_low_N
        bounded_N = torch.where(inert_N, bound_N, log_ratio_N)
        mean_N = torch.where(live_N, targets.segment_mean(bounded_N)[targets.segments_N], 0.0)
        ratio_N = mean_N.exp()
        pull_N = torch.where(live_N & ~inert_N, ratio_N.detach(), 0.0)
        fractions = {"clip_fraction_high": too_high_N & live_N, "clip_fraction_low": too_low_N & live_N}
        return GatedLoss(torch.where(live_N, -advantages_N * ratio_N, 0.0), pull_N, fractions)


Gate = Annotated[Score | PpoClip | PositiveUnclipped | Sapo | Vespo | GeometricMean, Field(discriminator="kind")]
"""How the ratio of a target enters the loss: the clipping of a policy loss."""


def _by_sign(positive_N: torch.Tensor, positive: float, negative: float, like_N: torch.Tensor) -> torch.Tensor:
    """Return one of two settings for each target, in the precision of ``like_N``."""
    return torch.full_like(like_N, negative).masked_fill(positive_N, positive)


def _clipped(
    targets: Targets,
    log_ratio_N: torch.Tensor,
    live_N: torch.Tensor,
    ceilings: tuple[float | None, float | None],
    floor: float | None,
) -> GatedLoss:
    """Return -A w, with w limited where that lowers the objective.

    The ceiling for the sign of A limits w from above; where A is negative, the floor limits it from below.
    """
    advantages_N = targets.advantages_N
    raw_N = log_ratio_N.detach().exp()
    positive_N, negative_N = live_N & (advantages_N > 0), live_N & (advantages_N < 0)
    nobody_N = torch.zeros_like(live_N)
    too_high_N = nobody_N if ceilings[0] is None else positive_N & (raw_N > ceilings[0])
    bounded_N = nobody_N if ceilings[1] is None else negative_N & (raw_N > ceilings[1])
    too_low_N = nobody_N if floor is None else negative_N & (raw_N < floor)
    bound_N = torch.zeros_like(raw_N)
    for bound, beyond_N in ((ceilings[0], too_high_N), (ceilings[1], bounded_N), (floor, too_low_N)):
        if bound is not None:
            bound_N = bound_N.masked_fill(beyond_N, bound)
    # Targets without a gradient are removed before exp, which would give 0 * inf for an overflow.
    inert_N = too_high_N | bounded_N | too_low_N | ~live_N
    ratio_N = torch.where(inert_N, 0.0, log_ratio_N).exp()
    pull_N = torch.where(inert_N, 0.0, ratio_N.detach())
    fractions = {"clip_fraction_high": too_high_N, "clip_fraction_low": too_low_N}
    if ceilings[1] is not None:
        fractions["clip_fraction_dual"] = bounded_N
    return GatedLoss(-advantages_N * torch.where(inert_N, bound_N, ratio_N), pull_N, fractions)
