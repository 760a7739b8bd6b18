"""Weights & Biases. Options go to ``wandb.init``: ``project``, ``entity``, ``mode = "offline"`` and others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import wandb

from inflight.observe.trackers.tracker import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """Logs each optimizer step under its version.

    W&B keeps the first value that it receives, so steps that a resumed run repeats keep their earlier values.
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
            # W&B must not capture the output of the run or change its signal handlers.
            "settings": {"console": "off", "silent": True},
        }
        wandb.setup(wandb.Settings(silent=True))  # otherwise it asks for a login on the run's terminal
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
