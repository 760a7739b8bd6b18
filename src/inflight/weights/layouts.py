"""Layouts: which boxes of which tensor each rank holds or needs. Knows nothing of torch, nor of how anything moves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from inflight.errors import ConfigError
from inflight.wire import TensorSpec


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of one full tensor whose index along each dimension d is in ``starts[d] <= i < stops[d]``."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of indices along each dimension."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for the box of a scalar."""
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Return the elements in both boxes, None if there are none."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def without(self, inner: Box) -> list[Box]:
        """Return boxes that cover what is not in ``inner``, which lies within this one: two per dimension at most."""
        rest, starts, stops = [], self.starts, self.stops
        for d in range(len(starts)):
            for start, stop in ((starts[d], inner.starts[d]), (inner.stops[d], stops[d])):
                if start < stop:
                    rest.append(Box((*starts[:d], start, *starts[d + 1 :]), (*stops[:d], stop, *stops[d + 1 :])))
            starts = (*starts[:d], inner.starts[d], *starts[d + 1 :])
            stops = (*stops[:d], inner.stops[d], *stops[d + 1 :])
        return rest

    def halves(self) -> tuple[Box, Box]:
        """Return two boxes that cover this one, cut along the first dimension that can be cut."""
        d = next(d for d, size in enumerate(self.shape) if size > 1)
        middle = (self.starts[d] + self.stops[d]) // 2
        return (
            Box(self.starts, (*self.stops[:d], middle, *self.stops[d + 1 :])),
            Box((*self.starts[:d], middle, *self.starts[d + 1 :]), self.stops),
        )

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.starts, self.stops, strict=True))}]"


Layout = Mapping[int, Mapping[str, tuple[Box, ...]]]
"""What each rank holds or needs of each tensor. A tensor, or a rank, of which nothing is held may be left out."""


def replicated(specs: Sequence[TensorSpec], ranks: Sequence[int]) -> Layout:
    """Return the layout in which each of the ranks has every tensor whole."""
    return {rank: {spec.name: (Box.whole(spec.shape),) for spec in specs} for rank in ranks}


def sharded(specs: Sequence[TensorSpec], ranks: Sequence[int], dim: int) -> Layout:
    """Return the layout in which the ranks share dimension ``dim`` out as torch.chunk and FSDP2 do.

    All chunks have the same size, rounded up; the last ones may be smaller or empty.
    """
    for spec in specs:
        if not 0 <= dim < len(spec.shape):
            raise ConfigError(f"{spec.name} of shape {spec.shape} cannot be sharded along dimension {dim}")
    return {rank: {s.name: _sharded(s.shape, [(dim, 1, len(ranks), i)]) for s in specs} for i, rank in enumerate(ranks)}


def placed(
    specs: Sequence[TensorSpec],
    placements: Mapping[str, Sequence[Any]],
    mesh_shape: Sequence[int],
    ranks: Sequence[int],
) -> Layout:
    """Return the layout of DTensors: ``placements`` are those of each tensor, ``ranks`` the mesh in row-major order.

    Takes ``Shard``, ``_StridedShard`` and ``Replicate``, from left to right, and splits as they do. Where a rank has
    several boxes of a tensor, its local tensor is their row-major arrangement: see `arrangement`.
    """
    if len(ranks) != math.prod(mesh_shape):
        raise ConfigError(f"a mesh of shape {tuple(mesh_shape)} has {math.prod(mesh_shape)} ranks, not {len(ranks)}")
    layout: dict[int, dict[str, tuple[Box, ...]]] = {rank: {} for rank in ranks}
    for spec in specs:
        splits = [(i, *split) for i, each in enumerate(placements[spec.name]) if (split := _split(spec, each))]
        for rank, coordinate in zip(ranks, product(*map(range, mesh_shape)), strict=True):
            layout[rank][spec.name] = _sharded(
                spec.shape, [(dim, factor, mesh_shape[i], coordinate[i]) for i, dim, factor in splits]
            )
    return layout


def merged(*layouts: Layout) -> Layout:
    """Return the layout that holds what any of the layouts holds: other tensors, other ranks, or more of the same."""
    both: dict[int, dict[str, tuple[Box, ...]]] = defaultdict(dict)
    for layout in layouts:
        for rank, tensors in layout.items():
            for name, boxes in tensors.items():
                both[rank][name] = (*both[rank].get(name, ()), *boxes)
    return dict(both)


def arrangement(boxes: Sequence[Box]) -> list[Box]:
    """Return where each box of one rank lies in its local tensor, when they are the boxes of a DTensor."""
    if not boxes:
        return []
    offsets: list[dict[int, int]] = []
    for d in range(len(boxes[0].starts)):
        sizes = {box.starts[d]: box.shape[d] for box in boxes}  # in the order in which they lie
        ends = [sum(list(sizes.values())[:i]) for i in range(len(sizes))]
        offsets.append(dict(zip(sizes, ends, strict=True)))
    starts = [tuple(offset[start] for offset, start in zip(offsets, box.starts, strict=True)) for box in boxes]
    return [Box(s, tuple(map(int.__add__, s, box.shape))) for s, box in zip(starts, boxes, strict=True)]


def _split(spec: TensorSpec, placement: Any) -> tuple[int, int] | None:
    """Return the dimension that a DTensor's placement splits and its split factor, None if it splits none."""
    dim = getattr(placement, "dim", None)
    if dim is not None:
        return dim % max(len(spec.shape), 1), getattr(placement, "split_factor", 1)
    if not placement.is_replicate():
        raise ConfigError(f"{spec.name} is placed as {placement}: only sharded and replicated tensors can be moved")
    return None


def _sharded(shape: Sequence[int], splits: Sequence[tuple[int, int, int, int]]) -> tuple[Box, ...]:
    """Return what is left of a tensor after each split (dimension, split factor, number of chunks, chunk).

    A split factor cuts the dimension into so many parts first, and takes the chunk of each.
    """
    kept = [[(0, size)] for size in shape]  # along each dimension, ranges one after another
    for dim, factor, num_chunks, index in splits:
        strides = [_chunk(kept[dim], factor, i) for i in range(factor)]
        kept[dim] = [part for stride in strides for part in _chunk(stride, num_chunks, index)]
    boxes = (Box(*map(tuple, zip(*ranges, strict=True))) if ranges else Box((), ()) for ranges in product(*kept))
    return tuple(box for box in boxes if box.num_elements)


def _chunk(ranges: Sequence[tuple[int, int]], num_chunks: int, index: int) -> list[tuple[int, int]]:
    """Return one of the chunks that torch.chunk makes of ranges that lie one after another, perhaps an empty one."""
    step = math.ceil(sum(stop - start for start, stop in ranges) / num_chunks)
    parts, offset = [], -index * step  # of each range, from where the chunk starts
    for start, stop in ranges:
        part = (max(start, start - offset), min(stop, start - offset + step))
        if part[0] < part[1]:
            parts.append(part)
        offset += stop - start
    return parts
