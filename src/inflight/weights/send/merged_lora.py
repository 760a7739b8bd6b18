"""A LoRA as a partial update: for endpoints that do not support LoRA, the publisher sends the merged weights.

Any `LoraSource` can be merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inflight.contracts import LoraSource, PartialWeightSource
from inflight.types import WeightBucket
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.encode.lora_tensors import PARTS, PREFIX
from inflight.weights.receive.base_weights import BaseWeights, merge_lora
from inflight.wire import BucketSpec, TensorSpec


class MergedLora(PartialWeightSource):
    """The weights that a LoRA changes, merged on rank 0. The other ranks gather the LoRA itself with `gather_only`.

    ``base`` provides the weights without the LoRA. ``names`` are the names of all tensors of the model.
    ``bucket_bytes`` is the bucket size with which the other ranks gather.
    """

    def __init__(
        self, source: LoraSource, base: BaseWeights, names: Sequence[str], wire_dtype: str, bucket_bytes: int
    ) -> None:
        self._source = source
        self._base = base
        self._names = names
        self._dtype: torch.dtype = getattr(torch, wire_dtype)
        self._plan = plan_buckets(source.parameter_specs(), bucket_bytes)
        pairs = _pairs(source.parameter_specs())
        self._specs = [
            TensorSpec.model_validate({"name": name, "dtype": wire_dtype, "shape": (b.shape[0], a.shape[1])})
            for name, (a, b) in pairs.items()
        ]

    @property
    def rank(self) -> int:
        return self._source.rank

    @property
    def world_size(self) -> int:
        return self._source.world_size

    @property
    def version(self) -> int:
        return self._source.version

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Return the specs of the full weights that the LoRA changes."""
        return self._specs

    def frozen_names(self) -> Sequence[str]:
        sent = {spec.name for spec in self._specs}
        return [name for name in self._names if name not in sent]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Gather the LoRA as the other ranks do, ignoring ``buckets``, and read the base on this host."""
        weights = self._weights()
        try:
            for bucket in buckets:
                specs = tuple(self._specs[bucket.start : bucket.stop])
                yield WeightBucket(bucket.index, specs, tuple(next(weights) for _ in specs))
        finally:
            for _ in weights:  # the other ranks wait for the rest
                pass

    @torch.no_grad()
    def _weights(self) -> Iterator[torch.Tensor]:
        spec = self._source.lora_spec()
        halves: dict[str, torch.Tensor] = {}
        for bucket in self._source.gather_weights(self._plan):
            for part, tensor in zip(bucket.specs, bucket.tensors, strict=True):
                name, half = _weight_of(part.name)
                other = halves.pop(name, None)
                if other is None:
                    halves[name] = tensor.clone()  # its bucket may be overwritten before the other half arrives
                    continue
                a, b = (tensor, other) if half == PARTS[0] else (other, tensor)
                yield merge_lora(self._base.tensor(name).to(tensor.device), a, b, spec).to(self._dtype)


def _pairs(specs: Sequence[TensorSpec]) -> dict[str, tuple[TensorSpec, TensorSpec]]:
    """Return the specs of A and B, keyed by the weight that they change, in the order in which pairs are complete."""
    halves: dict[str, dict[str, TensorSpec]] = {}
    pairs = {}
    for spec in specs:
        name, half = _weight_of(spec.name)
        found = halves.setdefault(name, {})
        found[half] = spec
        if len(found) == len(PARTS):
            pairs[name] = (found[PARTS[0]], found[PARTS[1]])
    return pairs


def _weight_of(part: str) -> tuple[str, str]:
    """Return the name of the weight that a matrix of a LoRA changes, and which of the two matrices it is."""
    half = next(half for half in PARTS if part.endswith(half))
    return f"{part.removeprefix(PREFIX).removesuffix(half)}.weight", half
