"""When the events of a run happened.

Times of events leave out the time between a run's processes, and a process that resumes a killed run goes back to its
last checkpoint. By the clock on the wall nothing overlaps that did not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.trace.files import event_files, read_events, read_steps

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a run. ``began_at`` is second 0 of its events, in seconds since 1970."""

    began_at: float
    version: int
    """Trained versions when it began."""


class Lives:
    """Reads a run, and knows which of its processes wrote what."""

    def __init__(self, directory: Path) -> None:
        if not event_files(directory):
            raise ConfigError(f"{str(directory)!r} holds no events of a run: name a run directory")
        self._directory = directory
        self._lives: list[Life] = []

    def events(self) -> Iterator[tuple[float, Row]]:
        """Yield every event but the steps, with its process's second 0 in seconds since 1970."""
        for event in read_events(self._directory):
            if event["kind"] == "began":
                life = Life(event["began_at"], event["version"])
                if not self._lives or self._lives[-1].began_at != life.began_at:
                    self._lives.append(life)
            if self._lives:
                yield self._lives[-1].began_at, event

    def steps(self) -> Iterator[tuple[float, Row]]:
        """Yield every step likewise, once `events` is exhausted. Steps that a resumed run made again are left out."""
        lives = iter(self._lives)
        present, following = next(lives, None), next(lives, None)
        for step in read_steps(self._directory):
            while following is not None and step["version"] > following.version:
                present, following = following, next(lives, None)
            if present is not None:
                yield present.began_at, step


def publish_parts(publish: Row) -> dict[str, tuple[float, float]]:
    """Return start and end of the parts of a publish that took time, in seconds of its process.

    Only durations are measured. A publish gathers first and pauses last; the weights have arrived when it pauses, and
    loading begins then.
    """
    start, end = publish["start_s"], publish["end_s"]
    paused = end - publish["pause_s"]
    places = {
        "gather": (start, start + publish["gather_s"]),
        "wire": (max(start, paused - publish["wire_s"]), paused),
        "load": (paused, paused + publish["load_s"]),
        "pause": (paused, end),
        "first token": (end, end + (publish["first_token_s"] or 0.0)),
    }
    return {name: span for name, span in places.items() if span[1] > span[0]}
