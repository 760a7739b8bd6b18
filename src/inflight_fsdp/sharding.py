"""Finds which part of each tensor each rank holds, gathers the parts, and reads a rank's own part from a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from inflight.model.checkpoints import StoredTensor
from inflight_fsdp.layout import Box, ShardedTensor, Sharding


def box_of(parameter: DTensor) -> Box:
    """Return the box of a parameter that this rank holds."""
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


def shardings_of(
    boxes: Mapping[str, Box], shapes: Mapping[str, tuple[int, ...]], device: torch.device, *, is_flat: bool = False
) -> dict[str, Sharding]:
    """Return which rank holds which box of each parameter in ``shapes``; collective over the default group.

    The result is the same on every rank. ``boxes`` are this rank's boxes; the rank may hold boxes of only some
    parameters. The default group communicates from ``device``.
    """
    width = 1 if is_flat else max(len(shape) for shape in shapes.values())
    edges = torch.zeros(len(shapes), width, 2, dtype=torch.int64)
    for row, name in enumerate(shapes):
        for dim, part in enumerate(boxes.get(name, ())):
            edges[row, dim] = torch.tensor((part.start, part.stop))
    edges = edges.to(device)
    everyone = [torch.empty_like(edges) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, edges)
    by_rank = [every.tolist() for every in everyone]
    return {
        name: Sharding(shape, tuple(_box(rows[row], 1 if is_flat else len(shape)) for rows in by_rank), is_flat)
        for row, (name, shape) in enumerate(shapes.items())
    }


def _box(edges: Sequence[tuple[int, int]], num_dims: int) -> Box | None:
    box = tuple(slice(start, stop) for start, stop in edges[:num_dims])
    return box if all(part.start < part.stop for part in box) else None


def runs_of(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each run of a box that is contiguous in the whole tensor, in order.

    Each run is represented by the index of its first element in the whole tensor, and the leading indices that select
    the run from the box.
    """
    cut = [dim for dim, (part, size) in enumerate(zip(box, shape, strict=True)) if part.stop - part.start < size]
    last = max(cut, default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for leading in itertools.product(*(range(part.stop - part.start) for part in box[:last])):
        indices = (*(part.start + i for part, i in zip(box, leading, strict=False)), box[last].start)
        yield sum(i * stride for i, stride in zip(indices, strides, strict=False)), leading


@torch.no_grad()
def gather_on_first(
    tensor: ShardedTensor, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None = None
) -> torch.Tensor | None:
    """On rank 0, return the whole tensor in ``dtype``, in its own memory; elsewhere, return None. Collective.

    Ranks send their parts to rank 0, so the other ranks hold only their own parts. The result is on ``device``, from
    which ``group`` communicates. The group contains all ranks; None means the default group.
    """
    sent_dtype = min(dtype, tensor.local.dtype, key=lambda d: d.itemsize)  # the narrower one, to send fewer bytes
    rank, owners = dist.get_rank(), tensor.sharding.owners
    if rank:
        if rank in owners:
            dist.send(tensor.local.to(sent_dtype).to(device).contiguous(), 0, group=group)
        return None
    full = torch.empty(tensor.sharding.cut_shape, dtype=sent_dtype, device=device)
    if 0 in owners:
        full[owners[0]] = tensor.local.to(sent_dtype).to(device)
    parts = [(other, full[box]) for other, box in owners.items() if other]
    # A contiguous part is received in place: contiguous() returns the part itself.
    received = [(other, part, part.contiguous()) for other, part in parts]
    for call in [dist.irecv(into, other, group=group) for other, _, into in received]:
        assert call is not None
        call.wait()
    for _, part, into in received:
        if into is not part:
            part.copy_(into)
    return full.to(dtype).view(tensor.sharding.shape)


@torch.no_grad()
def local_part(tensor: ShardedTensor, content: Any) -> torch.Tensor:
    """Return this rank's part from an open safetensors file, in the file's dtype."""
    box = tensor.sharding.boxes[dist.get_rank()]
    if box is None:
        return tensor.local
    if tensor.layout.join is None:
        part = content.get_slice(tensor.layout.name)
        return _range_of(part, tensor.sharding.shape, *box) if tensor.sharding.is_flat else part[box]
    stored = {name: content.get_tensor(name) for name in tensor.layout.shapes}
    return part_of(tensor, stored)


def part_of(tensor: ShardedTensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return this rank's part of a parameter, given its ``stored`` tensors; never communicates."""
    layout, box = tensor.layout, tensor.sharding.boxes[dist.get_rank()]
    assert box is not None
    whole = stored[layout.name] if layout.join is None else layout.join(stored)
    return whole.reshape(tensor.sharding.cut_shape)[box]


def _range_of(stored: Any, shape: Sequence[int], wanted: slice) -> torch.Tensor:
    """Return a range of a flattened tensor, reading only the rows that the range touches."""
    width = math.prod(shape[1:])
    first = wanted.start // width
    rows: torch.Tensor = stored[first : -(-wanted.stop // width)]
    return rows.flatten()[wanted.start - first * width : wanted.stop - first * width]


@torch.no_grad()
def read_shards(stored: Mapping[str, StoredTensor], tensors: Sequence[ShardedTensor]) -> None:
    """Fill this rank's parts one after another, cast to their dtypes; the stored tensors must have the right shapes.

    If a parameter is stored unchanged, only this rank's part is read. Only one file is open at a time, because a file's
    mapped pages count as memory of the process until the file is closed.
    """
    by_files: dict[tuple[Path, ...], list[ShardedTensor]] = {}
    for tensor in tensors:
        if tensor.local.numel():
            files = tuple(sorted({stored[name].file for name in tensor.layout.shapes}))
            by_files.setdefault(files, []).append(tensor)
    for (first, *others), members in by_files.items():
        if not others:
            with safe_open(first, framework="pt") as content:
                for tensor in members:
                    tensor.local.copy_(local_part(tensor, content))
            continue
        for tensor in members:
            parts: dict[str, torch.Tensor] = {}
            for file in (first, *others):
                with safe_open(file, framework="pt") as content:
                    names = [name for name in tensor.layout.shapes if stored[name].file == file]
                    parts |= {name: content.get_tensor(name).clone() for name in names}
            tensor.local.copy_(part_of(tensor, parts))
