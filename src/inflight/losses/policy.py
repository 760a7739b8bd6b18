"""`PolicyLoss`: combines a ratio, a gate, corrections, penalties and denominators.

`inflight.losses.prepare` first makes counts over the whole optimizer step. The loss is then a plain sum over targets,
so losses and gradients add up to the same result however segments are split into micro-batches and ranks.

Shape suffixes: T packed tokens, N targets, S segments, P prompts, K candidate tokens at a target's position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import model_validator

from inflight.errors import InvalidRequestError
from inflight.losses.aggregation import Aggregation, Counts, TokenMean, counts_after_rejection, token_shares
from inflight.losses.corrections import (
    Correction,
    MaxAge,
    SecondMoment,
    couples_segments,
)
from inflight.losses.distillation import Distillation
from inflight.losses.gates import Gate, GeometricMean
from inflight.losses.metrics import (
    LossOutput,
    mean_metrics,
    pull_metrics,
    staleness_metrics,
)
from inflight.losses.micro_batch import check_finite, check_groups, check_micro_batch
from inflight.losses.penalties import Entropy, Kl, Penalty, SquaredLogRatio, TeacherKl
from inflight.losses.pieces import Piece
from inflight.losses.targets import Level, Targets
from inflight.types import MicroBatch

Need = Literal[
    "reference_logprobs", "teacher_logprobs", "teacher_top", "versions", "entropy", "group_ids", "first_forward"
]
"""A requirement of a loss beyond trainer and behaviour logprobs, advantages and mask. ``first_forward`` means that
`prepare` needs trainer logprobs of the whole step before its first micro-batch is trained on.
"""


@dataclass(frozen=True, slots=True)
class LossPlan:
    """The counts that `prepare` makes over one optimizer step; they are the same on every rank."""

    loss: PolicyLoss
    before: Counts
    """Counts of all targets and completions."""
    after: Counts
    """Counts of the targets that no correction rejects, and of their completions; equal to ``before`` if no denominator
    needs separate counts.
    """
    thresholds: tuple[float | None, ...] = ()
    """The threshold of each correction that depends on a statistic of the whole step, in the order of the corrections.
    """
    current_version: int | None = None
    """The version of the trained weights."""


class PolicyLoss(Piece):
    """A policy loss as a value: frozen, hashable, comparable, and serializable to JSON with ``model_dump_json``.

    ``loss(batch, trainer_logprobs_T, prepare(loss, [batch, ...]))`` returns one micro-batch's contribution to the loss.
    """

    gate: Gate
    level: Level = "token"
    between: Literal["trainer/behaviour", "trainer/proximal"] = "trainer/behaviour"
    """The gate's ratio. Proximal logprobs are the trainer's at the start of the step. If the micro-batch has no
    ``proximal_logprobs_T``, they are the trainer's current ones, detached.
    """
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """``interpolated``: behaviour logprobs, moved (lag - 1) / lag of the way to the trainer's (A-3PO, arXiv
    2512.06547).
    """
    corrections: tuple[Correction, ...] = ()
    aggregation: Aggregation = TokenMean()
    penalties: tuple[Penalty, ...] = ()
    distillation: Distillation | None = None
    """If this is None, the advantages are those of the micro-batch."""
    non_finite: Literal["raise", "drop", "on_policy"] = "raise"
    """The treatment of targets whose behaviour logprob is not finite: raise an error, exclude them from the loss and
    all counts, or use the trainer's logprob, which gives a ratio of 1.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> PolicyLoss:
        if isinstance(self.gate, GeometricMean) and self.level != "token":
            raise ValueError(
                f"gate geometric_mean itself takes the mean over a segment: level must be 'token', not {self.level!r}"
            )
        return self

    @property
    def needs(self) -> frozenset[Need]:
        """The requirements of the loss beyond the fields that every micro-batch has."""
        needs: set[Need] = set()
        aggregations = self._aggregations
        if any(isinstance(penalty, Kl) for penalty in self.penalties):
            needs.add("reference_logprobs")
        if self.distillation is not None:
            needs.add("teacher_logprobs")
        if any(isinstance(penalty, TeacherKl) for penalty in self.penalties):
            needs.add("teacher_top")
        if any(isinstance(penalty, Entropy) for penalty in self.penalties):
            needs.add("entropy")
        if self.proximal == "interpolated" or any(isinstance(c, MaxAge) for c in self.corrections):
            needs.add("versions")
        if any(aggregation.kind == "prompt_mean" for aggregation in aggregations):
            needs.add("group_ids")
        rejects = [c for c in self.corrections if c.kind not in ("truncate", "max_age")]
        if any(isinstance(c, SecondMoment) for c in rejects) or (
            rejects and any(counts_after_rejection(aggregation) for aggregation in aggregations)
        ):
            needs.add("first_forward")
        return frozenset(needs)

    @property
    def has_terms_without_advantage(self) -> bool:
        """Whether targets with an advantage of 0 have a gradient, from a penalty (such as a KL) or from distillation.

        The squared log ratio does not count, because it only limits the effect of the policy term.
        """
        others = any(not isinstance(penalty, SquaredLogRatio) for penalty in self.penalties)
        return others or self.distillation is not None

    @property
    def locality(self) -> Literal["token", "segment"]:
        """``token`` if, after `prepare`, the gradient of a target depends only on its own trainer logprob."""
        coupled = self.level != "token" or isinstance(self.gate, GeometricMean)
        recomputed = self.proximal == "recomputed"
        coupled |= any(
            couples_segments(c) or (recomputed and getattr(c, "level", "token") != "token") for c in self.corrections
        )
        return "segment" if coupled else "token"

    def __call__(
        self,
        batch: MicroBatch,
        trainer_logprobs_T: torch.Tensor,
        plan: LossPlan,
        *,
        entropy_T: torch.Tensor | None = None,
        student_top_TK: torch.Tensor | None = None,
    ) -> LossOutput:
        """Return the loss of one micro-batch, to be summed over micro-batches and ranks, and its metrics.

        ``student_top_TK`` are the trainer logprobs of ``teacher_top_ids_TK``. The loss is computed in float64 and
        returned in the dtype of ``trainer_logprobs_T``. Values at masked positions, even NaN, have no effect on loss or
        gradient. Raises `NonFiniteError` if a behaviour logprob (see ``non_finite``), reference or teacher logprob or
        advantage of a target is not finite, and `InvalidRequestError` if the micro-batch lacks fields that the loss
        `needs`, if shapes, dtypes or devices do not match, or if the plan is for another loss.
        """
        given = {"trainer_logprobs_T": trainer_logprobs_T, "entropy_T": entropy_T, "student_top_TK": student_top_TK}
        self._check(batch, plan, **given)
        if "teacher_top" in self.needs and student_top_TK is None:
            raise InvalidRequestError(
                "a teacher_kl penalty needs the trainer's logprobs of teacher_top_ids_TK: pass student_top_TK"
            )
        targets = self._targets(batch, trainer_logprobs_T, plan.current_version, entropy_T, student_top_TK)
        weight_N, keep_N = self._correct(targets, plan.thresholds)
        shares = [self._shares(it, targets, keep_N, batch, plan) for it in self._aggregations]
        loss, pull_N, means = self._sum(targets, weight_N, keep_N, shares)
        if self.non_finite != "raise":
            means["non_finite_behaviour"] = ~batch.behaviour_logprobs_T[batch.loss_mask_T].isfinite()
        metrics = pull_metrics(targets, pull_N) | mean_metrics(means)
        if targets.lag_N is not None:
            metrics |= staleness_metrics(targets.trainer_N, targets.behaviour_N, targets.lag_N)
        return LossOutput(loss.to(trainer_logprobs_T.dtype), metrics)

    def gradient(
        self,
        batch: MicroBatch,
        trainer_logprobs_T: torch.Tensor,
        plan: LossPlan,
        *,
        entropy_T: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return d loss / d trainer logprobs [T], and d loss / d entropy [T] if entropies are given.

        Raises the same errors as a call, and `InvalidRequestError` for a loss with a ``teacher_kl`` penalty.
        """
        self._check(batch, plan, trainer_logprobs_T=trainer_logprobs_T, entropy_T=entropy_T)
        leaves = [trainer_logprobs_T.detach().requires_grad_()]
        if entropy_T is not None:
            leaves.append(entropy_T.detach().requires_grad_())
        with torch.enable_grad():
            loss = self(batch, leaves[0], plan, entropy_T=leaves[1] if entropy_T is not None else None).loss
        # A micro-batch without targets, or a loss without entropy, leaves nothing to differentiate.
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None, None)
        filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=False)]
        return filled[0], filled[1] if entropy_T is not None else None

    def on_targets(self, batch: MicroBatch, plan: LossPlan) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        """Return the ``loss_of`` for `inflight.losses.one_pass`, which computes the loss of some of the batch's
        targets.

        Targets are the tokens selected by ``loss_mask_T``, in order. Raises `InvalidRequestError` if the loss couples
        targets: its `locality` must be ``token``, its denominators must count before rejection, and it must need
        neither entropies nor the teacher's top-k tokens. Otherwise this function and the returned one raise the same
        errors as a call.
        """
        rejects = bool(self.corrections) and any(map(counts_after_rejection, self._aggregations))
        if self.locality != "token" or rejects or self.needs & {"entropy", "teacher_top"}:
            raise InvalidRequestError(
                "the loss of a target depends on other targets, on entropies or on other tokens at its position, so "
                "it cannot be computed in one pass: use chunked_logprobs"
            )
        self._check(batch, plan)
        rows_N = batch.loss_mask_T.nonzero().squeeze(1)
        targets = self._targets(batch, torch.zeros_like(batch.behaviour_logprobs_T), plan.current_version)
        every_N = torch.ones_like(targets.advantages_N, dtype=torch.bool)
        counted_N = self._mask(batch)[rows_N]
        shares = [
            torch.zeros(len(rows_N), dtype=torch.float64, device=rows_N.device).masked_scatter(
                counted_N, self._shares(it, targets, every_N, batch, plan)
            )
            for it in self._aggregations
        ]

        def loss_of(logprobs_C: torch.Tensor, rows: slice) -> torch.Tensor:
            part = _rows_of(batch, rows_N[rows])
            of_part = self._targets(part, logprobs_C, plan.current_version)
            weight_C, keep_C = self._correct(of_part, plan.thresholds)
            shares_C = [shares_N[rows][counted_N[rows]] for shares_N in shares]
            return self._sum(of_part, weight_C, keep_C, shares_C)[0].to(logprobs_C.dtype)

        return loss_of

    def _check(self, batch: MicroBatch, plan: LossPlan, **of_trainer_T: torch.Tensor | None) -> None:
        check_micro_batch(batch, **of_trainer_T)
        if plan.loss != self:
            raise InvalidRequestError("the plan is for another loss: prepare it with this one")
        top_TK, student_top_TK = batch.teacher_top_logprobs_TK, of_trainer_T.get("student_top_TK")
        if student_top_TK is not None and (top_TK is None or top_TK.shape != student_top_TK.shape):
            raise InvalidRequestError(
                f"student_top_TK is {list(student_top_TK.shape)}, but teacher_top_logprobs_TK is "
                f"{None if top_TK is None else list(top_TK.shape)}: score the teacher's tokens"
            )
        if "group_ids" in self.needs and batch.group_ids_S is not None:
            check_groups([batch], len(plan.before.tokens_P))

    @property
    def _aggregations(self) -> list[Aggregation]:
        """The aggregation of the policy term, followed by that of each penalty."""
        return [self.aggregation, *(penalty.aggregation or self.aggregation for penalty in self.penalties)]

    def _sum(
        self, targets: Targets, weight_N: torch.Tensor, keep_N: torch.Tensor, shares: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, the weight of each target in the gradient, and additional values to average.

        ``shares`` are the weights from the denominators of the policy term and of each penalty.
        """
        live_N = keep_N & (targets.advantages_N != 0)
        log_ratio_N = targets.at_level(targets.log_ratio(self.between), self.level)
        gated = self.gate(targets, log_ratio_N, live_N)
        weight_N = torch.where(live_N, weight_N, 0.0)
        loss = (shares[0] * weight_N * gated.loss_N).sum()
        means = dict(gated.fractions)
        if self.corrections:
            means["kept_fraction"] = keep_N
        if targets.teacher_N is not None:
            means["teacher_kl_k1"] = targets.trainer_N.detach() - targets.teacher_N
        for penalty, shares_N in zip(self.penalties, shares[1:], strict=True):
            charged = penalty(targets)
            means.update(charged.means)
            if penalty.coefficient != 0:
                loss = loss + penalty.coefficient * (shares_N * charged.loss_N).sum()
        return loss, weight_N * gated.pull_N, means

    def _mask(self, batch: MicroBatch) -> torch.Tensor:
        """Return which tokens are targets, bool [T]."""
        if self.non_finite == "drop":
            return batch.loss_mask_T & batch.behaviour_logprobs_T.isfinite()
        return batch.loss_mask_T

    def _targets(
        self,
        batch: MicroBatch,
        trainer_logprobs_T: torch.Tensor,
        current_version: int | None,
        entropy_T: torch.Tensor | None = None,
        student_top_TK: torch.Tensor | None = None,
    ) -> Targets:
        """Return the targets of a micro-batch."""
        rows_N = self._mask(batch).nonzero().squeeze(1)  # once, because it synchronizes with a GPU

        def take(values_T: torch.Tensor) -> torch.Tensor:
            return values_T.index_select(0, rows_N)

        trainer_N, behaviour_N = take(trainer_logprobs_T).double(), take(batch.behaviour_logprobs_T).double()
        detached_N = trainer_N.detach()
        if self.non_finite == "on_policy":
            behaviour_N = torch.where(behaviour_N.isfinite(), behaviour_N, detached_N)
        advantages_N = take(batch.advantages_T).double()
        given_T = None if self.proximal == "interpolated" else batch.proximal_logprobs_T
        given_N = None if given_T is None else take(given_T).double()
        reference_T = batch.reference_logprobs_T if "reference_logprobs" in self.needs else None
        reference_N = None if reference_T is None else take(reference_T).double()
        teacher_N = None
        if self.distillation is not None:
            if batch.teacher_logprobs_T is None:
                raise InvalidRequestError(
                    "distillation needs teacher_logprobs_T in the micro-batch: give every rollout the scores of a "
                    "teacher"
                )
            teacher_N = take(batch.teacher_logprobs_T).double()
        check_finite(
            rows_N,
            behaviour_logprobs=behaviour_N,
            proximal_logprobs=given_N,
            reference_logprobs=reference_N,
            teacher_logprobs=teacher_N,
            advantages=advantages_N,
        )
        lag_N = None if current_version is None else current_version - take(batch.versions_T)
        if self.proximal == "interpolated":
            if lag_N is None:
                raise InvalidRequestError(
                    "an interpolated proximal policy needs the versions of the targets: pass current_version to prepare"
                )
            share_N = torch.where(lag_N > 0, (lag_N - 1).double() / lag_N.clamp(min=1).double(), 0.0)
            proximal_N = behaviour_N + share_N * (detached_N - behaviour_N)
        else:
            proximal_N = detached_N if given_N is None else given_N
        top_TK = batch.teacher_top_logprobs_TK
        targets = Targets(
            trainer_N=trainer_N,
            behaviour_N=behaviour_N,
            proximal_N=proximal_N,
            advantages_N=advantages_N,
            segments_N=take(batch.segment_ids_T),
            num_segments=len(batch.segment_lengths),
            lag_N=lag_N,
            reference_N=reference_N,
            teacher_N=teacher_N,
            teacher_top_NK=None if top_TK is None or student_top_TK is None else take(top_TK).double(),
            student_top_NK=None if student_top_TK is None else take(student_top_TK).double(),
            entropy_N=None if entropy_T is None else take(entropy_T).double(),
        )
        if self.distillation is None:
            return targets
        return replace(targets, advantages_N=self.distillation.advantages(targets))

    def _correct(self, targets: Targets, thresholds: Sequence[float | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of each target and whether it is kept."""
        weight_N = torch.ones_like(targets.advantages_N)
        keep_N = torch.ones_like(targets.advantages_N, dtype=torch.bool)
        for correction, threshold in zip(self.corrections, thresholds, strict=True):
            corrected_N = correction(targets, threshold)
            if corrected_N.dtype == torch.bool:
                keep_N = keep_N & corrected_N
            else:
                weight_N = weight_N * corrected_N
        return weight_N, keep_N

    def _shares(
        self, aggregation: Aggregation, targets: Targets, keep_N: torch.Tensor, batch: MicroBatch, plan: LossPlan
    ) -> torch.Tensor:
        """Return the weight that an aggregation's denominator gives each target."""
        after = counts_after_rejection(aggregation)
        counted_N = keep_N if after else torch.ones_like(keep_N)
        counts = plan.after if after else plan.before
        return token_shares(aggregation, targets, counted_N, batch.group_ids_S, counts)


def _rows_of(batch: MicroBatch, rows_N: torch.Tensor) -> MicroBatch:
    """Return a micro-batch with only some of the targets, as if their segments had no others."""
    names = (
        *("segment_ids_T", "behaviour_logprobs_T", "advantages_T", "versions_T"),
        *("reference_logprobs_T", "teacher_logprobs_T", "proximal_logprobs_T"),
    )
    rows = {name: values_T[rows_N] for name in names if (values_T := getattr(batch, name)) is not None}
    return replace(batch, loss_mask_T=torch.ones_like(rows_N, dtype=torch.bool), **rows)
