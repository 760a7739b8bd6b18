"""Process groups and meshes, which the workers of a process share: torch frees none before the default group ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
_values: dict[tuple[dist.ProcessGroup, Hashable], object] = {}


def shared(key: Hashable, create: Callable[[], T]) -> T:
    """Return what ``create`` returned for this key under the current default group, or else call it.

    Every rank must ask for the same keys in the same order, because ``create`` is collective. Nothing is kept if it
    raises.
    """
    default = cast(dist.ProcessGroup, dist.group.WORLD)
    for of in [of for of in _values if of[0] is not default]:
        del _values[of]  # their default group has ended
    if (default, key) not in _values:
        _values[default, key] = create()
    return cast(T, _values[default, key])


def forget_groups() -> None:
    """Keep nothing any more, so that ending the default group ends the threads of its groups too."""
    _values.clear()


def mesh_of(device: torch.device, sizes: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the mesh of all ranks with dimensions of these sizes; collective."""
    return shared((device.type, sizes, names), lambda: init_device_mesh(device.type, sizes, mesh_dim_names=names))
