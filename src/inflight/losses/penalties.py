"""Penalties: terms added to the policy term, each with a true gradient and, optionally, its own denominator.

In the formulas, d is the log ratio of trainer to reference, and g = -d loss / d trainer logprob before the coefficient
is applied. Corrections do not apply to penalties.

Shape suffixes: N targets, K candidate tokens at a target's position.
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
"""How KL(trainer || reference) enters the loss (arXiv 2506.09477; gradients are with respect to trainer logprobs):

- ``k1``: d. Its expected gradient is 0, so it does not regularize.
- ``k2``: d^2 / 2. On-policy, its gradient is that of the reverse KL.
- ``k3``: exp(-d) + d - 1. On-policy, its gradient is that of the *forward* KL(reference || trainer).
- ``k3_straight_through``: the value of k3 with the gradient of k2.
- ``ratio_k1``: r d, where r = exp(trainer - behaviour) is not detached. It is also correct off-policy.
- ``ratio_k3``: r k3, whose gradient is r d. It is also correct off-policy (DeepSeek-V3.2, 2512.02556, eq. 7).
"""

OwnAggregation = Aggregation | None
"""The denominator of a penalty; None means that of the policy term."""


@dataclass(frozen=True, slots=True)
class PenaltyTerms:
    """The penalty of each target, before coefficient and weights are applied, and values whose means are logged."""

    loss_N: torch.Tensor
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Kl(Piece):
    """``coefficient`` times an estimate of KL(trainer || reference) at each target, in nats."""

    kind: Literal["kl"] = "kl"
    coefficient: float = Field(ge=0)
    estimator: KlEstimator = "ratio_k3"
    clamp: float | None = Field(default=None, gt=0)
    """Limit for abs(d), as in some frameworks: the gradient is 0 beyond it. None means no limit."""
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        """Return the penalty. Raises `InvalidRequestError` without reference logprobs."""
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

    The entropy is exact, over the whole vocabulary, and must be passed to the loss with its gradient.
    """

    kind: Literal["entropy"] = "entropy"
    coefficient: float
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        """Return the penalty. Raises `InvalidRequestError` if ``targets`` has no entropies."""
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

    This is the NLL term of VAPO (arXiv 2504.05118), or self-imitation.
    """

    kind: Literal["cross_entropy"] = "cross_entropy"
    coefficient: float = Field(ge=0)
    where: Literal["positive", "all"] = "positive"
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        if self.where == "all":
            return PenaltyTerms(-targets.trainer_N)
        return PenaltyTerms(torch.where(targets.advantages_N > 0, -targets.trainer_N, 0.0))


class TeacherKl(Piece):
    """``coefficient`` times KL(teacher || trainer) over the teacher's top-k tokens.

    It is the sum over k of t_k (log t_k - log pi_k). Gradients flow only through the trainer's log pi_k.

    This is the forward KL over the top k, as in verl's ``forward_kl_topk`` (1dda039) and, with ``renormalised``, the
    targets of tinker-cookbook's ``train_off_policy``. The tail of the distribution is omitted.
    """

    kind: Literal["teacher_kl"] = "teacher_kl"
    coefficient: float = Field(ge=0)
    renormalised: bool = False
    """Whether the teacher's probabilities are divided by their sum. If they are not, the missing tail can make the KL
    negative; it then counts as 0 and has no gradient.
    """
    aggregation: OwnAggregation = None

    def __call__(self, targets: Targets) -> PenaltyTerms:
        """Return the penalty. The loss checks beforehand that the targets have the teacher's top-k tokens."""
        assert targets.teacher_top_NK is not None and targets.student_top_NK is not None
        teacher_NK, student_NK = targets.teacher_top_NK, targets.student_top_NK
        mass_N = teacher_NK.exp().sum(1)
        if self.renormalised:
            teacher_NK = teacher_NK - mass_N.log()[:, None]
        loss_N = (teacher_NK.exp() * (teacher_NK - student_NK)).sum(1)
        means = {
            "teacher_kl_top_k": loss_N.detach(),
            "teacher_top_k_mass": mass_N,
            "student_top_k_mass": student_NK.detach().exp().sum(1),
        }
        return PenaltyTerms(loss_N if self.renormalised else loss_N.clamp(min=0), means)


Penalty = Annotated[Kl | Entropy | SquaredLogRatio | CrossEntropy | TeacherKl, Field(discriminator="kind")]
"""A term that is added to the loss of each target."""
