"""Saves checkpoints during a run: the ranks' weights and the run's own state become the latest checkpoint together.

The ranks save before the next step, or in the background while they keep training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.run.config import RunSection
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.messages import RankAnswer
from inflight.run.record.checkpoints import checkpoint_path, finish_checkpoint
from inflight.run.record.recording import RunRecording

_LONGEST_SHARE = 20
"""Saves that are due by time may take at most one twentieth of the run's time."""


@dataclass(slots=True)
class _IncompleteCheckpoint:
    """An incomplete checkpoint, and the run's own state at that version."""

    state: dict[str, Any]
    ended_on: set[int] = field(default_factory=set)
    """Ranks that have completed the checkpoint."""


@dataclass(slots=True, eq=False)
class Saving:
    """Saves the steps taken since version ``last``; ``state`` returns the run's own state."""

    trainers: TrainerGroup
    directory: Path
    settings: RunSection
    state: Callable[[], dict[str, Any]]
    last: int
    on_saved: Callable[[int], None] = lambda version: None
    """Called with each version whose checkpoint is complete."""
    recording: RunRecording | None = None
    """Awaited before a checkpoint begins, so that all earlier steps are recorded."""
    saved_at_s: float = field(default_factory=time.monotonic)
    """When the last save ended; ``took_s`` is how long the ranks waited for it."""
    took_s: float = 0.0
    begun: dict[int, _IncompleteCheckpoint] = field(default_factory=dict)
    """Incomplete checkpoints by version."""

    async def save_if_due(self, version: int) -> None:
        passed_s = time.monotonic() - self.saved_at_s
        is_late = passed_s >= max(self.settings.checkpoint_every_s, _LONGEST_SHARE * self.took_s)
        if is_late or version - self.last >= self.settings.checkpoint_every_steps:
            await self._save(version)

    async def finish(self, version: int) -> None:
        """Save if a step was taken since the last checkpoint, and wait until every checkpoint is complete."""
        if version > self.last:
            await self._save(version)
        if self.begun:
            self.note(await self.trainers.finish_save())

    def note(self, answers: Sequence[RankAnswer]) -> None:
        """Make each checkpoint the latest once every rank has completed it."""
        for version, begun in list(self.begun.items()):
            begun.ended_on |= {rank for rank, answer in enumerate(answers) if answer.saved == version}
            if len(begun.ended_on) == len(answers):
                finish_checkpoint(self.directory, version, begun.state, self.settings.keep_checkpoints)
                del self.begun[version]
                self.on_saved(version)

    async def _save(self, version: int) -> None:
        """Write a checkpoint, or start writing it. Untrained work in its ledger is issued again on resume."""
        if self.recording is not None:
            await self.recording.written()
        began_s = time.monotonic()
        answers = await self.trainers.save(checkpoint_path(self.directory, version))
        self.begun[version] = _IncompleteCheckpoint(self.state())
        self.last = version
        self.saved_at_s = time.monotonic()
        self.took_s = self.saved_at_s - began_s
        self.note(answers)
