"""The weights of a `torch.nn.Module`, or of its LoRA, as a `WeightSource` for loops without a `TrainerWorker`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from inflight.base.shortened import shortened
from inflight.contracts import LoraSource, PartialWeightSource
from inflight.errors import ConfigError, UnsupportedError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Packer, unpack
from inflight.weights.encode.lora_tensors import PREFIX, lora_names
from inflight.wire import DTYPE_SIZES, BucketSpec, LoraSpec, TensorSpec


class ModuleWeights(PartialWeightSource):
    """The weights of a module that every rank holds in full.

    The training loop sets ``version``: it adds one after each optimizer step. The object keeps no copy of the weights,
    only two buffers of the size of a bucket if weights are cast. Tensors have the names that ``save_pretrained``
    writes: the prefixes of DDP, accelerate and torch.compile are removed, and tied weights appear once. Endpoints
    refuse models whose checkpoints do not contain the same tensors as their modules. Mixture-of-experts models in
    transformers are an example.

    ``wire_dtype`` (a key of `DTYPE_SIZES`) is the dtype to which weights are cast for the transfer, such as the
    ``dtype`` of an endpoint's capabilities; None keeps the dtype of each weight. Raises `ConfigError` for an unknown
    dtype.

    ``skip_frozen`` omits buffers, and parameters that do not require gradients. Endpoints must then support partial
    updates. A parameter that has been sent once is sent in every later update, even if it is frozen by then.
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
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"ModuleWeights needs a torch.nn.Module, not {type(module).__name__}")
        check_wire_dtype(wire_dtype)
        self.version = version
        self.rank = rank
        self.world_size = world_size
        self._module = unwrap(module)
        self._wire_dtype = wire_dtype
        self._packer = Packer()
        self._skip_frozen = skip_frozen
        self._trained: set[str] = set()

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Return the specs of the weights that are sent.

        Raises `UnsupportedError` for sharded or quantized weights and for a module with a LoRA, and `ConfigError` if
        ``skip_frozen`` leaves none.
        """
        sent = self._published_tensors()
        if adapted := [name for name in sent if "lora_A" in name.split(".")]:
            raise UnsupportedError(
                f"the module has a LoRA ({adapted[0]}), which is not a weight of the model: publish it with "
                "LoraWeights, or merge it into the weights"
            )
        if not sent:
            raise ConfigError(
                "every parameter is frozen, so nothing would be sent; set requires_grad on the parameters you train"
            )
        return [tensor_spec(name, tensor, self._wire_dtype) for name, tensor in sent.items()]

    def frozen_names(self) -> Sequence[str]:
        """Return the names of the weights that are omitted; empty unless ``skip_frozen`` is set."""
        sent = self._published_tensors()
        return [name for name in named_tensors(self._module) if name not in sent]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Yield the buckets without communication; only rank 0's buckets hold tensors.

        Weights that are not cast share the module's memory.
        """
        named = list(self._published_tensors().items())
        return gather_named(named, self._wire_dtype, buckets, self._packer, is_sender=self.rank == 0)

    def _published_tensors(self) -> dict[str, torch.Tensor]:
        named = named_tensors(self._module)
        if not self._skip_frozen:
            return named
        self._trained |= {name for name, tensor in named.items() if tensor.requires_grad}
        return {name: tensor for name, tensor in named.items() if name in self._trained}


def check_wire_dtype(wire_dtype: str | None) -> None:
    """Raise `ConfigError` unless weights can be sent in this dtype; None means each weight's own dtype."""
    if wire_dtype is not None and wire_dtype not in DTYPE_SIZES:
        raise ConfigError(f"wire_dtype must be one of {', '.join(DTYPE_SIZES)}, not {wire_dtype!r}")


def tensor_spec(name: str, tensor: torch.Tensor, wire_dtype: str | None) -> TensorSpec:
    """Return the spec under which a tensor is sent. Raises `UnsupportedError` for a sharded or quantized tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, DTensor):
        raise UnsupportedError(
            f"{name} is sharded, but ModuleWeights supports only whole modules; use inflight_fsdp for sharded ones"
        )
    if dtype not in DTYPE_SIZES:
        raise UnsupportedError(f"{name} has dtype {dtype}, but only {', '.join(DTYPE_SIZES)} can be sent")
    return TensorSpec.model_validate({"name": name, "dtype": wire_dtype or dtype, "shape": tuple(tensor.shape)})


@torch.no_grad()
def gather_named(
    named: Sequence[tuple[str, torch.Tensor]],
    wire_dtype: str | None,
    buckets: Sequence[BucketSpec],
    packer: Packer,
    *,
    is_sender: bool,
) -> Iterator[WeightBucket]:
    """Yield whole tensors bucket by bucket, as `WeightSource.gather_weights` does.

    Only the sender's buckets hold tensors. If no tensor of a bucket has to be cast, the bucket holds the tensors in
    ``named`` themselves. Otherwise all of them are copied into memory from ``packer``. The caller passes the same
    ``packer`` to every call.
    """
    size_bytes = max((bucket.size_bytes for bucket in buckets), default=0)
    for bucket in buckets:
        part = named[bucket.start : bucket.stop]
        specs = tuple(tensor_spec(name, tensor, wire_dtype) for name, tensor in part)
        if not is_sender:
            yield WeightBucket(bucket.index, specs, ())
            continue
        if all(tensor.dtype == getattr(torch, spec.dtype) for (_, tensor), spec in zip(part, specs, strict=True)):
            yield WeightBucket(bucket.index, specs, tuple(tensor.detach() for _, tensor in part))
            continue
        gathered = unpack(packer.reserve(bucket.index, size_bytes, part[0][1].device), specs)
        for target, (_, tensor) in zip(gathered, part, strict=True):
            target.copy_(tensor)
        yield WeightBucket(bucket.index, specs, tuple(gathered))


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside the wrappers of DDP, `torch.nn.DataParallel` and torch.compile."""
    inner: Any = module
    while True:
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = inner.module
        elif isinstance(getattr(inner, "_orig_mod", None), torch.nn.Module):  # torch.compile
            inner = inner._orig_mod
        else:
            return inner  # type: ignore[no-any-return]


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their checkpoint names. Tied weights appear once."""
    derived = getattr(module, "all_tied_weights_keys", {})  # set by transformers: names that its checkpoints leave out
    names: dict[int, str] = {}
    state = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    for name, tensor in state.items():
        if id(tensor) not in names or names[id(tensor)] in derived:
            names[id(tensor)] = name
    return {name: tensor for name, tensor in state.items() if names[id(tensor)] == name}


class LoraWeights(LoraSource):
    """The LoRA of a module that every rank holds in full.

    ``module`` is a PEFT model, or any module whose adapted layers have ``lora_A`` [r, in] and ``lora_B`` [out, r]:
    parameters, linear layers without bias, or (as in PEFT) dicts of either, keyed by ``lora_name``. ``alpha`` and
    ``rslora`` determine the scale, as in `LoraSpec`; None means the value in the LoRA's PEFT config. Without such a
    config, None means False for ``rslora``. As for `ModuleWeights`, the training loop sets ``version``, and weights are
    cast to ``wire_dtype``.

    Endpoints add the LoRA to the weights of their last update that was not a LoRA, or else of their checkpoint. Raises
    `ConfigError` if the module has no such layers or ``alpha`` is not known. Raises `UnsupportedError` for ranks or
    scales that differ between layers, for other trainable parameters, and for adapters that are not simply added to a
    weight matrix (DoRA, embeddings).
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
        lora_name: str = "default",
        version: int = 0,
        wire_dtype: str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_wire_dtype(wire_dtype)
        self.version = version
        self.rank = rank
        self.world_size = world_size
        self._module = unwrap(module)
        self._lora_name = lora_name
        self._packer = Packer()
        self._wire_dtype = wire_dtype
        config = getattr(self._module, "peft_config", {}).get(lora_name)
        alpha = getattr(config, "lora_alpha", None) if alpha is None else alpha
        rslora = bool(getattr(config, "use_rslora", False)) if rslora is None else rslora
        if alpha is None:
            raise ConfigError(
                "alpha is unknown, because the module has no peft_config: pass alpha, the numerator of the scale"
            )
        pairs = self._pairs()
        ranks = {int(a.shape[0]) for a, _ in pairs.values()} | {int(b.shape[1]) for _, b in pairs.values()}
        if len(ranks) != 1:
            raise UnsupportedError(f"the layers' LoRAs have different ranks {sorted(ranks)}; use one rank for all")
        self._spec = LoraSpec(rank=ranks.pop(), alpha=float(alpha), rslora=rslora)
        self._check_scales()
        self._check_others(pairs)

    def lora_spec(self) -> LoraSpec:
        return self._spec

    def parameter_specs(self) -> Sequence[TensorSpec]:
        """Return the specs of all matrices A and B, under the names that PEFT writes to files."""
        return [tensor_spec(name, tensor, self._wire_dtype) for name, tensor in self._named()]

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Yield the buckets without communication; only rank 0's buckets hold tensors."""
        return gather_named(self._named(), self._wire_dtype, buckets, self._packer, is_sender=self.rank == 0)

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        pairs = self._pairs()
        return [(name, t) for m, pair in pairs.items() for name, t in zip(lora_names(m), pair, strict=True)]

    def _pairs(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        pairs = {}
        for name, layer in self._layers():
            a, b = (_matrix(name, getattr(layer, part), self._lora_name) for part in ("lora_A", "lora_B"))
            if a is not None and b is not None:
                pairs[name.removeprefix(PREFIX)] = (a, b)
        if not pairs:
            raise ConfigError(f"the module has no layer with lora_A and lora_B of the LoRA {self._lora_name!r}")
        return pairs

    def _layers(self) -> Iterator[tuple[str, Any]]:
        for name, layer in self._module.named_modules():
            if hasattr(layer, "lora_A") and hasattr(layer, "lora_B"):
                yield name, layer

    def _check_scales(self) -> None:
        for name, layer in self._layers():
            if self._lora_name in (getattr(layer, "lora_magnitude_vector", None) or {}):
                raise UnsupportedError(
                    f"{name} is adapted by DoRA, which does not simply add to the weight; publish merged weights"
                )
            if self._lora_name in (getattr(layer, "lora_embedding_A", None) or {}):
                raise UnsupportedError(f"{name} is an adapted embedding; publish merged weights")
            scaling = getattr(layer, "scaling", None)
            scale = scaling.get(self._lora_name) if isinstance(scaling, Mapping) else scaling
            if isinstance(scale, float | int) and abs(scale - self._spec.scale) > 1e-6 * abs(self._spec.scale):
                raise UnsupportedError(
                    f"{name} is scaled by {scale}, but the LoRA as a whole by {self._spec.scale}; use one scale for "
                    "all layers"
                )

    def _check_others(self, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        mine = {id(tensor) for pair in pairs.values() for tensor in pair}
        others = [n for n, t in named_tensors(self._module).items() if t.requires_grad and id(t) not in mine]
        if others:
            raise UnsupportedError(
                f"{len(others)} other parameters are trainable, but publishing the LoRA would omit them: "
                f"{shortened(others)}"
            )


def _matrix(name: str, part: Any, lora_name: str) -> torch.Tensor | None:
    """Return the matrix A or B of a layer's LoRA, or None if the layer has no LoRA of that name."""
    if isinstance(part, torch.nn.ModuleDict | torch.nn.ParameterDict):
        if lora_name not in part:
            return None
        part = part[lora_name]
    if part is None or isinstance(part, torch.Tensor):
        return part
    if getattr(part, "bias", None) is not None:
        raise UnsupportedError(f"the LoRA of {name} has a bias, which cannot be published; train it without one")
    return part.weight  # type: ignore[no-any-return]
