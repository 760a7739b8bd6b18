"""Finds the boxes of stored tensors that make up a rank's part of a parameter, so that the rank can send its part.

A parameter may be stored as several tensors. Each of them must be a box of the parameter, possibly reshaped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from inflight_fsdp.layout import Box, Layout, Sharding
from inflight_fsdp.sharding import runs_of

_MAX_BOXES = 64
"""The maximum number of boxes into which one part of a stored tensor is divided."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A stored tensor that is a box of the parameter, with the same elements in row-major order."""

    name: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a stored tensor that a rank holds, and where the box is ``within`` the rank's part of the parameter.

    ``within`` is a range if the parameter was flattened before it was cut. ``box`` and ``within`` have the same
    elements in the same order, but may have different shapes.
    """

    name: str
    box: Box
    within: Box


def blocks_of(layout: Layout, shape: tuple[int, ...]) -> list[StoredBlock] | None:
    """Return the stored tensors of a parameter as boxes of the parameter, or None if one of them is not a box."""
    if layout.split is None:
        return [StoredBlock(layout.name, shape, tuple(slice(0, size) for size in shape))]
    coordinates = [_coordinate(shape, dim) for dim in range(len(shape))]
    by_dim = [layout.split(coordinate) for coordinate in coordinates]
    blocks = []
    for name, stored_shape in layout.shapes.items():
        points = [stored[name] for stored in by_dim]
        if not math.prod(stored_shape):
            return None
        first = [int(it.flatten()[0]) for it in points] if len(stored_shape) else [int(it) for it in points]
        corner = tuple(-1 for _ in stored_shape)
        box = tuple(slice(a, int(it[corner]) + 1) for a, it in zip(first, points, strict=True))
        sizes = tuple(part.stop - part.start for part in box)
        if math.prod(sizes) != math.prod(stored_shape) or not _is_row_major(points, box, sizes, stored_shape):
            return None
        blocks.append(StoredBlock(name, stored_shape, box))
    return blocks


def _coordinate(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Return a tensor of this shape whose elements are their own indices along ``dim``; it needs little memory."""
    line = torch.arange(shape[dim], dtype=torch.int32)
    return line.view([-1 if i == dim else 1 for i in range(len(shape))]).expand(shape)


def _is_row_major(
    points: Sequence[torch.Tensor], box: Box, sizes: tuple[int, ...], stored_shape: tuple[int, ...]
) -> bool:
    """Return whether a stored tensor contains the elements of the box in order, as far as samples show.

    The samples are the lines through the tensor's first element along each dimension, and 256 random elements.
    """
    num_elements = math.prod(stored_shape)
    samples = torch.randint(num_elements, (256,), generator=torch.Generator().manual_seed(0))
    strides = [math.prod(stored_shape[dim + 1 :]) for dim in range(len(stored_shape))]
    lines = [torch.arange(size) * stride for size, stride in zip(stored_shape, strides, strict=True)]
    flat = torch.cat([samples, *lines])
    index = torch.unravel_index(flat, stored_shape)
    wanted = torch.unravel_index(flat, sizes)
    return all(
        torch.equal(it[index].to(torch.int64), want + part.start)
        for it, want, part in zip(points, wanted, box, strict=True)
    )


def held_boxes(blocks: Sequence[StoredBlock], sharding: Sharding, rank: int) -> list[StoredBox] | None:
    """Return the boxes of a parameter's stored tensors that a rank holds, or None if there are too many."""
    part = sharding.boxes[rank]
    if part is None:
        return []
    boxes = list(_boxes_of_range(part[0].start, part[0].stop, sharding.shape)) if sharding.is_flat else [part]
    held = []
    for box, block in itertools.product(boxes, blocks):
        common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, block.box, strict=True))
        if any(it.start >= it.stop for it in common):
            continue
        found = _stored_boxes(block, common, sharding, part)
        if found is None or len(found) > _MAX_BOXES:
            return None
        held += found
    return held


def _stored_boxes(block: StoredBlock, common: Box, sharding: Sharding, part: Box) -> list[StoredBox] | None:
    """Return the boxes of a stored tensor that make up ``common``, which lies in both the block and a rank's ``part``.

    Returns None if boxes of the stored tensor cannot express ``common``.
    """
    found = []
    for piece in _pieces(common, block, sharding):
        inner = _relative(piece, block.box)
        sizes = _sizes(block.box)
        box = _without_ones(inner, sizes, block.shape)
        if box is None:
            runs = list(runs_of(inner, sizes))
            start, num_elements = runs[0][0], math.prod(_sizes(inner))
            boxes = list(_boxes_of_range(start, start + num_elements, block.shape))
            if len(runs) > 1 or len(boxes) > 1:
                return None
            (box,) = boxes
        if sharding.is_flat:
            start = next(runs_of(piece, sharding.shape))[0] - part[0].start
            within: Box = (slice(start, start + math.prod(_sizes(piece))),)
        else:
            within = _relative(piece, part)
        found.append(StoredBox(block.name, box, within))
    return found


def _pieces(common: Box, block: StoredBlock, sharding: Sharding) -> Iterator[Box]:
    """Yield the box in pieces; each is contiguous if the part is flattened or the block is reshaped."""
    is_reshaped = _without_ones(common, _sizes(block.box), block.shape) is None
    if not sharding.is_flat and not is_reshaped:
        yield common
        return
    within = sharding.shape if sharding.is_flat else _sizes(block.box)
    cut = [dim for dim, (part, size) in enumerate(zip(common, within, strict=True)) if part.stop - part.start < size]
    num_leading = max(cut, default=0)
    for leading in itertools.product(*(range(part.start, part.stop) for part in common[:num_leading])):
        yield (*(slice(index, index + 1) for index in leading), *common[num_leading:])


def _without_ones(box: Box, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Box | None:
    """Return the same box in a tensor whose shape differs only in dimensions of size 1, or None for other shapes."""
    if [size for size in sizes if size != 1] != [size for size in shape if size != 1]:
        return None
    kept = iter(part for part, size in zip(box, sizes, strict=True) if size != 1)
    return tuple(slice(0, 1) if size == 1 else next(kept) for size in shape)


def _relative(box: Box, outer: Box) -> Box:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def _boxes_of_range(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield, in order, the boxes of a tensor that together make up a range of the flattened tensor."""
    if not shape:
        yield ()
        return
    width = math.prod(shape[1:])
    first, last = -(-start // width), stop // width
    if first > last:  # within one row
        row = start // width
        for box in _boxes_of_range(start - row * width, stop - row * width, shape[1:]):
            yield (slice(row, row + 1), *box)
        return
    if start < first * width:
        for box in _boxes_of_range(start - (first - 1) * width, width, shape[1:]):
            yield (slice(first - 1, first), *box)
    if first < last:
        yield (slice(first, last), *(slice(0, size) for size in shape[1:]))
    if last * width < stop:
        for box in _boxes_of_range(0, stop - last * width, shape[1:]):
            yield (slice(last, last + 1), *box)
