"""A checkpoint that is written while training goes on: shards copied to host memory, and one thread that saves them.

The thread uses process groups of its own, so that its collectives cannot be mixed up with those of training. Knows
nothing of models or files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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


@dataclass(frozen=True, slots=True)
class SaveGroups:
    """The process groups of gloo that saves in the background use."""

    everyone: dist.ProcessGroup
    mesh: DeviceMesh
    """One dimension, on the CPU: the ranks that share this rank's copy of the parameters."""


def make_save_groups(mesh: DeviceMesh, longest_wait_s: float) -> SaveGroups:
    """Return groups for the ranks of a mesh whose last dimension shards; collective over the default group.

    A rank waits at most ``longest_wait_s`` for another.
    """
    timeout = timedelta(seconds=longest_wait_s)
    everyone = dist.new_group(backend="gloo", timeout=timeout)
    if mesh.ndim == 1:
        return SaveGroups(everyone, DeviceMesh.from_group(everyone, "cpu"))
    copies = [row.tolist() for row in mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1))]
    # torch requires that every rank makes every group.
    groups = {tuple(ranks): dist.new_group(ranks, backend="gloo", timeout=timeout) for ranks in copies}
    (mine,) = (group for ranks, group in groups.items() if dist.get_rank() in ranks)
    return SaveGroups(everyone, DeviceMesh.from_group(mine, "cpu"))


def copy_to_host(state: TrainerState, groups: SaveGroups) -> TrainerState:
    """Return a copy of a state in host memory, sharded over the same ranks; never communicates."""

    @torch.no_grad()
    def copy(part: ShardedTensor) -> ShardedTensor:
        tensor = part.tensor
        local, placements = tensor.to_local().to("cpu", copy=True), tensor.placements[-1:]
        shape, stride = tensor.shape, tensor.stride()
        copied = DTensor.from_local(local, groups.mesh, placements, run_check=False, shape=shape, stride=stride)
        return replace(part, tensor=copied)

    return replace(state, weights=list(map(copy, state.weights)), optimizer=list(map(copy, state.optimizer)))


class BackgroundSave:
    """One save that a thread of this rank takes part in. The thread does not keep the process alive."""

    def __init__(self, path: Path, save: Callable[[], None]) -> None:
        self.path = path
        self.failure: CheckpointError | None = None
        """Why it failed, once it has ended; None: the checkpoint is at ``path``."""
        self._save = save
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return False once it has succeeded or failed."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; return False after the timeout."""
        self._thread.join(timeout_s)
        return not self.is_running

    def _run(self) -> None:
        try:
            self._save()
        except CheckpointError as error:
            self.failure = error
        except Exception as error:  # such as the end of another rank; `finish_save` raises it
            self.failure = CheckpointError(
                f"no checkpoint was written to {self.path}: {type(error).__name__}: {error}; an earlier one "
                "there is intact"
            )
