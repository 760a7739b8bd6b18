"""Logprobs of given tokens from hidden states, without holding all logits at once.

Logits are computed in tiles, each for some targets and a part of the vocabulary, in the forward pass and again in the
backward pass (two passes, for any loss). `one_pass` computes the logits of a few targets once and differentiates
immediately, for losses that allow it. `inflight.losses.products` decides how tiles are multiplied.

Shape suffixes: N targets, C targets of one tile, K scored tokens of each target, H hidden, V vocabulary, W the tile's
part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inflight.errors import InvalidRequestError
from inflight.losses.head_arguments import KeptTokens, check_arguments, check_kept, dtype_of, kept_of
from inflight.losses.products import add_product, halves, is_narrow
from inflight.losses.second_derivatives import only_once
from inflight.losses.tiles import Tiles, columns_of

CHUNK_SIZE = 1024
VOCAB_CHUNK_SIZE = 4096


def chunked_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    kept: KeptTokens | None = None,
    chunk_size: int = CHUNK_SIZE,
    vocab_chunk_size: int = VOCAB_CHUNK_SIZE,
) -> torch.Tensor:
    """Return log softmax((hidden weight^T + bias) / temperature) at the targets, [N], differentiable once.

    Targets [N, K] are K tokens of each distribution, possibly repeated; the result is then [N, K].

    The computation is in float32, or in float64 if the hidden states are float64, with or without autocast. On NVIDIA
    GPUs, bfloat16 inputs are multiplied without a cast and summed in float32; `inflight.losses.products` states the
    accuracy. Logits of at most ``chunk_size`` targets and ``vocab_chunk_size`` tokens are in memory at a time; the
    backward pass recomputes them only for targets with a nonzero gradient. Hidden states, weight and bias receive
    gradients, which are accumulated in the dtype of the computation and rounded once. With ``kept``, the softmax is
    over those tokens only.

    Raises `InvalidRequestError` if shapes, dtypes or devices do not match, a target is outside the vocabulary or the
    ``kept`` tokens, a temperature is not above 0 and finite, or a chunk is smaller than 1. A second derivative raises
    `UnsupportedError`.
    """
    sizes = chunk_size, vocab_chunk_size
    check_arguments(hidden_NH, weight_VH, targets_N, temperature_N, bias_V, *sizes, several=kept is None)
    check_kept(kept, targets_N, len(weight_VH))
    # The result must not be a view: FSDP2 refuses to hook one.
    return _Head.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden_NH,
        weight_VH,
        bias_V,
        targets_N,
        temperature_N,
        kept,
        *sizes,
        False,
        is_narrow(hidden_NH, weight_VH),
    )[0]


def chunked_logprobs_and_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    kept: KeptTokens | None = None,
    chunk_size: int = CHUNK_SIZE,
    vocab_chunk_size: int = VOCAB_CHUNK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `chunked_logprobs` and the exact entropy of each distribution in nats, [N]; both differentiable once."""
    check_arguments(hidden_NH, weight_VH, targets_N, temperature_N, bias_V, chunk_size, vocab_chunk_size)
    check_kept(kept, targets_N, len(weight_VH))
    return _Head.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden_NH,
        weight_VH,
        bias_V,
        targets_N,
        temperature_N,
        kept,
        chunk_size,
        vocab_chunk_size,
        True,
        is_narrow(hidden_NH, weight_VH),
    )


def one_pass(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature_N: torch.Tensor,
    loss_of: Callable[[torch.Tensor, slice], torch.Tensor],
    *,
    bias_V: torch.Tensor | None = None,
    chunk_size: int = CHUNK_SIZE // 4,
) -> torch.Tensor:
    """Return the sum of ``loss_of(logprobs_C, rows)`` over chunks of targets, computing its gradients in the same pass.

    ``loss_of`` takes the logprobs of some targets and their rows, and returns these targets' part of the loss, a
    scalar. The loss must therefore be a sum over targets in which no term depends on the logprob of another target.
    Logits of ``chunk_size`` targets and the whole vocabulary are in memory at a time and are computed once, which takes
    a third less arithmetic than two passes. A factor that later multiplies the result is applied to the finished
    gradients. Raises the same errors as `chunked_logprobs`, and `InvalidRequestError` if a part of the loss is not a
    scalar.
    """
    check_arguments(hidden_NH, weight_VH, targets_N, temperature_N, bias_V, chunk_size)
    # Has no elements, but is in the graph of the inputs: keeping it alive does not keep the inputs alive.
    origin = sum(tensor[:0].sum() for tensor in (hidden_NH, weight_VH, bias_V) if tensor is not None)
    return _OnePass.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden_NH,
        weight_VH,
        bias_V,
        targets_N,
        temperature_N,
        loss_of,
        chunk_size,
        origin,
        is_narrow(hidden_NH, weight_VH),
    )


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature_N: torch.Tensor,
        kept: KeptTokens | None,
        chunk_size: int,
        vocab_chunk_size: int,
        with_entropy: bool,
        narrow: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        dtype = dtype_of(hidden_NH)
        targets_NK = _per_row(targets_N)
        largest_N = torch.full(targets_NK.shape[:1], torch.finfo(dtype).min, dtype=dtype, device=hidden_NH.device)
        total_N, weighted_N = torch.zeros_like(largest_N), torch.zeros_like(largest_N)
        target_logits_NK = torch.full(targets_NK.shape, -torch.inf, dtype=dtype, device=hidden_NH.device)
        tiles = Tiles(hidden_NH, weight_VH, bias_V, temperature_N, kept, chunk_size, vocab_chunk_size, narrow)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for columns, weight_WH in tiles.columns():
                for rows, logits_CW in tiles.logits(columns, weight_WH):
                    is_here_CK, column_CK = columns_of(targets_NK[rows], columns)
                    found_CK = logits_CW.gather(1, column_CK)
                    target_logits_NK[rows] = torch.where(is_here_CK, found_CK, target_logits_NK[rows])
                    before_C = largest_N[rows].clone()
                    shift_C = torch.maximum(before_C, logits_CW.amax(1))
                    # Sums so far are relative to the largest logit so far.
                    rescale_C = (before_C - shift_C).exp_()
                    if with_entropy:
                        weighted_N[rows] *= rescale_C
                        weighted_N[rows] += (before_C - shift_C) * total_N[rows] * rescale_C
                    total_N[rows] *= rescale_C
                    logits_CW.sub_(shift_C.unsqueeze(1))
                    if with_entropy:
                        powers_CW = logits_CW.exp()
                        total_N[rows] += powers_CW.sum(1)
                        weighted_N[rows] += powers_CW.mul_(logits_CW.nan_to_num_(neginf=0.0)).sum(1)
                    else:
                        total_N[rows] += logits_CW.exp_().sum(1)
                    largest_N[rows] = shift_C
        normaliser_N = largest_N + total_N.log()
        logprobs_NK = target_logits_NK.sub_(normaliser_N.unsqueeze(1))
        # Entropy: log of the sum minus the mean logit, both relative to the largest.
        entropy_N = total_N.log() - weighted_N / total_N if with_entropy else None
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_NK, temperature_N, normaliser_N, entropy_N)
        ctx.kept, ctx.sizes, ctx.narrow = kept, (chunk_size, vocab_chunk_size), narrow
        return logprobs_NK if targets_N.dim() == 2 else logprobs_NK[:, 0].clone(), entropy_N

    @staticmethod
    @only_once
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_NK, temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = normaliser_N.dtype
        if grad_logprobs_N is None:
            grad_logprobs_NK = torch.zeros(targets_NK.shape, dtype=dtype, device=hidden_NH.device)
        else:
            grad_logprobs_NK = _per_row(grad_logprobs_N)
        active_N = (grad_logprobs_NK != 0).any(1)
        if grad_entropy_N is not None:
            active_N |= grad_entropy_N != 0
        # From here on N counts only targets with a gradient. Reading their number is the only GPU synchronization.
        rows_N = active_N.nonzero().squeeze(1)
        everything = len(rows_N) == len(active_N)

        def select(values_N: torch.Tensor) -> torch.Tensor:
            return values_N if everything else values_N[rows_N]

        targets_NK, normaliser_N = select(targets_NK), select(normaliser_N)
        # Gradients of the logits before the division by the temperature.
        inverse_N = 1 / select(temperature_N).to(dtype)
        gradient_NK = select(grad_logprobs_NK).to(dtype) * inverse_N.unsqueeze(1)
        gradient_N = gradient_NK.sum(1)
        weight_N = None
        if grad_entropy_N is not None:
            weight_N, entropy_N = select(grad_entropy_N).to(dtype) * inverse_N, select(entropy_N)
        kept = None if ctx.kept is None else kept_of(ctx.kept, rows_N)
        narrow = ctx.narrow
        hidden_NH, temperature_N = select(hidden_NH), select(temperature_N)
        tiles = Tiles(hidden_NH, weight_VH, bias_V, temperature_N, kept, ctx.sizes[0], ctx.sizes[1], narrow)
        pulled_NH = torch.zeros(tiles.hidden_NH.shape, dtype=dtype, device=hidden_NH.device) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if needs_bias else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for columns, weight_WH in tiles.columns():
                wide_WH = None
                if grad_weight_VH is not None:
                    is_wide = weight_VH.dtype == dtype
                    wide_WH = grad_weight_VH[columns] if is_wide else torch.zeros_like(weight_WH, dtype=dtype)
                for rows, logits_CW in tiles.logits(columns, weight_WH):
                    # d logprob / d logit = 1[token = target] - p, d entropy / d logit = -p (log p + entropy)
                    logprobs_CW = logits_CW.sub_(normaliser_N[rows].unsqueeze(1))
                    if weight_N is None:
                        pull_CW = logprobs_CW.exp_().mul_(-gradient_N[rows].unsqueeze(1))
                    else:
                        probabilities_CW = logprobs_CW.exp()
                        pull_CW = logprobs_CW.nan_to_num_(neginf=0.0).add_(entropy_N[rows].unsqueeze(1))
                        pull_CW.mul_(weight_N[rows].unsqueeze(1)).add_(gradient_N[rows].unsqueeze(1))
                        pull_CW.mul_(probabilities_CW).neg_()
                    is_here_CK, column_CK = columns_of(targets_NK[rows], columns)
                    pull_CW.scatter_add_(1, column_CK, torch.where(is_here_CK, gradient_NK[rows], 0.0))
                    if grad_bias_V is not None:
                        grad_bias_V[columns] += pull_CW.sum(0)
                    grad_rows_CH = None if pulled_NH is None else pulled_NH[rows]
                    _pull(pull_CW, tiles.hidden_NH[rows], weight_WH, grad_rows_CH, wide_WH, narrow=narrow)
                if grad_weight_VH is not None and wide_WH is not None and weight_VH.dtype != dtype:
                    grad_weight_VH[columns] = wide_WH.to(weight_VH.dtype)
        grad_hidden_NH = None
        if pulled_NH is not None:
            grad_hidden_NH = pulled_NH.to(hidden_NH.dtype)
            if not everything:
                everyone_NH = grad_hidden_NH.new_zeros(len(active_N), grad_hidden_NH.shape[1])
                grad_hidden_NH = everyone_NH.index_copy_(0, rows_N, grad_hidden_NH)
        narrow_bias_V = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_NH, grad_weight_VH, narrow_bias_V, *[None] * 7


def _per_row(values_N: torch.Tensor) -> torch.Tensor:
    """Return values [N] or [N, K] as [N, K]."""
    return values_N if values_N.dim() == 2 else values_N.unsqueeze(1)


def _pull(
    pull_CW: torch.Tensor,
    hidden_CH: torch.Tensor,
    weight_WH: torch.Tensor,
    grad_hidden_CH: torch.Tensor | None,
    grad_weight_WH: torch.Tensor | None,
    *,
    narrow: bool,
) -> None:
    """Add a tile's contribution to the gradients of hidden states and weight; may overwrite ``pull_CW``."""
    for part_CW in halves(pull_CW) if narrow else (pull_CW,):
        if grad_hidden_CH is not None:
            add_product(grad_hidden_CH, part_CW, weight_WH)
        if grad_weight_WH is not None:
            add_product(grad_weight_WH, part_CW.t(), hidden_CH)


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature_N: torch.Tensor,
        loss_of: Callable[[torch.Tensor, slice], torch.Tensor],
        chunk_size: int,
        origin: torch.Tensor,
        narrow: bool,
    ) -> torch.Tensor:
        dtype = dtype_of(hidden_NH)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=dtype, device=hidden_NH.device)
        grad_hidden_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=dtype) if needs_bias and bias_V is not None else None
        size = len(weight_VH)
        tiles = Tiles(hidden_NH, weight_VH, bias_V, temperature_N, None, chunk_size, size, narrow)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            ((columns, whole_VH),) = tiles.columns()
            for rows, logits_CV in tiles.logits(columns, whole_VH):
                targets_C = targets_N[rows].unsqueeze(1)
                chosen_C = logits_CV.gather(1, targets_C).squeeze(1)
                shift_C = logits_CV.amax(1)
                powers_CV = logits_CV.sub_(shift_C.unsqueeze(1)).exp_()
                sums_C = powers_CV.sum(1)
                with torch.enable_grad():
                    leaf_C = (chosen_C - shift_C - sums_C.log()).requires_grad_()
                    part = _scalar(loss_of(leaf_C, rows), rows)
                    (gradient_C,) = torch.autograd.grad(part, leaf_C, allow_unused=True, materialize_grads=True)
                total += part.detach()
                gradient_C = gradient_C / temperature_N[rows].to(dtype)
                hidden_CH, active_C = hidden_NH[rows], None
                if hidden_NH.device.type == "cpu":
                    active_C = gradient_C.nonzero().squeeze(1)
                    if len(active_C) == 0:
                        continue
                    if len(active_C) < _DENSE * len(gradient_C):
                        powers_CV, sums_C, hidden_CH = powers_CV[active_C], sums_C[active_C], hidden_CH[active_C]
                        targets_C, gradient_C = targets_C[active_C], gradient_C[active_C]
                    else:
                        active_C = None
                pull_CV = powers_CV.mul_((-gradient_C / sums_C).unsqueeze(1))
                pull_CV.scatter_add_(1, targets_C, gradient_C.unsqueeze(1))
                if grad_bias_V is not None:
                    grad_bias_V += pull_CV.sum(0)
                pulled_CH = torch.zeros_like(hidden_CH, dtype=dtype) if needs_hidden else None
                _pull(pull_CV, hidden_CH, whole_VH, pulled_CH, grad_weight_VH, narrow=narrow)
                if grad_hidden_NH is not None and pulled_CH is not None:
                    where = rows if active_C is None else rows.start + active_C
                    grad_hidden_NH[where] = pulled_CH.to(hidden_NH.dtype)
        ctx.save_for_backward(
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            origin,
        )
        return total

    @staticmethod
    @only_once
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Scaled in place, because a copy would be as large as the weight's gradient itself. The factor is read,
        # because waiting for the number costs a GPU less than another pass over that gradient.
        factor = upstream.item()
        scaled = [
            gradient if gradient is None or factor == 1.0 else gradient.mul_(upstream)
            for gradient in ctx.saved_tensors[:3]
        ]
        return *scaled, *[None] * 6


_DENSE = 0.75
"""Share of targets with a gradient above which skipping the others costs more than it saves. On a GPU, `one_pass` skips
none: reading their number would make every tile wait for the previous one.
"""


def _scalar(part: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return a part of the loss as a differentiable scalar, even if it is a constant."""
    if not isinstance(part, torch.Tensor) or part.dim() or not part.dtype.is_floating_point:
        what = f"{list(part.shape)} of {part.dtype}" if isinstance(part, torch.Tensor) else repr(part)
        raise InvalidRequestError(
            f"loss_of returned {what} for targets {rows.start} to {rows.stop - 1}: it must return their part of the "
            "loss as a floating-point scalar"
        )
    return part if part.requires_grad else part.detach().requires_grad_()
