"""A trainer that notes each forward, backward and step with the version from which it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from inflight.contracts import WorkerKind
from inflight.types import AdamSettings, MicroBatch, StepResult
from inflight_fsdp import FsdpWorker, WorkerConfig
from inflight_fsdp.config import parse_config
from inflight_fsdp.sharded import make_worker


def settings(path: Path) -> tuple[str, ...]:
    """Return what makes a run's trainer note its calls in files that begin with ``path``, one for each rank."""
    return ("--train.trainer", f"{__name__}:NOTING", "--train.trainer_options", f'{{ notes = "{path}" }}')


def calls(path: Path, rank: int = 0) -> Sequence[str]:
    """Return the calls of a rank so far, in order."""
    notes = path.with_name(f"{path.name}-{rank}")
    return notes.read_text().splitlines() if notes.exists() else []


class NotingKind(WorkerKind):
    def create(self, settings: Mapping[str, object]) -> Any:
        others = dict(settings)
        path = Path(str(others.pop("notes")))

        class NotingWorker(FsdpWorker):
            def forward(self, batch: MicroBatch) -> torch.Tensor:
                self._note("forward")
                return super().forward(batch)

            def backward(self, loss: torch.Tensor) -> None:
                super().backward(loss)
                self._note("backward")

            def step(self, settings: AdamSettings | None = None) -> StepResult:
                self._note("step")
                return super().step(settings)

            def _note(self, what: str) -> None:
                with path.with_name(f"{path.name}-{self.rank}").open("a") as notes:
                    notes.write(f"{what} at version {self.version}\n")

        return make_worker(NotingWorker, parse_config(others, WorkerConfig))


NOTING = NotingKind()
