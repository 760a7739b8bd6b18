"""Writes checkpoints while training continues: shards are copied to host memory, and one thread saves them.

The thread uses a separate process group, so that its collectives cannot interfere with those of training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from inflight.errors import CheckpointError
from inflight_fsdp.checkpoint import TrainerState, save_checkpoint
from inflight_fsdp.layout import ShardedTensor


def copy_to_host(state: TrainerState) -> TrainerState:
    """Return a copy of a state in host memory; never communicates."""

    @torch.no_grad()
    def copy(part: ShardedTensor) -> ShardedTensor:
        return replace(part, local=part.local.to("cpu", copy=True))

    return replace(
        state,
        weights=list(map(copy, state.weights)),
        lora=list(map(copy, state.lora)),
        optimizer=list(map(copy, state.optimizer)),
        device=torch.device("cpu"),
    )


class BackgroundSave:
    """One save, performed by a daemon thread of this rank together with the other ranks."""

    def __init__(self, path: Path, save: Callable[[], None]) -> None:
        self.path = path
        self.failure: CheckpointError | None = None
        """Why the save failed, once it has ended; None if the checkpoint is at ``path``."""
        self._save = save
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return whether the save is still in progress."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the save ends; return False on timeout."""
        self._thread.join(timeout_s)
        return not self.is_running

    def _run(self) -> None:
        try:
            self._save()
        except CheckpointError as error:
            self.failure = error
        except Exception as error:  # for example because another rank has ended; `finish_save` raises it
            self.failure = CheckpointError(
                f"no checkpoint was written to {self.path}: {type(error).__name__}: {error}; an earlier checkpoint "
                "there is intact"
            )


class BackgroundSaves:
    """One rank's background saves, one at a time. Each rank waits at most ``longest_wait_s`` for another rank."""

    def __init__(self, longest_wait_s: float) -> None:
        self._longest_wait_s = longest_wait_s
        self._group: dist.ProcessGroup | None = None
        self._begun: BackgroundSave | None = None

    def begin(self, path: Path, state: TrainerState) -> None:
        """Copy a state and start to write it. Collective; any earlier save must have finished."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._longest_wait_s))
        copy = copy_to_host(state)
        self._begun = BackgroundSave(path, partial(save_checkpoint, path.absolute(), copy, self._group))

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait at most ``timeout_s`` for a save to end. Raises `CheckpointError` if it failed or is still running."""
        timeout_s = self._longest_wait_s if timeout_s is None else timeout_s
        begun = self._begun
        if begun is None:
            return
        if not begun.wait(timeout_s):
            raise CheckpointError(
                f"the save to {begun.path} is still running after {timeout_s:g} s; an earlier checkpoint there is "
                "intact"
            )
        self._begun = None
        if begun.failure is not None:
            raise begun.failure

    @property
    def is_running(self) -> bool:
        """Whether a save is still in progress."""
        return self._begun is not None and self._begun.is_running

    def wait(self) -> None:
        """Wait until a running save has ended; `finish` still reports how it ended."""
        if self._begun is not None:
            self._begun.wait(self._longest_wait_s)

    def close(self) -> None:
        """Wait until a running save has ended, and end the process group. Idempotent."""
        self.wait()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
