"""The writes of a model's weight loaders, found by tracing one load on meta tensors. Only vLLM loads this module.

vLLM runs a model's loaders for each load, which takes about a millisecond per tensor. The writes of the loaders are
therefore recorded once, on meta tensors. If a layer's loaders only copy parts of checkpoint tensors or write constants,
and these writes fill each of the layer's parameters, the layer can also be loaded by repeating them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_layerwise_reload

_DTYPE = torch.float32
"""Dtype of the traced tensors. Any dtype will do, because copies convert dtypes."""


@dataclass(frozen=True, slots=True)
class StridedRegion:
    """A strided region of a tensor; the offset counts from the tensor's first element."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Write:
    """One write of a loader to a part of ``parameter``: a part of ``source``, or ``value`` if there is no source."""

    parameter: str
    to: StridedRegion
    source: str | None = None
    read: StridedRegion | None = None
    value: float = 0.0

    def value_from(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the value to write, taken from the received tensors."""
        if self.source is None or self.read is None:
            return torch.full((), self.value, device=device)
        return self.read.of(tensors[self.source].contiguous())


@dataclass(slots=True, eq=False)
class TracedLayer:
    """A layer, the checkpoint tensors that it loads, and the writes of its loaders."""

    module: torch.nn.Module
    parameters: Mapping[str, torch.Tensor]
    """The layer's parameters as passed to the loaders, most of them on the meta device."""
    sources: set[str] = field(default_factory=set)
    writes: list[Write] = field(default_factory=list)
    does_more: bool = False
    """Whether the layer's loaders do more than these writes, so that repeating the writes does not suffice."""

    def is_filled(self) -> bool:
        """Return whether the writes cover each element of each parameter exactly once and the layer has no buffers."""
        if any(buffer is not None for buffer in self.module._buffers.values()):
            return False
        places: dict[str, list[StridedRegion]] = {name: [] for name in self.parameters}
        for write in self.writes:
            places[write.parameter].append(write.to)
        return all(_fill(self.parameters[name], found) for name, found in places.items())


def _fill(parameter: torch.Tensor, places: Sequence[StridedRegion]) -> bool:
    """Return whether the regions are disjoint boxes that make up the whole parameter, which is contiguous."""
    boxes = [_box(place, parameter) for place in places]
    if not parameter.is_contiguous() or any(box is None for box in boxes):
        return False
    for one, other in itertools.combinations(boxes, 2):
        assert one is not None
        assert other is not None
        if all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(one, other, strict=True)):
            return False
    return sum(math.prod(place.size) for place in places) == parameter.numel()


def _box(place: StridedRegion, parameter: torch.Tensor) -> list[range] | None:
    """Return the range of indices that a region covers along each dimension of a contiguous tensor.

    Dimensions of length 1 are omitted. Returns None if the region is not a box.
    """
    lengths = {stride: size for size, stride in zip(place.size, place.stride, strict=True) if size != 1}
    rest, box = place.offset, []
    for size, stride in zip(parameter.shape, parameter.stride(), strict=True):
        if size == 1:
            continue
        start, rest = divmod(rest, stride)
        box.append(range(start, start + lengths.pop(stride, 1)))
        if box[-1].stop > size:
            return None
    return None if lengths or rest else box


@dataclass(frozen=True, slots=True)
class TracedLoad:
    """The layers that load the tensors of a checkpoint."""

    layers: Sequence[TracedLayer]
    shapes: Mapping[str, Sequence[int]]
    computed: Collection[str]
    """Names of the tensors that the loaders use in computations, not only in copies."""
    problem: str | None
    """What could not be traced: a parameter whose loader uses unknown tensors, or all weights; None if everything was
    traced.
    """

    def repeatable(
        self, tensors: Mapping[str, torch.Tensor], suits: Callable[[TracedLayer], bool]
    ) -> list[TracedLayer]:
        """Return the layers that can be loaded by repeating their writes, and for which ``suits`` returns True.

        A layer is left out if a layer that is not returned also needs one of its tensors. The result is empty if any
        tensor's shape differs from the traced one.
        """
        if self.problem is not None or any(
            tuple(tensor.shape) != tuple(self.shapes.get(name, ())) for name, tensor in tensors.items()
        ):
            return []
        others = set(self.computed)
        left = [layer for layer in self.layers if layer.sources & tensors.keys()]
        while True:
            keeps = [
                layer
                for layer in left
                if not (layer.does_more or layer.sources & others) and layer.sources <= tensors.keys() and suits(layer)
            ]
            if len(keeps) == len(left):
                return keeps
            others = others.union(*(layer.sources for layer in left if layer not in keeps))
            left = keeps


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what loaders do with parameters and sources. It does not write to the memory of the served model."""

    def __init__(self, layers: Sequence[TracedLayer], sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = {_storage(tensor): name for name, tensor in sources.items()}
        self._parameters = {
            _storage(tensor): (layer, name) for layer in layers for name, tensor in layer.parameters.items()
        }
        self.computed: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func._schema.is_mutable:
            if not self._note_write(func, *args):
                self._note_more(tensors)
            return func(*args, **(kwargs or {})) if tensors[0].is_meta else tensors[0]
        answer = func(*args, **(kwargs or {}))
        made = {_storage(leaf) for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)}
        if not made <= {_storage(tensor) for tensor in tensors}:
            self._note_more(tensors)  # not a view
        return answer

    def _note_write(self, func: Any, target: torch.Tensor, value: Any = 0.0, *others: Any) -> bool:
        """Record a write if it copies a source or a constant to a parameter; return whether it does."""
        if _storage(target) not in self._parameters or others:
            return False
        layer, name = self._parameters[_storage(target)]
        parameter = layer.parameters[name]
        if target.dtype != parameter.dtype:
            return False
        if not target.numel():
            return True
        to = _place(target, int(parameter.storage_offset()))
        if func is torch.ops.aten.copy_.default:
            if _storage(value) not in self._sources or value.dtype != _DTYPE or value.shape != target.shape:
                return False
            source = self._sources[_storage(value)]
            layer.sources.add(source)
            layer.writes.append(Write(name, to, source, _place(value)))
            return True
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            layer.writes.append(Write(name, to, value=float(value)))
            return True
        return False

    def _note_more(self, tensors: Sequence[torch.Tensor]) -> None:
        for storage in map(_storage, tensors):
            if storage in self._parameters:
                self._parameters[storage][0].does_more = True
            if storage in self._sources:
                self.computed.add(self._sources[storage])


def trace(model: Any, shapes: Mapping[str, Sequence[int]], put_back: Callable[[], None]) -> TracedLoad:
    """Return what the model's loaders do with tensors of these shapes, which are those of the whole checkpoint.

    ``put_back`` is called at the end, to end the load that the trace has begun.
    """
    meta = {name: torch.empty(tuple(shape), dtype=_DTYPE, device="meta") for name, shape in shapes.items()}
    names = {_storage(tensor): name for name, tensor in meta.items()}
    initialize_layerwise_reload(model)
    try:
        layers = [
            TracedLayer(module, {name: p.data for name, p in module._parameters.items() if p is not None})
            for module in model.modules()
        ]
        for layer in layers:
            get_layerwise_info(layer.module).load_numel = -math.inf  # no layer is ever complete
        try:
            with _Writes(layers, meta) as writes:
                model.load_weights(meta.items())
        except Exception as error:  # from a loader that reads values, or any other code of a model
            return TracedLoad([], shapes, (), f"its weights, because of {type(error).__name__}: {error}")
        problem = None
        for layer in layers:
            for parameter, loaded in get_layerwise_info(layer.module).loaded_weights:
                given = [t for t in loaded.arguments.values() if isinstance(t, torch.Tensor)]
                sources = {names[_storage(tensor)] for tensor in given if _storage(tensor) in names}
                layer.sources |= sources
                if not sources:
                    problem = f"{type(layer.module).__name__}.{parameter}"
            layer.does_more = layer.does_more or not layer.is_filled()
        return TracedLoad([layer for layer in layers if layer.sources], shapes, writes.computed, problem)
    finally:
        put_back()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place(tensor: torch.Tensor, start: int = 0) -> StridedRegion:
    return StridedRegion(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - start)
