"""Policy losses as pure functions over packed, target-aligned tensors, and the presets that name whole recipes.

Ratios are between the trainer and the behaviour logprobs: nothing is recomputed at the start of a step. The module
knows nothing of models, and of denominators only what `inflight.losses.aggregation` or its caller hands it as weights.

Shape suffixes: T packed tokens, N targets (tokens with a true loss mask), B sequences. Without one: any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inflight.errors import ConfigError, InvalidRequestError
from inflight.losses.aggregation import Aggregation, token_weights
from inflight.losses.kl import reference_kl
from inflight.losses.metrics import LossOutput, mean_metrics, ratio_metrics, staleness_metrics
from inflight.losses.micro_batch import finite_targets
from inflight.types import GlobalCounts, MicroBatch

if TYPE_CHECKING:
    from inflight.rollouts.advantages import AdvantageEstimator


def grpo_loss(
    trainer_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    denominator: float | torch.Tensor | None = None,
) -> LossOutput:
    """Return `clipped_loss` of plain tensors of one shape, packed or padded: its sum over targets / ``denominator``.

    ``advantages`` have the shape of the others, or one value for each entry of their first dimensions: [B] or [B, 1]
    for logprobs [B, T]. ``loss_mask`` is true, or not 0, at targets; what stands elsewhere, even NaN, has no effect.

    ``denominator`` is by default the number of targets of this call, which is right only if the call sees all of the
    optimizer step. A step that is split into micro-batches or over ranks needs one number for all its calls, such as
    its number of targets everywhere: a mean of the parts' means gives targets of short parts more weight. Gradients
    are then to be summed; where they are averaged over R ranks, as DDP does, give a denominator R times smaller.

    Raises `InvalidRequestError` if the shapes do not fit, and what `clipped_loss` raises; its metrics are returned.
    """
    shape = trainer_logprobs.shape
    for name, tensor in (("behaviour_logprobs", behaviour_logprobs), ("loss_mask", loss_mask)):
        if tensor.shape != shape:
            raise InvalidRequestError(f"{name} are {list(tensor.shape)}, but trainer_logprobs {list(shape)}")
    per_target = advantages.reshape(*advantages.shape, *[1] * (len(shape) - advantages.dim()))
    sizes = list(per_target.shape)
    if len(sizes) != len(shape) or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        raise InvalidRequestError(f"advantages {list(advantages.shape)} do not fit trainer_logprobs {list(shape)}")
    mask_T = loss_mask.flatten() != 0
    # A call without targets has a loss of 0, not 0 / 0.
    weights_T = mask_T.double() / (mask_T.sum().clamp(min=1) if denominator is None else denominator)
    return clipped_loss(
        trainer_logprobs.flatten(),
        behaviour_logprobs.flatten(),
        per_target.expand(shape).flatten(),
        mask_T,
        weights_T,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def clipped_loss(
    trainer_logprobs_T: torch.Tensor,
    behaviour_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    token_weights_T: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossOutput:
    """Return the clipped surrogate of PPO (arXiv 1707.06347, eq. 7), summed with the given weights.

    With r = exp(trainer - behaviour) and advantage A, the loss of a token is

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),

    and its gradient is -r A grad(trainer logprob), or 0 where A > 0 and r > 1 + clip_high, or A < 0 and
    r < 1 - clip_low. What stands at masked positions, NaN included, has no effect on loss or gradient. Raises
    `NonFiniteError` if the behaviour logprob of a target is not finite.

    Metrics: those of `ratio_metrics`, ``clip_fraction_high`` and ``clip_fraction_low``.
    """
    trainer_N, behaviour_N, advantages_N, weights_N = _targets(
        trainer_logprobs_T, behaviour_logprobs_T, advantages_T, loss_mask_T, token_weights_T
    )
    log_ratio_N = trainer_N - behaviour_N
    ratio_N = log_ratio_N.detach().exp()
    too_high_N = (advantages_N > 0) & (ratio_N > 1 + clip_high)
    too_low_N = (advantages_N < 0) & (ratio_N < 1 - clip_low)
    bound_N = torch.full_like(trainer_N, 1 - clip_low).masked_fill(too_high_N, 1 + clip_high)
    # Tokens without a gradient are taken out before exp: that of an overflowing one would be 0 * inf.
    inert_N = too_high_N | too_low_N | (advantages_N == 0)
    surrogate_N = torch.where(inert_N, bound_N, log_ratio_N.masked_fill(inert_N, 0.0).exp()) * advantages_N
    metrics = mean_metrics({"clip_fraction_high": too_high_N, "clip_fraction_low": too_low_N})
    return LossOutput(-(weights_N * surrogate_N).sum(), {**ratio_metrics(trainer_N, behaviour_N), **metrics})


def reinforce_loss(
    trainer_logprobs_T: torch.Tensor,
    behaviour_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    token_weights_T: torch.Tensor,
    *,
    cap: float,
) -> LossOutput:
    """Return REINFORCE with truncated importance weights (PipelineRL, arXiv 2509.19128), summed with the given weights.

    With rho = exp(trainer - behaviour) and advantage A, the loss of a token is

        -stop_gradient(min(rho, cap)) A trainer_logprob,

    and its gradient is -min(rho, cap) A grad(trainer logprob): unlike a clipped token, a truncated one still teaches.
    What stands at masked positions, NaN included, has no effect on loss or gradient. Raises `NonFiniteError` if the
    behaviour logprob of a target is not finite.

    Metrics: those of `ratio_metrics`, of the ratios before truncation, and ``truncated_fraction``.
    """
    trainer_N, behaviour_N, advantages_N, weights_N = _targets(
        trainer_logprobs_T, behaviour_logprobs_T, advantages_T, loss_mask_T, token_weights_T
    )
    ratio_N = (trainer_N - behaviour_N).detach().exp()
    surrogate_N = ratio_N.clamp(max=cap) * advantages_N * trainer_N
    metrics = mean_metrics({"truncated_fraction": ratio_N > cap})
    return LossOutput(-(weights_N * surrogate_N).sum(), {**ratio_metrics(trainer_N, behaviour_N), **metrics})


@dataclass(frozen=True, slots=True)
class LossPreset:
    """One recipe: a policy loss with its settings, the advantages it expects, and how its tokens are weighed."""

    name: str
    function: Callable[..., LossOutput]
    """`clipped_loss`, `reinforce_loss`, or another function of the same five tensors."""
    kwargs: Mapping[str, float]
    """Keyword arguments of ``function``."""
    advantages: AdvantageEstimator
    """Estimator for `inflight.rollouts.group_advantages`; the loss itself takes advantages as they come."""
    aggregation: Aggregation

    def loss(
        self,
        batch: MicroBatch,
        trainer_logprobs_T: torch.Tensor,
        counts: GlobalCounts,
        *,
        reference_kl_coef: float = 0.0,
        current_version: int | None = None,
    ) -> LossOutput:
        """Return the loss of one micro-batch, to be summed over micro-batches and ranks, and its metrics.

        With reference logprobs in the batch, their KL is measured, and ``reference_kl_coef`` times it is added. With
        ``current_version``, that of the weights behind ``trainer_logprobs_T``, `staleness_metrics` are added. Raises
        `NonFiniteError` for behaviour or reference logprobs that are not finite, `ConfigError` if there is a
        coefficient but no reference.
        """
        if reference_kl_coef != 0 and batch.reference_logprobs_T is None:
            raise ConfigError(
                f"reference_kl_coef is {reference_kl_coef} but the micro-batch has no reference_logprobs_T: "
                "give every sample reference_logprobs, or set the coefficient to 0"
            )
        mask_T, behaviour_T = batch.loss_mask_T, batch.behaviour_logprobs_T
        weights_T = token_weights(mask_T, batch.segment_ids_T, counts, self.aggregation)
        output = self.function(trainer_logprobs_T, behaviour_T, batch.advantages_T, mask_T, weights_T, **self.kwargs)
        loss, metrics = output.loss, dict(output.metrics)
        if batch.reference_logprobs_T is not None:
            penalty = reference_kl(
                trainer_logprobs_T,
                batch.reference_logprobs_T,
                behaviour_T,
                mask_T,
                weights_T,
                coefficient=reference_kl_coef,
            )
            metrics.update(penalty.metrics)
            if reference_kl_coef != 0:
                loss = loss + penalty.loss
        if current_version is not None:
            metrics.update(
                staleness_metrics(trainer_logprobs_T, behaviour_T, batch.versions_T, mask_T, current_version)
            )
        return LossOutput(loss, metrics)


PIPELINERL_PAPER = LossPreset("pipelinerl_paper", reinforce_loss, {"cap": 5.0}, "leave_one_out", "sequence_sum")
"""PipelineRL as its paper describes it (arXiv 2509.19128): importance weights truncated at 5."""

PIPELINERL = LossPreset("pipelinerl", reinforce_loss, {"cap": 1.02}, "leave_one_out", "sequence_sum")
"""PipelineRL as its code ships it (ServiceNow/PipelineRL at 58d3934): truncated at 1 + eps_high with eps_high 0.02."""

GRPO = LossPreset("grpo", clipped_loss, {"clip_low": 0.2, "clip_high": 0.2}, "std", "sequence_mean")
"""GRPO (arXiv 2402.03300) on the ratio to the behaviour logprobs."""

PRESETS: Mapping[str, LossPreset] = {preset.name: preset for preset in (PIPELINERL_PAPER, PIPELINERL, GRPO)}
"""Presets by the name that configurations use."""


def _targets(
    trainer_logprobs_T: torch.Tensor,
    behaviour_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    token_weights_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four tensors at the targets, in the dtype of the trainer logprobs.

    Masked tokens are selected away before anything is computed, so that no NaN of theirs can meet a zero gradient.
    """
    trainer_N = trainer_logprobs_T[loss_mask_T]
    behaviour_N = finite_targets(behaviour_logprobs_T, loss_mask_T, "behaviour_logprobs").to(trainer_N.dtype)
    return (
        trainer_N,
        behaviour_N,
        advantages_T[loss_mask_T].to(trainer_N.dtype),
        token_weights_T[loss_mask_T].to(trainer_N.dtype),
    )
