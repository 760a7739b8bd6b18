"""The parameters of a model that is served, and other memory for them: made ready apart, then exchanged or copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from inflight.engines.embedded.stored_parameters import StoredTensors
from inflight.model.checkpoints import stored_names
from inflight.weights.encode.transit import synchronise_stream

Parameters = Mapping[str, torch.nn.Parameter]

HOST = torch.device("cpu")
_ALIGNMENT_BYTES = 64
"""What torch aligns its own memory to."""


class ServedParameters:
    """The parameters of a model, by their names in checkpoints, and the device that they belong on.

    With ``keeps_addresses`` their memory is only ever written to, not exchanged.
    """

    def __init__(self, model: Any, *, keeps_addresses: bool) -> None:
        self.model = model
        self.keeps_addresses = keeps_addresses
        self.stored = StoredTensors(model)
        names = stored_names(model)
        self.by_name = {names[name]: parameter for name, parameter in model.named_parameters()}
        first = next(model.parameters())
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.replaced: list[torch.Tensor] = []
        """Memory that `load` has replaced, until the caller clears it."""

    def load(self, ready: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make tensors that `prepare_tensors` returned the parameters' memory, or copy them if addresses must stay."""
        if self.keeps_addresses:
            overwrite(self.by_name, ready)
        else:
            self.replaced += exchange(self.by_name, ready)

    def move_to_host(self) -> None:
        move(self.by_name, HOST)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep what was freed for itself

    def move_back(self) -> None:
        move(self.by_name, self.device)


def prepare_tensors(
    parameters: Parameters, tensors: Iterable[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """Return tensors in the dtype and layout of the parameters of these names, on their device.

    A tensor that fits already is taken as it is: nothing may write to it from now on. The others are copied. Changes
    nothing, and may run in any thread. Raises `ValueError` for a tensor of another shape.
    """
    return [(name, _fit(tensor, parameters[name], name)) for name, tensor in tensors]


def exchange(parameters: Parameters, ready: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Make tensors that are ready the memory of the parameters of these names; return the memory before.

    Copies nothing. Modules that share a parameter share its new memory. Freeing gigabytes takes a while, so the caller
    lets the old memory go when sampling has resumed.
    """
    replaced = []
    for name, tensor in ready:
        replaced.append(parameters[name].data)
        parameters[name].data = tensor
    return replaced


def move(parameters: Parameters, device: torch.device) -> None:
    """Put the memory of every parameter on a device, in the same layout; those that are there already stay.

    If it raises, some have moved; calling it again with either device continues from there.
    """
    for parameter in parameters.values():
        parameter.data = parameter.data.to(device)


def overwrite(parameters: Parameters, ready: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy tensors that are ready into the memory of the parameters of these names, whose addresses stay.

    On return the device has copied them, and their memory may be used for something else.
    """
    devices = set()
    for name, tensor in ready:
        parameters[name].data.copy_(tensor)
        devices.add(tensor.device)
    for device in devices:
        synchronise_stream(device)


def _fit(tensor: torch.Tensor, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
    if tensor.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {tuple(parameter.shape)}, not {tuple(tensor.shape)}")
    fitted = tensor.detach().to(parameter.device, parameter.dtype)
    if fitted.stride() != parameter.stride() or fitted.data_ptr() % _ALIGNMENT_BYTES:
        return torch.empty_like(parameter, requires_grad=False).copy_(fitted)
    return fitted
