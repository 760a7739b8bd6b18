"""Raises errors for second derivatives of functions whose backward pass cannot be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from inflight.errors import UnsupportedError


def only_once(backward: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., Any]:
    """Return a backward function that raises an error if it is itself differentiated with respect to any input.

    torch's ``once_differentiable`` raises only if the upstream gradient requires a gradient, and only in a backward
    pass to all leaves, so second derivatives of a plain sum would silently be 0.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not torch.is_grad_enabled():
            return gradients
        origins = [tensor for tensor in (*upstream, *saved) if tensor is not None and tensor.requires_grad]
        present = [gradient for gradient in gradients if gradient is not None]
        refusing = iter(_Refused.apply(len(present), *present, *origins))  # type: ignore[no-untyped-call]
        return tuple(None if gradient is None else next(refusing) for gradient in gradients)

    return wrapper


def without_graph(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward function that raises `UnsupportedError` if the gradients' graph is requested (create_graph).

    Use it for gradients that are sent to other processes, because a graph cannot span processes.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "gradients that pass between pipeline stages have no second derivative: omit create_graph"
            )
        return backward(ctx, *upstream)

    return wrapper


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_gradients: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors[:num_gradients]

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, ...]:
        raise UnsupportedError(
            "the chunked head has no second derivative: to differentiate logprobs twice, compute "
            "them with torch.log_softmax over the whole vocabulary"
        )
