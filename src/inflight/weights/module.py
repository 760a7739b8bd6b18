"""The weights of a plain module as a source of publishes, for loops that have no `TrainerWorker`.

The module knows nothing of trainers, engines or how weights travel; of transformers it knows one attribute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from inflight.contracts import PartialWeightSource
from inflight.errors import ConfigError, UnsupportedError
from inflight.types import WeightBucket
from inflight.weights.packing import unpack
from inflight.wire import DTYPE_SIZES, BucketSpec, TensorSpec


class ModuleWeights(PartialWeightSource):
    """The weights of a module that every rank holds whole.

    ``version`` is its owner's to set: add one after each optimizer step. No copy of the weights is kept; where they
    are cast, two buffers of one bucket: memory that the system hands out anew would cost more time. Names are those
    that ``save_pretrained`` writes: wrappers of DDP, accelerate and torch.compile are looked through, and tied weights
    appear once. Models whose checkpoints hold other tensors than the modules do (transformers' mixtures of experts)
    have names that an endpoint refuses.

    ``wire_dtype`` (a key of `DTYPE_SIZES`) is what weights are cast to on the way, such as the ``dtype`` of an
    endpoint's capabilities; None leaves each as it is. Raises `ConfigError` for an unknown one.

    ``skip_frozen`` leaves out what does not train: parameters that do not require gradients, and buffers. Endpoints
    have to declare ``partial_updates`` then. A parameter that was sent once is sent from then on, frozen meanwhile or
    not.
    """

    version: int = 0
    rank: int = 0
    world_size: int = 1

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        version: int = 0,
        wire_dtype: str | None = None,
        skip_frozen: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_wire_dtype(wire_dtype)
        self.version = version
        self.rank = rank
        self.world_size = world_size
        self._module = unwrapped(module)
        self._wire_dtype = wire_dtype
        self._buffers: dict[int, torch.Tensor] = {}
        self._skip_frozen = skip_frozen
        self._trained: set[str] = set()

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Raises `UnsupportedError` for weights that are sharded or quantised.

        Raises `ConfigError` if frozen ones are skipped and all are frozen.
        """
        sent = self._sent()
        if not sent:
            raise ConfigError("every parameter is frozen: nothing would be sent; set requires_grad of what is trained")
        return [tensor_spec(name, tensor, self._wire_dtype) for name, tensor in sent.items()]

    def frozen_names(self) -> Sequence[str]:
        """Empty unless frozen ones are skipped."""
        sent = self._sent()
        return [name for name in named_tensors(self._module) if name not in sent]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Never communicates. Weights that are not cast are the module's own."""
        named = list(self._sent().items())
        return gather_named(named, self._wire_dtype, buckets, self._buffers, is_sender=self.rank == 0)

    def _sent(self) -> dict[str, torch.Tensor]:
        """Return what a publish sends, by checkpoint names."""
        named = named_tensors(self._module)
        if not self._skip_frozen:
            return named
        self._trained |= {name for name, tensor in named.items() if tensor.requires_grad}
        return {name: tensor for name, tensor in named.items() if name in self._trained}


def check_wire_dtype(wire_dtype: str | None) -> None:
    """Raise `ConfigError` unless weights can travel in this dtype; None is the dtype that each has."""
    if wire_dtype is not None and wire_dtype not in DTYPE_SIZES:
        raise ConfigError(f"wire_dtype must be one of {', '.join(DTYPE_SIZES)}, not {wire_dtype!r}")


def tensor_spec(name: str, tensor: torch.Tensor, wire_dtype: str | None) -> TensorSpec:
    """Return how a tensor travels. Raises `UnsupportedError` for one that is sharded or quantised."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, DTensor):
        raise UnsupportedError(f"{name} is sharded; ModuleWeights takes whole modules, inflight_fsdp sharded ones")
    if dtype not in DTYPE_SIZES:
        raise UnsupportedError(f"{name} is {dtype}; weights travel as {', '.join(DTYPE_SIZES)}")
    return TensorSpec.model_validate({"name": name, "dtype": wire_dtype or dtype, "shape": tuple(tensor.shape)})


@torch.no_grad()
def gather_named(
    named: Sequence[tuple[str, torch.Tensor]],
    wire_dtype: str | None,
    buckets: Sequence[BucketSpec],
    buffers: dict[int, torch.Tensor],
    *,
    is_sender: bool,
) -> Iterator[WeightBucket]:
    """Yield whole tensors bucket by bucket, as `WeightSource.gather_weights` does; only the sender's hold any.

    Those of a bucket in which all have the dtypes of the wire are the module's own. ``buffers`` are the owner's, for
    the others, kept from one gathering to the next: two of the size of a bucket.
    """
    size_bytes = max((bucket.size_bytes for bucket in buckets), default=0)
    for bucket in buckets:
        part = named[bucket.start : bucket.stop]
        specs = tuple(tensor_spec(name, tensor, wire_dtype) for name, tensor in part)
        if not is_sender:
            yield WeightBucket(bucket.index, specs, ())
            continue
        if all(
            str(tensor.dtype).removeprefix("torch.") == spec.dtype
            for (_, tensor), spec in zip(part, specs, strict=True)
        ):
            yield WeightBucket(bucket.index, specs, tuple(tensor.detach() for _, tensor in part))
            continue
        turn = bucket.index % 2
        if turn not in buffers or buffers[turn].numel() < size_bytes:
            buffers[turn] = torch.empty(size_bytes, dtype=torch.uint8, device=part[0][1].device)
        gathered = unpack(buffers[turn], specs)
        for target, (_, tensor) in zip(gathered, part, strict=True):
            target.copy_(tensor)
        yield WeightBucket(bucket.index, specs, tuple(gathered))


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of wrappers that prefix the names of its parameters."""
    inner: Any = module
    while True:
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = inner.module
        elif isinstance(getattr(inner, "_orig_mod", None), torch.nn.Module):  # torch.compile
            inner = inner._orig_mod
        else:
            return inner  # type: ignore[no-any-return]


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their checkpoint names, those that are tied once."""
    derived = getattr(module, "all_tied_weights_keys", {})  # of transformers: the names that its checkpoints leave out
    names: dict[int, str] = {}
    state = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    for name, tensor in state.items():
        if id(tensor) not in names or names[id(tensor)] in derived:
            names[id(tensor)] = name
    return {name: tensor for name, tensor in state.items() if names[id(tensor)] == name}
