"""TensorBoard: event files in the run directory, or in ``directory``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from inflight.observe.trackers.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Writes event files. Steps that a resumed run repeats replace the earlier ones."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._writer: SummaryWriter | None = None

    def begin(self, run: TrackedRun) -> str:
        directory = self._directory or run.directory / "tensorboard"
        self._writer = SummaryWriter(str(directory), purge_step=run.version + 1)
        if run.version == 0:
            self._writer.add_text("config", f"```json\n{json.dumps(dict(run.config), indent=2)}\n```")
        return f"tensorboard --logdir {directory}"

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, version)

    def end(self, failure: str | None) -> None:
        assert self._writer is not None
        self._writer.close()
