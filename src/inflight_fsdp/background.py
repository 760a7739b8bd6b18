"""A checkpoint that is written while training goes on: shards copied to host memory, and one thread that saves them.

The thread talks over process groups of its own, so that none of its collectives can meet one of training's, which
another thread calls in another order. Knows nothing of models or files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from inflight.errors import CheckpointError
from inflight_fsdp.checkpoint import TrainerState
from inflight_fsdp.layout import ShardedTensor

LONGEST_WAIT_S = 1800.0
"""Longest wait of the thread for another rank's, and of a call that cannot begin before an earlier save has ended."""


@dataclass(frozen=True, slots=True)
class SaveGroups:
    """The process groups of gloo that saves in the background use."""

    everyone: dist.ProcessGroup
    mesh: DeviceMesh
    """One dimension, on the CPU: the ranks that share this rank's copy of the parameters."""


def make_save_groups(mesh: DeviceMesh) -> SaveGroups:
    """Return groups for the ranks of a mesh whose last dimension shards; collective over the default group."""
    timeout = timedelta(seconds=LONGEST_WAIT_S)
    everyone = dist.new_group(backend="gloo", timeout=timeout)
    if mesh.ndim == 1:
        return SaveGroups(everyone, DeviceMesh.from_group(everyone, "cpu"))
    copies = [row.tolist() for row in mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1))]
    # Every rank makes every group, as torch asks.
    groups = {tuple(ranks): dist.new_group(ranks, backend="gloo", timeout=timeout) for ranks in copies}
    (mine,) = (group for ranks, group in groups.items() if dist.get_rank() in ranks)
    return SaveGroups(everyone, DeviceMesh.from_group(mine, "cpu"))


def copy_to_host(state: TrainerState, groups: SaveGroups) -> TrainerState:
    """Return a copy of a state in host memory, sharded over the same ranks; never communicates."""
    return replace(state, weights=_copies(state.weights, groups), optimizer=_copies(state.optimizer, groups))


@torch.no_grad()
def _copies(tensors: Sequence[ShardedTensor], groups: SaveGroups) -> list[ShardedTensor]:
    return [ShardedTensor(_copy(part.tensor, groups.mesh), part.layout) for part in tensors]


def _copy(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    local = tensor.to_local().to("cpu", copy=True)
    placements = tensor.placements[-1:]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


class BackgroundSave:
    """One save that a thread of this rank takes part in. The thread does not keep the process alive."""

    def __init__(self, path: Path, save: Callable[[], None]) -> None:
        self.path = path
        self.failure: CheckpointError | None = None
        """Why it failed, once it has ended; None: the checkpoint stands at ``path``."""
        self._save = save
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return False once it has ended, well or not."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False if it has not come by then."""
        self._thread.join(timeout_s)
        return not self.is_running

    def _run(self) -> None:
        try:
            self._save()
        except CheckpointError as error:
            self.failure = error
        except Exception as error:  # such as the end of another rank; raised in the thread that asks
            self.failure = CheckpointError(
                f"no checkpoint was written to {self.path}: {type(error).__name__}: {error}; what was there before is "
                "whole"
            )
