"""How one parameter is stored in checkpoints: whole under its own name, or cut into several tensors.

Servers and checkpoints use Hugging Face's names; a trainer may compute with fused or permuted parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Stored = Mapping[str, torch.Tensor]
Box = tuple[slice, ...]
"""A part of a tensor: a range of every dimension."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors that store one parameter."""

    shapes: Mapping[str, tuple[int, ...]]
    """The full shape of each tensor by its name in checkpoints, in the order in which the tensors are written."""
    split: Callable[[torch.Tensor], Stored] | None = None
    """Cuts the whole parameter into stored tensors, which may share its memory; None if it is stored unchanged."""
    join: Callable[[Stored], torch.Tensor] | None = None
    """The inverse of ``split``."""

    @property
    def name(self) -> str:
        """Name of the first stored tensor."""
        return next(iter(self.shapes))

    def stored(self, whole: torch.Tensor) -> Stored:
        """Return the stored tensors of a whole parameter."""
        return {self.name: whole} if self.split is None else self.split(whole)

    def suffixed(self, suffix: str) -> Layout:
        """Return the layout of a tensor that belongs to the parameter, such as a moment of its gradient."""
        shapes = {name + suffix: shape for name, shape in self.shapes.items()}
        split, join = self.split, self.join
        if split is None or join is None:
            return Layout(shapes)
        return Layout(
            shapes,
            split=lambda whole: {name + suffix: tensor for name, tensor in split(whole).items()},
            join=lambda stored: join({name.removesuffix(suffix): tensor for name, tensor in stored.items()}),
        )


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which part of a tensor each rank of the default group holds."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    boxes: tuple[Box | None, ...]
    """The box of each rank; None if the rank holds no part of the tensor. Several ranks may hold the same box."""
    is_flat: bool = False
    """Whether boxes are ranges of the flattened tensor."""

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """Shape in which the tensor is cut into boxes."""
        return (math.prod(self.shape),) if self.is_flat else self.shape

    @property
    def owners(self) -> dict[int, Box]:
        """The boxes that make up the whole tensor, each under the lowest rank that holds it."""
        return {ranks[0]: tuple(slice(*edges) for edges in key) for key, ranks in self._holders.items()}

    def senders(self, index: int) -> list[int]:
        """Return which rank sends each box.

        Successive values of ``index`` select different holders, so that all holders share the work.
        """
        return [ranks[index % len(ranks)] for ranks in self._holders.values()]

    @property
    def _holders(self) -> dict[tuple[tuple[int, int], ...], list[int]]:
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank, box in enumerate(self.boxes):
            if box is not None:
                holders.setdefault(tuple((part.start, part.stop) for part in box), []).append(rank)
        return holders


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """This rank's part of a tensor that is sharded over ranks, and how the whole tensor is stored."""

    local: torch.Tensor
    """The rank's box, in the trainer's own memory; empty if the rank holds no part of the tensor."""
    sharding: Sharding
    layout: Layout


def layout_by_expert(name: str, tensor: torch.Tensor, parts: Sequence[str]) -> Layout:
    """Return the layout of a parameter [experts, ...] that is stored expert by expert.

    ``name`` is the parameter's name, such as ``model.layers.0.mlp.experts.gate_up_proj``. The parameter's second
    dimension is cut into ``parts``, which are stored as ``model.layers.0.mlp.experts.7.gate_proj.weight``, for example.
    """
    prefix, num_experts = name.rpartition(".")[0], tensor.shape[0]

    def split(whole: torch.Tensor) -> Stored:
        return {
            f"{prefix}.{expert}.{part}.weight": piece
            for expert, matrix in enumerate(whole.unbind(0))
            for part, piece in zip(parts, matrix.chunk(len(parts), dim=0), strict=True)
        }

    def join(stored: Stored) -> torch.Tensor:
        return torch.stack(
            [
                torch.cat([stored[f"{prefix}.{expert}.{part}.weight"] for part in parts], dim=0)
                for expert in range(num_experts)
            ]
        )

    shapes = {key: tuple(piece.shape) for key, piece in split(torch.empty(tensor.shape, device="meta")).items()}
    return Layout(shapes, split, join)
