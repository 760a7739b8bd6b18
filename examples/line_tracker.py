"""A tracker of your own: it writes a line to a file for each step.

    inflight train examples/quickstart.toml --run.trackers line_tracker:LineTracker

with ``examples`` on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inflight.observe.trackers import TrackedRun, Tracker


class LineTracker(Tracker):
    """Appends to a file."""

    def __init__(self, file: str = "steps.txt") -> None:
        self.file = Path(file)

    def begin(self, run: TrackedRun) -> str:
        self.say(f"{run.run_id} from step {run.version + 1}")
        return str(self.file)

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self.say(f"{version}: reward {metrics.get('reward')}, lag {metrics['lag_mean']}")

    def end(self, failure: str | None) -> None:
        self.say(failure or "done")

    def say(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(line + "\n")
