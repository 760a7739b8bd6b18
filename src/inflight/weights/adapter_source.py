"""The adapter of a module as a source of publishes: two small matrices for each layer, instead of the weights.

Knows of PEFT what its layers look like, and never imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from inflight.contracts import AdapterSource
from inflight.errors import ConfigError, UnsupportedError
from inflight.types import WeightBucket
from inflight.weights.adapters import PREFIX, adapter_names
from inflight.weights.module import check_wire_dtype, gather_named, named_tensors, tensor_spec, unwrapped
from inflight.wire import AdapterSpec, BucketSpec, TensorSpec


class AdapterWeights(AdapterSource):
    """The low-rank adapter of a module that every rank holds whole.

    ``module`` is a model of PEFT, or any module whose adapted layers have ``lora_A`` [r, in] and ``lora_B`` [out, r]:
    parameters, linear layers without bias, or dicts of these by the name of the ``adapter``, as PEFT's. ``alpha`` and
    ``rslora`` are the scale's; None is what PEFT's config of the adapter says, or False. ``version`` is its owner's to
    set: add one after each optimizer step. ``wire_dtype`` as in `ModuleWeights`.

    Endpoints add the adapter to the weights of their last complete update, or of their checkpoint. Raises `ConfigError`
    if the module has no such layers or ``alpha`` is not known, `UnsupportedError` for ranks or scales that differ
    between layers, for other parameters that train, and for kinds of adapters that are no sum (DoRA, embeddings).
    """

    version: int = 0
    rank: int = 0
    world_size: int = 1

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        alpha: float | None = None,
        rslora: bool | None = None,
        adapter: str = "default",
        version: int = 0,
        wire_dtype: str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_wire_dtype(wire_dtype)
        self.version = version
        self.rank = rank
        self.world_size = world_size
        self._module = unwrapped(module)
        self._adapter = adapter
        self._buffers: dict[int, torch.Tensor] = {}
        self._wire_dtype = wire_dtype
        config = getattr(self._module, "peft_config", {}).get(adapter)
        alpha = getattr(config, "lora_alpha", None) if alpha is None else alpha
        rslora = bool(getattr(config, "use_rslora", False)) if rslora is None else rslora
        if alpha is None:
            raise ConfigError("alpha is not known: the module has no peft_config; give alpha, the scale's numerator")
        pairs = self._pairs()
        ranks = {int(a.shape[0]) for a, _ in pairs.values()} | {int(b.shape[1]) for _, b in pairs.values()}
        if len(ranks) != 1:
            raise UnsupportedError(f"adapters of several ranks {sorted(ranks)} are not known; use one rank for all")
        self._spec = AdapterSpec(rank=ranks.pop(), alpha=float(alpha), rslora=rslora)
        self._check_scales()
        self._check_others(pairs)

    def adapter_spec(self) -> AdapterSpec:
        return self._spec

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Names are those that PEFT saves."""
        return [tensor_spec(name, tensor, self._wire_dtype) for name, tensor in self._named()]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Never communicates; the tensors of a bucket lie side by side."""
        return gather_named(self._named(), self._wire_dtype, buckets, self._buffers, is_sender=self.rank == 0)

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        pairs = self._pairs()
        return [(name, t) for m, pair in pairs.items() for name, t in zip(adapter_names(m), pair, strict=True)]

    def _pairs(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B by the name that checkpoints give the module."""
        pairs = {}
        for name, layer in self._layers():
            a, b = (_matrix(name, getattr(layer, part), self._adapter) for part in ("lora_A", "lora_B"))
            if a is not None and b is not None:
                pairs[name.removeprefix(PREFIX)] = (a, b)
        if not pairs:
            raise ConfigError(f"the module has no layer with lora_A and lora_B of an adapter {self._adapter!r}")
        return pairs

    def _layers(self) -> Iterator[tuple[str, Any]]:
        for name, layer in self._module.named_modules():
            if hasattr(layer, "lora_A") and hasattr(layer, "lora_B"):
                yield name, layer

    def _check_scales(self) -> None:
        for name, layer in self._layers():
            if self._adapter in (getattr(layer, "lora_magnitude_vector", None) or {}):
                raise UnsupportedError(f"{name} is adapted by DoRA, which is no sum of weights; publish merged weights")
            if self._adapter in (getattr(layer, "lora_embedding_A", None) or {}):
                raise UnsupportedError(f"{name} is an adapted embedding; publish merged weights")
            scaling = getattr(layer, "scaling", None)
            scale = scaling.get(self._adapter) if isinstance(scaling, Mapping) else scaling
            if isinstance(scale, float | int) and abs(scale - self._spec.scale) > 1e-6 * abs(self._spec.scale):
                raise UnsupportedError(f"{name} is scaled by {scale}, the adapter by {self._spec.scale}")

    def _check_others(self, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        mine = {id(tensor) for pair in pairs.values() for tensor in pair}
        others = [n for n, t in named_tensors(self._module).items() if t.requires_grad and id(t) not in mine]
        if others:
            raise UnsupportedError(
                f"{len(others)} other parameters train, and the adapter's publish would leave them out: {others[:5]}"
            )


def _matrix(name: str, part: Any, adapter: str) -> torch.Tensor | None:
    """Return the matrix of one half of an adapter; None if the layer has none of that name."""
    if isinstance(part, torch.nn.ModuleDict | torch.nn.ParameterDict):
        if adapter not in part:
            return None
        part = part[adapter]
    if part is None or isinstance(part, torch.Tensor):
        return part
    if getattr(part, "bias", None) is not None:
        raise UnsupportedError(f"the adapter of {name} has a bias, which is no sum of weights; train it without")
    return part.weight  # type: ignore[no-any-return]
