"""Which rows of a tensor are this rank's, and reading just those from safetensors files. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, and what its file's header says of it. ``dtype`` is None if it is none that is trained."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all safetensors files of a directory, from their headers alone."""
    found: dict[str, StoredTensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                part = tensors.get_slice(name)
                found[name] = StoredTensor(file, tuple(part.get_shape()), _DTYPES.get(part.get_dtype()))
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
def read_shards(stored: Mapping[str, StoredTensor], tensors: Mapping[str, DTensor]) -> None:
    """Fill the shards of this rank, one after another, cast to their dtype; every tensor must be stored and fit."""
    by_file: dict[Path, list[str]] = {}
    for name in tensors:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as content:
            for name in names:
                shard = tensors[name].to_local()
                if shard.numel():
                    shard.copy_(content.get_slice(name)[local_rows(tensors[name])])


def misfits(stored: Mapping[str, StoredTensor], wanted: Mapping[str, Sequence[int]]) -> list[str]:
    """Return what is missing among the stored tensors, or of another shape or kind than is wanted, in words."""
    problems = []
    if missing := sorted(set(wanted) - set(stored)):
        problems.append(f"{len(missing)} tensors are missing: {missing[:5]}")
    for name in sorted(set(wanted) & set(stored)):
        if stored[name].shape != tuple(wanted[name]):
            problems.append(f"{name} has shape {stored[name].shape}, not {tuple(wanted[name])}")
        elif stored[name].dtype is None:
            problems.append(f"{name} is of a dtype that cannot be trained")
    return problems
