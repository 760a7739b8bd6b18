"""New memory for the parameters of a model: made ready beside the model, then exchanged for the old at once.

Knows nothing of updates and engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

Ready = list[tuple[torch.nn.Parameter, torch.Tensor]]
"""Parameters with the tensors that are to become their memory."""

_ALIGNMENT_BYTES = 64
"""What torch aligns its own memory to."""


def made_ready(parameters: Mapping[str, torch.nn.Parameter], tensors: Iterable[tuple[str, torch.Tensor]]) -> Ready:
    """Return the parameters of these names with tensors in their dtype and layout, on their device.

    A tensor that fits already is taken as it is: nothing may write to it from now on. The others are copied. Changes
    nothing, and may run in any thread. Raises `ValueError` for a tensor of another shape.
    """
    return [(parameters[name], _fitted(tensor, parameters[name], name)) for name, tensor in tensors]


def exchange(ready: Ready) -> None:
    """Give each parameter its new memory. Modules that share a parameter share the new memory too.

    Copies nothing. The old memory is free once nothing else refers to it.
    """
    for parameter, tensor in ready:
        parameter.data = tensor


def _fitted(tensor: torch.Tensor, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
    if tensor.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {tuple(parameter.shape)}, not {tuple(tensor.shape)}")
    fitted = tensor.detach().to(parameter.device, parameter.dtype)
    if fitted.stride() != parameter.stride() or fitted.data_ptr() % _ALIGNMENT_BYTES:
        return torch.empty_like(parameter, requires_grad=False).copy_(fitted)
    return fitted
