"""This rank's rows of a tensor, and reading only those from safetensors files. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from inflight.checkpoints import StoredTensor
from inflight_fsdp.layout import ShardedTensor


def rows_of_ranks(tensor: DTensor) -> list[slice]:
    """Return each rank's rows of a tensor whose first dimension is sharded over the last dimension of its mesh."""
    num_rows, num_ranks = tensor.shape[0], tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    each = -(-num_rows // num_ranks)
    return [slice(min(each * r, num_rows), min(each * (r + 1), num_rows)) for r in range(num_ranks)]


def local_rows(tensor: DTensor) -> slice:
    """Return this rank's slice of `rows_of_ranks`."""
    mesh = tensor.device_mesh
    return rows_of_ranks(tensor)[mesh.get_local_rank(mesh.ndim - 1)]


@torch.no_grad()
def gather_on_first(tensor: DTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the whole tensor in ``dtype``, in memory of its own, on rank 0, None elsewhere; collective.

    Ranks send their rows to rank 0, so no other rank holds more than its own rows. The result is on the device of the
    tensor's mesh, from which the mesh's groups communicate; shards in host memory are moved there first.
    """
    sent_dtype = min(dtype, tensor.dtype, key=lambda d: d.itemsize)  # cast where it makes less to send
    rank = dist.get_rank()
    mesh = tensor.device_mesh
    mine = tensor.to_local().to(sent_dtype).to(mesh.device_type)
    group, rows = mesh.get_group(mesh.ndim - 1), rows_of_ranks(tensor)
    if rank == 0:
        full = torch.empty(tensor.shape, dtype=sent_dtype, device=mine.device)
        full[rows[0]] = mine
        parts = [(other, full[part]) for other, part in enumerate(rows) if other and part.start < part.stop]
        for call in [dist.irecv(part, group=group, group_src=other) for other, part in parts]:
            assert call is not None
            call.wait()
        return full.to(dtype)
    if rank < len(rows) and mine.numel():  # only the first copy of the parameters is sent
        dist.send(mine, group=group, group_dst=0)
    return None


@torch.no_grad()
def local_part(tensor: ShardedTensor, content: Any) -> torch.Tensor:
    """Return this rank's shard as an open safetensors file holds it, in the file's dtype."""
    shard = tensor.tensor.to_local()
    if not shard.numel():
        return shard
    if tensor.layout.join is None:
        part: torch.Tensor = content.get_slice(tensor.layout.name)[local_rows(tensor.tensor)]
        return part
    stored = {name: content.get_tensor(name) for name in tensor.layout.shapes}
    return part_of(tensor, stored)


def part_of(tensor: ShardedTensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return this rank's shard of a parameter that is stored as ``stored``; never communicates."""
    layout = tensor.layout
    whole = stored[layout.name] if layout.join is None else layout.join(stored)
    return whole[local_rows(tensor.tensor)]


@torch.no_grad()
def read_shards(stored: Mapping[str, StoredTensor], tensors: Sequence[ShardedTensor]) -> None:
    """Fill the shards of this rank, one after another, cast to their dtype; every tensor must be stored and fit.

    If a parameter is stored as it is, only the rows of this rank are read. One file is open at a time, since its mapped
    pages count as memory of the process until it is closed.
    """
    by_files: dict[tuple[Path, ...], list[ShardedTensor]] = {}
    for tensor in tensors:
        if tensor.tensor.to_local().numel():
            files = tuple(sorted({stored[name].file for name in tensor.layout.shapes}))
            by_files.setdefault(files, []).append(tensor)
    for (first, *others), members in by_files.items():
        if not others:
            with safe_open(first, framework="pt") as content:
                for tensor in members:
                    tensor.tensor.to_local().copy_(local_part(tensor, content))
            continue
        for tensor in members:
            parts: dict[str, torch.Tensor] = {}
            for file in (first, *others):
                with safe_open(file, framework="pt") as content:
                    names = [name for name in tensor.layout.shapes if stored[name].file == file]
                    parts |= {name: content.get_tensor(name).clone() for name in names}
            tensor.tensor.to_local().copy_(part_of(tensor, parts))
