"""This rank's part of each parameter and of its gradient, regardless of the sharding library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor


class ParameterPart(Protocol):
    """This rank's part of one parameter: a box of it, or a range of the flattened parameter."""

    @property
    def is_trained(self) -> bool:
        """Return whether the parameter is trained, and so has gradients and optimizer states."""

    @property
    def local(self) -> torch.Tensor:
        """The weights, in the trainer's own memory."""

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient, summed over ranks, in memory that a step may overwrite; zeros if the parameter was not used."""

    def clear_gradient(self) -> None:
        """Discard the gradient."""


@dataclass(frozen=True, slots=True)
class DTensorPart:
    """The shard of a DTensor."""

    parameter: DTensor

    @property
    def is_trained(self) -> bool:
        return self.parameter.requires_grad

    @property
    def local(self) -> torch.Tensor:
        return self.parameter.to_local()

    @property
    def gradient(self) -> torch.Tensor:
        gradient = self.parameter.grad
        return torch.zeros_like(self.local) if gradient is None else gradient.to_local()  # type: ignore[attr-defined]

    def clear_gradient(self) -> None:
        self.parameter.grad = None
