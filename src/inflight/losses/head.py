"""Logprobs of given tokens from hidden states, without ever holding the logits of all of them.

The module knows nothing of losses, models or packing.

Shape suffixes: N targets, C targets of one chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def chunked_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    chunk_size: int = 1024,
) -> torch.Tensor:
    """Return log softmax((hidden weight^T + bias) / temperature) at the targets, [N], differentiable once.

    Computed in float32 whatever the inputs (in float64 if the hidden states are float64), autocast or not. Logits of at
    most ``chunk_size`` targets exist at a time; the backward computes them again, for targets with a gradient other
    than 0 only. Gradients go to hidden states, weight and bias; those of weight and bias are accumulated in the dtype
    of the computation and rounded to their own once. A weight of lower precision is copied once per pass.
    """
    logprobs_N: torch.Tensor = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, targets_N, temperature_N, chunk_size
    )
    return logprobs_N


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature_N: torch.Tensor,
        chunk_size: int,
    ) -> torch.Tensor:
        dtype = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        wide_VH = weight_VH.to(dtype)
        logprobs_N = hidden_NH.new_empty(len(targets_N), dtype=dtype)
        normaliser_N = torch.empty_like(logprobs_N)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for start in range(0, len(targets_N), chunk_size):
                rows = slice(start, start + chunk_size)
                logits_CV = _scaled_logits(hidden_NH[rows].to(dtype), wide_VH, bias_V, temperature_N[rows])
                normaliser_N[rows] = logits_CV.logsumexp(1)
                logprobs_N[rows] = logits_CV.gather(1, targets_N[rows].unsqueeze(1)).squeeze(1) - normaliser_N[rows]
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, normaliser_N)
        ctx.chunk_size = chunk_size
        return logprobs_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperature_N, normaliser_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = normaliser_N.dtype
        wide_VH = weight_VH.to(dtype)
        grad_hidden_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(wide_VH) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if needs_bias else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for rows_C in torch.split(grad_logprobs_N.nonzero().squeeze(1), ctx.chunk_size):
                hidden_CH = hidden_NH[rows_C].to(dtype)
                logits_CV = _scaled_logits(hidden_CH, wide_VH, bias_V, temperature_N[rows_C])
                probabilities_CV = logits_CV.sub_(normaliser_N[rows_C].unsqueeze(1)).exp_()
                # d logprob / d logits = (1[v = target] - p_v) / temperature
                scale_C = (grad_logprobs_N[rows_C] / temperature_N[rows_C].to(dtype)).unsqueeze(1)
                grad_logits_CV = probabilities_CV.mul_(-scale_C)
                grad_logits_CV.scatter_add_(1, targets_N[rows_C].unsqueeze(1), scale_C)
                if grad_hidden_NH is not None:
                    grad_hidden_NH[rows_C] = (grad_logits_CV @ wide_VH).to(hidden_NH.dtype)
                if grad_weight_VH is not None:
                    grad_weight_VH.addmm_(grad_logits_CV.t(), hidden_CH)
                if grad_bias_V is not None:
                    grad_bias_V += grad_logits_CV.sum(0)
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _scaled_logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, temperature_C: torch.Tensor
) -> torch.Tensor:
    logits_CV = hidden_CH @ weight_VH.t()
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV.div_(temperature_C.to(logits_CV.dtype).unsqueeze(1))
