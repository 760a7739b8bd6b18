"""The weights of a plain module as a source of publishes, for loops that have no `TrainerWorker`.

The module knows nothing of trainers, engines or how weights travel; of transformers it knows one attribute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from inflight.errors import ConfigError, UnsupportedError
from inflight.types import WeightBucket
from inflight.weights.packing import unpack
from inflight.wire import DTYPE_SIZES, BucketSpec, TensorSpec


class ModuleWeights:
    """The weights of a module that every rank holds whole. Satisfies `inflight.contracts.WeightSource`.

    ``version`` is its owner's to set: add one after each optimizer step. No copy of the weights is kept; while they are
    gathered there are two buffers of one bucket. Names are those that ``save_pretrained`` writes: wrappers of DDP,
    accelerate and torch.compile are looked through, and tied weights appear once. Models whose checkpoints hold other
    tensors than the modules do (transformers' mixtures of experts) have names that an endpoint refuses.

    ``wire_dtype`` (a key of `DTYPE_SIZES`) is what weights are cast to on the way, such as the ``dtype`` of an
    endpoint's capabilities; None leaves each as it is. Raises `ConfigError` for an unknown one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        version: int = 0,
        wire_dtype: str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if wire_dtype is not None and wire_dtype not in DTYPE_SIZES:
            raise ConfigError(f"wire_dtype must be one of {', '.join(DTYPE_SIZES)}, not {wire_dtype!r}")
        self.version = version
        self.rank = rank
        self.world_size = world_size
        self._module = _unwrapped(module)
        self._wire_dtype = wire_dtype

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """See `WeightSource.parameter_specs`. Raises `UnsupportedError` for weights that are sharded or quantised."""
        return [self._spec(name, tensor) for name, tensor in _named_tensors(self._module).items()]

    @torch.no_grad()
    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """See `WeightSource.gather_weights`. Never communicates; the tensors of a bucket lie side by side."""
        named = list(_named_tensors(self._module).items())
        size_bytes = max((bucket.size_bytes for bucket in buckets), default=0)
        buffers: dict[int, torch.Tensor] = {}
        for bucket in buckets:
            part = named[bucket.start : bucket.stop]
            specs = tuple(self._spec(name, tensor) for name, tensor in part)
            if self.rank != 0:
                yield WeightBucket(bucket.index, specs, ())
                continue
            turn = bucket.index % 2
            if turn not in buffers:
                buffers[turn] = torch.empty(size_bytes, dtype=torch.uint8, device=part[0][1].device)
            gathered = unpack(buffers[turn], specs)
            for target, (_, tensor) in zip(gathered, part, strict=True):
                target.copy_(tensor)
            yield WeightBucket(bucket.index, specs, tuple(gathered))

    def _spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, DTensor):
            raise UnsupportedError(f"{name} is sharded; ModuleWeights takes whole modules, inflight_fsdp sharded ones")
        if dtype not in DTYPE_SIZES:
            raise UnsupportedError(f"{name} is {dtype}; weights travel as {', '.join(DTYPE_SIZES)}")
        return TensorSpec.model_validate(
            {"name": name, "dtype": self._wire_dtype or dtype, "shape": tuple(tensor.shape)}
        )


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of wrappers that prefix the names of its parameters."""
    inner: Any = module
    while True:
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = inner.module
        elif isinstance(getattr(inner, "_orig_mod", None), torch.nn.Module):  # torch.compile
            inner = inner._orig_mod
        else:
            return inner  # type: ignore[no-any-return]


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their checkpoint names, those that are tied once."""
    derived = getattr(module, "all_tied_weights_keys", {})  # of transformers: the names that its checkpoints leave out
    names: dict[int, str] = {}
    state = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    for name, tensor in state.items():
        if id(tensor) not in names or names[id(tensor)] in derived:
            names[id(tensor)] = name
    return {name: tensor for name, tensor in state.items() if names[id(tensor)] == name}
