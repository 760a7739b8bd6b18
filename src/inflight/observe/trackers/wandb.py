"""Weights & Biases. Options go to ``wandb.init``: ``project``, ``entity``, ``mode = "offline"`` and others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import wandb

from inflight.observe.trackers.tracker import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """Logs each optimizer step as the step of that number.

    W&B keeps the first value that it receives: steps that a resumed run repeats after a kill keep their earlier values.
    """

    def __init__(self, **options: Any) -> None:
        inspect.signature(wandb.init).bind_partial(**options)
        self._options = options
        self._run: Any = None

    def begin(self, run: TrackedRun) -> str:
        given: dict[str, Any] = {
            "project": "inflight",
            "id": run.run_id,
            "name": run.run_id,
            "dir": str(run.directory),
            "resume": "allow",
            "config": dict(run.config),
            # The run's own output goes where the user wants it, and its signals mean what they meant.
            "settings": {"console": "off", "silent": True},
        }
        wandb.setup(wandb.Settings(silent=True))  # else it asks for a login on the run's own terminal
        self._run = wandb.init(**(given | self._options))
        if self._run.offline:
            return f"wandb sync {self._run.settings.sync_dir}"
        return str(self._run.url)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=version)

    def end(self, failure: str | None) -> None:
        if failure is not None:
            self._run.summary["failure"] = failure
        self._run.finish(exit_code=0 if failure is None else 1)
