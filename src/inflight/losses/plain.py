"""The two most common losses for plain tensors, packed or padded, in training loops without micro-batches or plans."""

from __future__ import annotations

import math

import torch
from pydantic import ValidationError

from inflight.base.validation import describe_problems
from inflight.errors import InvalidRequestError
from inflight.losses.gates import Gate, PpoClip, Score
from inflight.losses.metrics import LossOutput, mean_metrics, pull_metrics
from inflight.losses.micro_batch import check_finite
from inflight.losses.targets import Targets


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
    """Return PPO's clipped surrogate (`inflight.losses.PpoClip`), summed over targets and divided by ``denominator``.

    All tensors have the same shape, except that ``advantages`` may be [B] or [B, 1] for logprobs [B, T]. ``loss_mask``
    is true, or not 0, at targets; values elsewhere, even NaN, have no effect.

    By default, ``denominator`` is the number of targets of this call, which is correct only if the call covers the
    whole optimizer step. A step that is split into micro-batches or over ranks needs one number for all its calls, such
    as its total number of targets: a mean of the parts' means would give more weight to targets in short parts.
    Gradients must then be summed; if they are averaged over R ranks, as DDP does, pass a denominator that is R times
    smaller.

    Raises `InvalidRequestError` if shapes, dtypes or devices do not match, a clip is negative, or the denominator is
    not one number above 0, and `NonFiniteError` if a behaviour logprob or an advantage of a target is not finite. The
    metrics describe the ratios, and include ``clip_fraction_high`` and ``clip_fraction_low``.
    """
    gate = _gate(PpoClip, low=clip_low, high=clip_high)
    return _sum_loss(gate, trainer_logprobs, behaviour_logprobs, advantages, loss_mask, denominator)


def reinforce_loss(
    trainer_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    cap: float = 5.0,
    denominator: float | torch.Tensor | None = None,
) -> LossOutput:
    """Return the loss of REINFORCE with importance weights truncated at ``cap`` (`inflight.losses.Score`), as in
    PipelineRL.

    Tensors, ``denominator`` and errors are as in `grpo_loss`. The metrics describe the ratios, and include
    ``truncated_fraction``.
    """
    gate = _gate(Score, high=cap)
    return _sum_loss(gate, trainer_logprobs, behaviour_logprobs, advantages, loss_mask, denominator)


def _gate(kind: type[PpoClip] | type[Score], **bounds: float) -> Gate:
    try:
        return kind.model_validate(bounds)
    except ValidationError as error:
        raise InvalidRequestError(f"{kind.__name__}: {describe_problems(error)}") from error


def _sum_loss(
    gate: Gate,
    trainer_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    denominator: float | torch.Tensor | None,
) -> LossOutput:
    shape = trainer_logprobs.shape
    for name, tensor in (("behaviour_logprobs", behaviour_logprobs), ("loss_mask", loss_mask)):
        if tensor.shape != shape:
            raise InvalidRequestError(
                f"{name} has shape {list(tensor.shape)}, but must have that of trainer_logprobs, {list(shape)}"
            )
    given = {
        "trainer_logprobs": trainer_logprobs,
        "behaviour_logprobs": behaviour_logprobs,
        "advantages": advantages,
        "loss_mask": loss_mask,
    }
    for name, tensor in given.items():
        if tensor.dtype.is_complex or (name.endswith("logprobs") and not tensor.dtype.is_floating_point):
            raise InvalidRequestError(
                f"{name} has dtype {tensor.dtype}, but logprobs must be floating-point, and other tensors must have "
                "a real dtype"
            )
        if tensor.device != trainer_logprobs.device:
            raise InvalidRequestError(
                f"{name} is on {tensor.device}, but trainer_logprobs on {trainer_logprobs.device}: move one of them"
            )
    if denominator is not None and not (
        (not isinstance(denominator, torch.Tensor) or denominator.numel() == 1) and 0 < float(denominator) < math.inf
    ):
        raise InvalidRequestError(f"denominator must be one number above 0 and finite, not {denominator}")
    per_target = advantages.reshape(*advantages.shape, *[1] * (len(shape) - advantages.dim()))
    sizes = list(per_target.shape)
    if len(sizes) != len(shape) or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        raise InvalidRequestError(
            f"advantages has shape {list(advantages.shape)}, but trainer_logprobs {list(shape)}: pass one advantage "
            f"per token, {list(shape)}, or per row, {list(shape[:1])}"
        )
    rows_N = (loss_mask.flatten() != 0).nonzero().squeeze(1)
    length = max(shape[-1] if shape else 1, 1)
    given_N = {
        "behaviour_logprobs": behaviour_logprobs.flatten().index_select(0, rows_N),
        "advantages": per_target.expand(shape).flatten().index_select(0, rows_N),
    }
    check_finite(rows_N, **given_N)
    trainer_N = trainer_logprobs.flatten().index_select(0, rows_N).double()
    targets = Targets(
        trainer_N=trainer_N,
        behaviour_N=given_N["behaviour_logprobs"].double(),
        proximal_N=trainer_N.detach(),
        advantages_N=given_N["advantages"].double(),
        segments_N=rows_N // length,
        num_segments=loss_mask.numel() // length,
    )
    gated = gate(targets, targets.log_ratio("trainer/behaviour"), targets.advantages_N != 0)
    # A call without targets has a loss of 0, not 0 / 0.
    loss = gated.loss_N.sum() / (max(len(rows_N), 1) if denominator is None else denominator)
    metrics = pull_metrics(targets, gated.pull_N) | mean_metrics(gated.fractions)
    return LossOutput(loss.to(trainer_logprobs.dtype), metrics)
