"""A checkpoint that is written while training goes on: shards copied to host memory, and one thread that saves them.

The thread uses a process group of its own, so that its collectives cannot be mixed up with those of training. Knows
nothing of models or files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from inflight.errors import CheckpointError
from inflight_fsdp.checkpoint import TrainerState
from inflight_fsdp.layout import ShardedTensor


def make_save_group(longest_wait_s: float) -> dist.ProcessGroup:
    """Return a group of all ranks for saves in the background; collective over the default group.

    A rank waits at most ``longest_wait_s`` for another.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=longest_wait_s))
    return group


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
