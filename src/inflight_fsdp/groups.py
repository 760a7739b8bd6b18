"""Process groups and meshes that the workers of a process share.

They are shared because torch does not free them before the default group ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
_values: dict[tuple[dist.ProcessGroup, Hashable], object] = {}


def shared(key: Hashable, create: Callable[[], T]) -> T:
    """Return the value for ``key`` under the current default group. The first call creates it with ``create``.

    All ranks must request the same keys in the same order, because ``create`` is collective. Nothing is stored if
    ``create`` raises.
    """
    default = cast(dist.ProcessGroup, dist.group.WORLD)
    for of in [of for of in _values if of[0] is not default]:
        del _values[of]  # their default group has ended
    if (default, key) not in _values:
        _values[default, key] = create()
    return cast(T, _values[default, key])


def forget_groups() -> None:
    """Drop all shared values, so that their threads end when the default group is destroyed."""
    _values.clear()


def mesh_of(device: torch.device, sizes: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the mesh of all ranks with dimensions of these sizes. Collective."""
    return shared((device.type, sizes, names), lambda: init_device_mesh(device.type, sizes, mesh_dim_names=names))
