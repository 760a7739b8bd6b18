"""Penalties: terms added to the policy's, each with a true gradient and, optionally, its own denominator.

d is the log ratio of trainer to reference, g = -d loss / d trainer logprob before the coefficient. Corrections do not
apply to them.

Shape suffixes: N targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, assert_never

import torch
from pydantic import Field

from inflight.errors import InvalidRequestError
from inflight.losses.aggregation import Aggregation
from inflight.losses.pieces import Piece
from inflight.losses.targets import Targets

KlEstimator = Literal["k1", "k2", "k3", "k3_straight_through", "ratio_k1", "ratio_k3"]
"""How KL(trainer || reference) enters the loss (arXiv 2506.09477; gradients are of the trainer's logprobs):

``k1``                   d; its expected gradient is 0, so it does not regularise
``k2``                   d^2 / 2; on-policy it has the gradient of the reverse KL
``k3``                   exp(-d) + d - 1; on-policy it has the gradient of the *forward* KL(reference || trainer)
``k3_straight_through``  the value of k3 with the gradient of k2
``ratio_k1``             r d, correct off-policy too; r = exp(trainer - behaviour) is not detached
``ratio_k3``             r k3, whose gradient is r d; correct off-policy too (DeepSeek-V3.2, 2512.02556, eq. 7)
"""

OwnAggregation = Aggregation | None
"""The denominator of a penalty; None: as the policy's."""


@dataclass(frozen=True, slots=True)
class PenaltyTerms:
    """The penalty of each target before coefficient and weights, and means worth logging."""

    loss_N: torch.Tensor
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Kl(Piece):
    """``coefficient`` times an estimate of KL(trainer || reference) at each target, in nats."""

    kind: Literal["kl"] = "kl"
    coefficient: float = Field(ge=0)
    estimator: KlEstimator = "ratio_k3"
    clamp: float | None = Field(default=None, gt=0)
    """Bound on abs(d), as in some frameworks: the gradient is 0 beyond it. None: no bound."""
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        """Raises `InvalidRequestError` without reference logprobs."""
        if targets.reference_N is None:
            raise InvalidRequestError(
                "a KL penalty needs reference_logprobs_T in the micro-batch: give every sample reference_logprobs"
            )
        d_N = targets.trainer_N - targets.reference_N
        if self.clamp is not None:
            d_N = d_N.clamp(-self.clamp, self.clamp)
        detached_N = d_N.detach()
        k3_N = (-d_N).exp() + d_N - 1
        loss_N: torch.Tensor
        match self.estimator:
            case "k1":
                loss_N = d_N
            case "k2":
                loss_N = d_N.square() / 2
            case "k3":
                loss_N = k3_N
            case "k3_straight_through":
                k2_N = d_N.square() / 2
                loss_N = k3_N.detach() + k2_N - k2_N.detach()
            case "ratio_k1":
                loss_N = targets.log_ratio("trainer/behaviour").exp() * d_N
            case "ratio_k3":
                log_ratio_N = targets.log_ratio("trainer/behaviour")
                # r exp(-d) as one exponential: a constant unless d is bounded, and never inf * 0.
                loss_N = (log_ratio_N - d_N).exp() + log_ratio_N.exp() * (d_N - 1)
            case _:
                assert_never(self.estimator)
        return PenaltyTerms(loss_N, {"reference_kl_k1": detached_N, "reference_kl_k3": k3_N.detach()})


class Entropy(Piece):
    """-``coefficient`` times the entropy of the trainer's distribution at each target, in nats: a bonus.

    The entropy is exact, over the vocabulary, and must be given to the loss with its gradient.
    """

    kind: Literal["entropy"] = "entropy"
    coefficient: float
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        """Raises `InvalidRequestError` without entropies."""
        if targets.entropy_N is None:
            raise InvalidRequestError("an entropy bonus needs entropy_T: compute it with chunked_logprobs_and_entropy")
        return PenaltyTerms(-targets.entropy_N, {"entropy": targets.entropy_N.detach()})


class SquaredLogRatio(Piece):
    """``coefficient`` times (log pi - log mu)^2 at every target, g = -2 (log pi - log mu) (Kimi-K2.5, 2602.02276)."""

    kind: Literal["squared_log_ratio"] = "squared_log_ratio"
    coefficient: float = Field(ge=0)
    between: Literal["trainer/behaviour", "trainer/proximal"] = "trainer/behaviour"
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        return PenaltyTerms(targets.log_ratio(self.between).square())


class CrossEntropy(Piece):
    """``coefficient`` times -log pi, g = 1: imitation of the samples, by default where the advantage is positive.

    The NLL term of VAPO (arXiv 2504.05118), and self-imitation.
    """

    kind: Literal["cross_entropy"] = "cross_entropy"
    coefficient: float = Field(ge=0)
    where: Literal["positive", "all"] = "positive"
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        if self.where == "all":
            return PenaltyTerms(-targets.trainer_N)
        return PenaltyTerms(torch.where(targets.advantages_N > 0, -targets.trainer_N, 0.0))


class Distillation(Piece):
    """``coefficient`` times on-policy distillation: loss -sg(log ref - log pi) rho, g = (log ref - log pi) rho.

    rho is the ratio of trainer to behaviour policy, with its gradient; targets whose probability fell by more than
    ``max_fall`` are left out (prime-rl's reference-KL loss). On-policy this is the reverse KL towards the reference.
    """

    kind: Literal["distillation"] = "distillation"
    coefficient: float = Field(ge=0)
    max_fall: float | None = Field(default=None, ge=0)
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        """Raises `InvalidRequestError` without reference logprobs."""
        if targets.reference_N is None:
            raise InvalidRequestError(
                "distillation needs the teacher's logprobs as reference_logprobs_T in the micro-batch"
            )
        detached_N = targets.trainer_N.detach()
        live_N = torch.ones_like(detached_N, dtype=torch.bool)
        if self.max_fall is not None:
            live_N = detached_N.exp() - targets.behaviour_N.exp() >= -self.max_fall
        ratio_N = torch.where(live_N, targets.log_ratio("trainer/behaviour"), 0.0).exp()
        d_N = detached_N - targets.reference_N
        return PenaltyTerms(torch.where(live_N, d_N * ratio_N, 0.0), {"reference_kl_k1": d_N})


Penalty = Annotated[Kl | Entropy | SquaredLogRatio | CrossEntropy | Distillation, Field(discriminator="kind")]
