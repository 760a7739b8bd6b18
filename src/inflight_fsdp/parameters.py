"""One rank's parts of the parameters of a model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from inflight import wire
from inflight.types import WeightBucket
from inflight.wire import BucketSpec, TensorSpec
from inflight_fsdp.config import WireDtype
from inflight_fsdp.layout import Layout, ShardedTensor, Sharding
from inflight_fsdp.parts import ParameterPart
from inflight_fsdp.sharding import gather_on_first
from inflight_fsdp.stored_boxes import StoredBox, blocks_of, held_boxes


class ShardedParameters:
    """This rank's parts of the parameters, and how all parameters are stored and sharded.

    ``parts`` holds the parameters of which this rank has a part, under the trainer's names; ``shardings`` and
    ``layouts`` cover all parameters, in the same order on every rank. Parameters that are not trained are not published
    either.
    """

    def __init__(
        self,
        parts: Mapping[str, ParameterPart],
        shardings: Mapping[str, Sharding],
        layouts: Mapping[str, Layout],
        *,
        rank: int,
        stored_dtype: torch.dtype,
        wire_dtype: WireDtype,
        device: torch.device,
    ) -> None:
        self.parts = dict(parts)
        self.trained = {name: part for name, part in parts.items() if part.is_trained}
        self.shardings = dict(shardings)
        self.layouts = dict(layouts)
        self.owned = [name for name in self.trained if rank in shardings[name].owners]
        """Names of the parameters whose parts this rank owns."""
        self.wire_dtype = wire_dtype
        self._device = device
        self._nothing = torch.empty(0, dtype=stored_dtype, device=device)
        """An empty part, for parameters that are on other ranks."""
        self._parameter_of = {stored: name for name, layout in layouts.items() for stored in layout.shapes}
        self._split: tuple[str, dict[str, torch.Tensor]] = ("", {})
        """The last gathered parameter that is stored as several tensors, and its tensors not yet requested."""

    @property
    def published(self) -> Mapping[str, Layout]:
        """The layouts of trained parameters, whether on this rank or on others."""
        frozen = self.parts.keys() - self.trained.keys()
        return {name: layout for name, layout in self.layouts.items() if name not in frozen}

    def specs(self) -> Sequence[TensorSpec]:
        """Return the specs of the stored tensors of trained parameters."""
        return [
            TensorSpec(name=name, dtype=self.wire_dtype, shape=shape)
            for layout in self.published.values()
            for name, shape in layout.shapes.items()
        ]

    @functools.cached_property
    def _held(self) -> list[dict[str, list[StoredBox]]] | None:
        """The boxes that each rank sends, by the stored tensor's name; None if any tensor must be gathered.

        Ranks that hold the same parts take turns, so that a different rank sends each parameter.
        """
        num_ranks = dist.get_world_size()
        held: list[dict[str, list[StoredBox]]] = [{} for _ in range(num_ranks)]
        for index, (name, layout) in enumerate(self.published.items()):
            sharding = self.shardings[name]
            blocks = blocks_of(layout, sharding.shape)
            if blocks is None:
                return None
            for rank in sharding.senders(index):
                boxes = held_boxes(blocks, sharding, rank)
                if boxes is None:
                    return None
                for box in boxes:
                    held[rank].setdefault(box.name, []).append(box)
        return held

    def wire_shardings(self) -> Sequence[wire.Sharding]:
        """Return, for each tensor of `specs`, which boxes each rank sends; empty if the tensors must be gathered.

        Never communicates.
        """
        if self._held is None:
            return ()
        return [
            wire.Sharding(
                senders=tuple(
                    tuple(tuple((part.start, part.stop) for part in it.box) for it in held.get(spec.name, ()))
                    for held in self._held
                )
            )
            for spec in self.specs()
        ]

    @torch.no_grad()
    def local(self, specs: Sequence[TensorSpec], buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Yield the boxes of these tensors that this rank sends, in the wire dtype. Never communicates."""
        assert self._held is not None
        held = self._held[dist.get_rank()]
        dtype: torch.dtype = getattr(torch, self.wire_dtype)
        for bucket in buckets:
            found, tensors = [], []
            for spec in specs[bucket.start : bucket.stop]:
                for it in held.get(spec.name, ()):
                    shape = tuple(part.stop - part.start for part in it.box)
                    part = self.parts[self._parameter_of[spec.name]].local
                    tensors.append(part[it.within].to(dtype).reshape(shape))
                    found.append(spec.model_copy(update={"shape": shape}))
            yield WeightBucket(bucket.index, tuple(found), tuple(tensors))

    def frozen_names(self) -> Sequence[str]:
        """Return the names of the stored tensors of parameters that are not trained."""
        published = self.published
        frozen = (layout for name, layout in self.layouts.items() if name not in published)
        return [name for layout in frozen for name in layout.shapes]

    def gather(self, specs: Sequence[TensorSpec], buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Yield buckets of these tensors: whole tensors on rank 0, and empty buckets on the other ranks.

        The tensors share no memory with the parameters. Every rank must exhaust the iterator.
        """
        self._split = ("", {})
        for bucket in buckets:
            part = specs[bucket.start : bucket.stop]
            tensors = [self._gather(spec.name) for spec in part]
            yield WeightBucket(bucket.index, tuple(part), tuple(t for t in tensors if t is not None))
        self._split = ("", {})

    @torch.no_grad()
    def _gather(self, name: str) -> torch.Tensor | None:
        """On rank 0, return one stored tensor in the wire dtype, in its own memory; elsewhere, None. Collective."""
        owner = self._parameter_of[name]
        layout = self.layouts[owner]
        dtype: torch.dtype = getattr(torch, self.wire_dtype)
        if layout.split is None:
            return gather_on_first(self.sharded(owner), dtype, self._device)
        if self._split[0] != owner:
            whole = gather_on_first(self.sharded(owner), dtype, self._device)
            self._split = (owner, {} if whole is None else dict(layout.stored(whole)))
        tensor = self._split[1].pop(name, None)
        return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)

    def sharded(self, name: str) -> ShardedTensor:
        """Return this rank's part of a parameter, with its sharding and layout."""
        part = self.parts.get(name)
        local = self._nothing if part is None else part.local
        return ShardedTensor(local, self.shardings[name], self.layouts[name])

    def moments(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> list[ShardedTensor]:
        """Return this rank's parts of the optimizer's moments, ordered by kind and parameter."""
        return [
            ShardedTensor(tensors.get(name, self._nothing), self.shardings[name], layout.suffixed(f".{kind}"))
            for kind, tensors in states.items()
            for name, layout in self.published.items()
        ]

    def owned_shards(self) -> list[torch.Tensor]:
        """Return this rank's shards of the trained parameters that it owns."""
        return [self.trained[name].local for name in self.owned]

    def clear_gradients(self) -> None:
        """Discard all gradients."""
        for part in self.parts.values():
            part.clear_gradient()
