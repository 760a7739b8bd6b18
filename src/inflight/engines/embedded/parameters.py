"""The parameters of a served model: how checkpoints store them, and how new values are prepared and swapped in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from inflight.engines.embedded.packed_linears import PackedLinears
from inflight.model.checkpoints import EXPERT_PARTS, stored_names, stored_shapes
from inflight.weights.encode.transit import synchronise_stream

Named = list[tuple[str, torch.Tensor]]
Parameters = Mapping[str, torch.nn.Parameter]

HOST = torch.device("cpu")
_ALIGNMENT_BYTES = 64
"""The alignment of torch's own allocations."""


class StoredTensors:
    """Maps each parameter of a model to the stored tensors that make it up, by name. Holds no tensors itself.

    Stored tensors are the tensors of a checkpoint; updates send the same tensors. Most parameters are stored whole. A
    parameter that holds the matrices of all experts in a layer is stored as one tensor per matrix.
    """

    def __init__(self, model: Any) -> None:
        names = stored_names(model)
        self._parts: dict[str, tuple[str, ...]] = {}
        """The names of each parameter's stored tensors, in order; for a parameter that is stored whole, its own name.
        """
        for name, parameter in model.named_parameters():
            self._parts[names[name]] = _expert_names(model, name, parameter) or (names[name],)
        self._owners = {part: name for name, parts in self._parts.items() for part in parts}

    def views(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return every stored tensor as a part of the parameters' memory."""
        return {part: view for name in self._parts for part, view in self._views(name, parameters[name]).items()}

    def view(self, part: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return one stored tensor as a part of the parameters' memory."""
        owner = self._owners[part]
        return self._views(owner, parameters[owner])[part]

    def assemble(self, tensors: Iterable[tuple[str, torch.Tensor]], present: Callable[[str], torch.Tensor]) -> Named:
        """Assemble stored tensors into whole parameters.

        If some stored tensors of a parameter were not sent, ``present`` provides its current value.
        """
        assembled: Named = []
        of_owner: dict[str, dict[str, torch.Tensor]] = {}
        for part, tensor in tensors:
            owner = self._owners[part]
            if self._parts[owner] == (part,):
                assembled.append((owner, tensor))
            else:
                of_owner.setdefault(owner, {})[part] = tensor
        for owner, sent in of_owner.items():
            whole = torch.empty_like(now := present(owner), requires_grad=False)
            if len(sent) < len(self._parts[owner]):
                whole.copy_(now)
            for part, view in self._views(owner, whole).items():
                if part in sent:
                    if sent[part].shape != view.shape:
                        raise ValueError(f"{part} has the shape {tuple(view.shape)}, not {tuple(sent[part].shape)}")
                    view.copy_(sent[part])
            assembled.append((owner, whole))
        return assembled

    def _views(self, name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = self._parts[name]
        if len(parts) == 1:
            return {name: whole}
        num_matrices = len(parts) // len(whole)
        pieces = [piece for expert in whole.detach().unbind(0) for piece in expert.chunk(num_matrices)]
        return dict(zip(parts, pieces, strict=True))


def _expert_names(model: Any, name: str, parameter: torch.Tensor) -> tuple[str, ...]:
    """Return the stored names of a parameter that holds all experts, expert by expert; empty for other parameters."""
    kinds = EXPERT_PARTS.get(".".join(name.split(".")[-2:]))
    if kinds is None:
        return ()
    prefix = name.rpartition(".")[0]
    names = tuple(f"{prefix}.{expert}.{kind}.weight" for expert in range(len(parameter)) for kind in kinds)
    return names if set(names) == set(stored_shapes(model, name, parameter, ())) else ()


class PreparedParameters(NamedTuple):
    """New values of parameters: tensors that fit the model, and packed weights for the linear layers among them."""

    tensors: Named
    packed: dict[str, torch.Tensor]


class ServedParameters:
    """The parameters of a served model, by their checkpoint names, and the device to which they belong.

    With ``keeps_addresses``, new values are copied into the existing memory instead of replacing it.
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
        """Memory that `load` has replaced and the caller has not cleared yet."""
        self._linears = None if keeps_addresses else PackedLinears(model, self.by_name)

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> PreparedParameters:
        """Return new values, prepared for `load`.

        Changes nothing, and may run in any thread. Raises the same errors as `prepare_tensors`.
        """
        ready = prepare_tensors(self.by_name, tensors)
        return PreparedParameters(ready, {} if self._linears is None else self._linears.pack(ready))

    def load(self, ready: PreparedParameters) -> None:
        """Make prepared tensors the parameters' memory, or copy them if addresses must not change."""
        if self._linears is None:
            overwrite(self.by_name, ready.tensors)
        else:
            self.replaced += exchange(self.by_name, ready.tensors)
            self._linears.load(ready.packed)

    def move_to_host(self) -> None:
        move(self.by_name, HOST)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep the freed memory in its cache

    def move_back(self) -> None:
        move(self.by_name, self.device)


def prepare_tensors(parameters: Parameters, tensors: Iterable[tuple[str, torch.Tensor]]) -> Named:
    """Return tensors converted to the dtype, layout and device of the parameters with the same names.

    A tensor that already fits is returned without copying, and nothing may write to it from now on. Any other tensor is
    copied. Changes nothing, and may run in any thread. Raises `ValueError` for a tensor of a different shape.
    """
    return [(name, _fit(tensor, parameters[name], name)) for name, tensor in tensors]


def exchange(parameters: Parameters, ready: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Make prepared tensors the memory of the parameters with the same names, and return the previous memory.

    Copies nothing. Modules that share a parameter share its new memory. Freeing gigabytes takes a while, so the caller
    frees the old memory after sampling has resumed.
    """
    replaced = []
    for name, tensor in ready:
        replaced.append(parameters[name].data)
        parameters[name].data = tensor
    return replaced


def move(parameters: Parameters, device: torch.device) -> None:
    """Move the memory of every parameter to a device, in the same layout, unless it is there already.

    If it raises, some parameters have moved; it may be called again with either device.
    """
    for parameter in parameters.values():
        parameter.data = parameter.data.to(device)


def overwrite(parameters: Parameters, ready: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy prepared tensors into the memory of the parameters with the same names. Addresses do not change.

    On return, the device has finished copying, and the memory of ``ready`` may be reused.
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
