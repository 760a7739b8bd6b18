"""Adapters merged into the weights of a model, always from what these are without any adapter.

The base is the weights of the last update that was no adapter, or of the checkpoint. An adapter replaces the one
before; an update that is none takes it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from inflight.weights.adapters import adapter_names, changed_names
from inflight.wire import AdapterSpec, Manifest

Named = list[tuple[str, torch.Tensor]]


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter: AdapterSpec) -> torch.Tensor:
    """Return W0 + s B A in the dtype and on the device of W0, computed in float32 (float64 for a base in float64).

    W0 is [out, in], A [r, in], B [out, r]; Hu et al. 2021 (arXiv 2106.09685), equation 3.
    """
    dtype = torch.promote_types(base.dtype, torch.float32)
    a, b = a.to(base.device, dtype), b.to(base.device, dtype)
    return (base.to(dtype) + adapter.scale * (b @ a)).to(base.dtype)


@dataclass(frozen=True, slots=True)
class AdaptedLoad:
    """What an update means for the model: the tensors to load, and the base of those that are adapted then."""

    tensors: Named
    base: dict[str, torch.Tensor] = field(default_factory=dict)


class AdaptedWeights:
    """The base of the tensors that the adapter in force has changed. It changes with `loaded` only."""

    def __init__(self) -> None:
        self._base: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> Collection[str]:
        """The model's tensors that the adapter in force has changed."""
        return self._base.keys()

    def prepare(self, manifest: Manifest, arrived: Named, present: Callable[[str], torch.Tensor]) -> AdaptedLoad:
        """Return what to load for an update that has arrived; nothing changes.

        ``present`` gives a tensor of the model that no adapter has changed, in memory of its own. Tensors that the
        adapter in force has changed, and that this update does not, are loaded as they are without it.
        """
        base: dict[str, torch.Tensor] = {}
        loads = arrived
        if manifest.adapter is not None:
            sent: Mapping[str, torch.Tensor] = dict(arrived)
            loads = []
            for name in changed_names(manifest):
                base[name] = self._base[name] if name in self._base else present(name)
                a, b = (sent[part] for part in adapter_names(name.removesuffix(".weight")))
                loads.append((name, merged(base[name], a, b, manifest.adapter)))
        changed = {name for name, _ in loads}
        return AdaptedLoad([*loads, *((n, t) for n, t in self._base.items() if n not in changed)], base)

    def loaded(self, load: AdaptedLoad) -> None:
        """Note that the model holds what was prepared."""
        self._base = load.base
