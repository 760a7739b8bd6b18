"""The parameters of a model by the tensors that a checkpoint stores, which are also those that updates bring.

Most parameters are stored whole. Those that hold the matrices of all experts of a layer are stored one matrix at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from inflight.model.checkpoints import EXPERT_PARTS, stored_names, stored_shapes

Named = list[tuple[str, torch.Tensor]]


class StoredTensors:
    """What the parameters of a model are stored as. Holds the names alone, no tensors."""

    def __init__(self, model: Any) -> None:
        names = stored_names(model)
        self._parts: dict[str, tuple[str, ...]] = {}
        """By parameter, its stored tensors in order; of one that is stored whole, itself."""
        for name, parameter in model.named_parameters():
            self._parts[names[name]] = _expert_names(model, name, parameter) or (names[name],)
        self._owners = {part: name for name, parts in self._parts.items() for part in parts}

    def views(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return every stored tensor as a part of the parameters' memory."""
        return {part: view for name in self._parts for part, view in self._views(name, parameters[name]).items()}

    def view(self, part: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return one of them."""
        owner = self._owners[part]
        return self._views(owner, parameters[owner])[part]

    def assemble(self, tensors: Iterable[tuple[str, torch.Tensor]], present: Callable[[str], torch.Tensor]) -> Named:
        """Return stored tensors as whole parameters; ``present`` returns a parameter of which some were not sent."""
        joined: Named = []
        of_owner: dict[str, dict[str, torch.Tensor]] = {}
        for part, tensor in tensors:
            owner = self._owners[part]
            if self._parts[owner] == (part,):
                joined.append((owner, tensor))
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
            joined.append((owner, whole))
        return joined

    def _views(self, name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = self._parts[name]
        if len(parts) == 1:
            return {name: whole}
        num_matrices = len(parts) // len(whole)
        pieces = [piece for expert in whole.detach().unbind(0) for piece in expert.chunk(num_matrices)]
        return dict(zip(parts, pieces, strict=True))


def _expert_names(model: Any, name: str, parameter: torch.Tensor) -> tuple[str, ...]:
    """Return the stored names of a parameter of all experts, expert by expert; empty if it is none."""
    kinds = EXPERT_PARTS.get(".".join(name.split(".")[-2:]))
    if kinds is None:
        return ()
    prefix = name.rpartition(".")[0]
    names = tuple(f"{prefix}.{expert}.{kind}.weight" for expert in range(len(parameter)) for kind in kinds)
    return names if set(names) == set(stored_shapes(model, name, parameter, ())) else ()
