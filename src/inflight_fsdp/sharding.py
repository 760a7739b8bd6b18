"""Which rows of a tensor are this rank's, and reading just those from safetensors files. Knows nothing of models."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from inflight.errors import ConfigError
from inflight_fsdp.layout import ShardedTensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, and what its file's header says of it. ``dtype`` is None if it is none that is trained."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all safetensors files of a directory, from their headers alone. Raises `ConfigError`."""
    found: dict[str, StoredTensor] = {}
    try:
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    part = tensors.get_slice(name)
                    found[name] = StoredTensor(file, tuple(part.get_shape()), _DTYPES.get(part.get_dtype()))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the weights in {str(path)!r} cannot be read: {type(error).__name__}: {error}") from error
    return found


def rows_of_ranks(tensor: DTensor) -> list[slice]:
    """Return each rank's rows of a tensor whose first dimension is sharded over the last dimension of its mesh."""
    num_rows, num_ranks = tensor.shape[0], tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    each = -(-num_rows // num_ranks)
    return [slice(min(each * r, num_rows), min(each * (r + 1), num_rows)) for r in range(num_ranks)]


def local_rows(tensor: DTensor) -> slice:
    """Return this rank's among the `rows_of_ranks`."""
    mesh = tensor.device_mesh
    return rows_of_ranks(tensor)[mesh.get_local_rank(mesh.ndim - 1)]


@torch.no_grad()
def gather_on_first(tensor: DTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the whole tensor in ``dtype``, in memory of its own, on rank 0, None elsewhere; collective.

    Ranks send their rows to rank 0, so that no other rank holds more than its own, and nobody gets what it drops. It is
    on the device of the tensor's mesh, which is the one that the mesh's groups communicate from: shards that are kept
    in host memory are moved there first.
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
    if rank < len(rows) and mine.numel():  # of the first copy of the parameters
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

    Of a parameter that is stored as it is, only the rows of this rank are read. One file is open at a time: what was
    read of it counts as memory of the process until it is closed.
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


def fitting_tensors(
    path: Path, wanted: Mapping[str, Sequence[int]], *, known: Collection[str] = (), ignored: Sequence[str] = ()
) -> dict[str, StoredTensor]:
    """Return the tensors of a directory. Raises `ConfigError` unless those that are ``wanted``, with shapes, are there.

    Others are refused too, but for names that are ``known`` or match a pattern that is ``ignored``.
    """
    stored = stored_tensors(path)
    if not stored:
        raise ConfigError(f"model directory {str(path)!r} has no *.safetensors; other weight formats are not read")
    problems = []
    if missing := sorted(set(wanted) - set(stored)):
        problems.append(f"{len(missing)} tensors are missing: {missing[:5]}")
    for name in sorted(set(wanted) & set(stored)):
        if stored[name].shape != tuple(wanted[name]):
            problems.append(f"{name} has shape {stored[name].shape}, not {tuple(wanted[name])}")
        elif stored[name].dtype is None:
            problems.append(f"{name} is of a dtype that cannot be trained")
    others = set(stored) - set(wanted) - set(known)
    if unknown := sorted(name for name in others if not any(re.search(pattern, name) for pattern in ignored)):
        problems.append(f"{len(unknown)} tensors are unknown: {unknown[:5]}")
    if problems:
        raise ConfigError(f"the checkpoint {str(path)!r} does not fit its config: {'; '.join(problems[:10])}")
    return stored
