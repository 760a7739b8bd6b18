"""Ways to damage a checkpoint, for checks of what `load` does with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@dataclass(frozen=True, slots=True)
class Damage:
    """One way to damage a checkpoint."""

    what: str
    apply: Callable[[Path], object]
    """Receives the directory of the checkpoint."""
    must_be_refused: bool = True
    """Whether a load must fail; otherwise, it may also load exactly what was saved."""


def damages_of(checkpoint: Path) -> list[Damage]:
    """Return ways to damage each file of a checkpoint, the same on every rank."""
    large = large_files(checkpoint)
    found = [Damage(f"{file} cut to half", partial(_cut, file)) for file in large]
    for file in _files(checkpoint):
        if file not in large:
            found += [
                Damage(f"{file} cut to half", partial(_cut, file), must_be_refused=False),
                Damage(f"{file} emptied", partial(_empty, file), must_be_refused=False),
            ]
        elif file.suffix == ".safetensors":
            name = _last_tensor(checkpoint / file)
            found += [
                Damage(f"{file} without {name}", partial(_leave_out, file, name)),
                Damage(f"{file} with {name} of another shape", partial(_extend, file, name)),
            ]
    return found


def large_files(checkpoint: Path) -> list[Path]:
    """Return the files that hold tensors, judged by size: those of at least a tenth of the largest."""
    sizes = {file: (checkpoint / file).stat().st_size for file in _files(checkpoint)}
    return [file for file, size in sizes.items() if size * 10 >= max(sizes.values())]


def _files(checkpoint: Path) -> list[Path]:
    return sorted(file.relative_to(checkpoint) for file in checkpoint.rglob("*") if file.is_file())


def _last_tensor(file: Path) -> str:
    """Return the alphabetically last name of a tensor that has rows."""
    with safe_open(file, framework="pt") as stored:
        names: list[str] = [name for name in stored.keys() if stored.get_slice(name).get_shape()[:1] > [0]]  # noqa: SIM118
    return max(names)


def _cut(file: Path, checkpoint: Path) -> None:
    content = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(content[: len(content) // 2])


def _empty(file: Path, checkpoint: Path) -> None:
    (checkpoint / file).write_bytes(b"")


def _leave_out(file: Path, name: str, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / file)
    del tensors[name]
    _rewrite(checkpoint / file, tensors)


def _extend(file: Path, name: str, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / file)
    _rewrite(checkpoint / file, tensors | {name: torch.cat([tensors[name], tensors[name][:1]])})


def _rewrite(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    save_file(tensors, file, metadata=metadata)
