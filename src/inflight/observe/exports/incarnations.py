"""Wall-clock times of a run's events, the turns within requests, and the phases of publishes.

The times in events exclude the time between a run's processes, and a process that resumes a killed run starts again at
the last checkpoint, so the event times of different processes can overlap. Their wall-clock times do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.observe.trace.files import event_files, read_events, read_steps

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessIncarnation:
    """One process of a run. ``began_at`` is second 0 of its events, as a Unix time in seconds."""

    began_at: float
    version: int
    """Number of versions that had been trained when the process began."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """A sampled turn of an episode."""

    number: int
    """Number of the turn in the episode, from 1."""
    start_s: float
    end_s: float
    num_tokens: int
    spans: tuple[tuple[int, int, int], ...]
    """Start, end and version of each span of the turn, as indices into the episode's sampled tokens."""


class Incarnations:
    """Reads the events of a run, and assigns them to the processes that wrote them."""

    def __init__(self, directory: Path) -> None:
        if not event_files(directory):
            raise ConfigError(f"{str(directory)!r} contains no run events: pass a run directory")
        self._directory = directory
        self._incarnations: list[ProcessIncarnation] = []

    def events(self) -> Iterator[tuple[float, Row]]:
        """Yield every event except steps, with second 0 of its process as a Unix time."""
        for event in read_events(self._directory):
            if event["kind"] == "run_started":
                incarnation = ProcessIncarnation(event["began_at"], event["version"])
                if not self._incarnations or self._incarnations[-1].began_at != incarnation.began_at:
                    self._incarnations.append(incarnation)
            if not self._incarnations:
                raise ConfigError(
                    f"the events in {str(self._directory)!r} begin with {event['kind']!r}, so their wall-clock times "
                    "are unknown: the first event must be 'run_started'"
                )
            yield self._incarnations[-1].began_at, event

    def steps(self) -> Iterator[tuple[float, Row]]:
        """Yield every step, with the start of its process as a Unix time. Call this once `events` is exhausted.

        Steps that a resumed run repeated are omitted.
        """
        incarnations = iter(self._incarnations)
        present, following = next(incarnations, None), next(incarnations, None)
        for step in read_steps(self._directory):
            while following is not None and step["version"] > following.version:
                present, following = following, next(incarnations, None)
            if present is not None:
                yield present.began_at, step


def turns_of(request: Row) -> list[TurnSpan]:
    """Return an episode's turns in one request, sorted by start. Earlier turns may have run on other servers."""
    turns = []
    for part in request["parts"]:
        first = 0
        for number, (start_s, end_s, num_tokens) in enumerate(part.get("turns", ()), 1):
            last = first + num_tokens
            if end_s >= request["start_s"]:
                spans = ((max(start, first), min(end, last), version) for start, end, version in part["spans"])
                spans_of_turn = tuple(span for span in spans if span[0] < span[1])
                turns.append(TurnSpan(number, max(start_s, request["start_s"]), end_s, num_tokens, spans_of_turn))
            first = last
    return sorted(turns, key=lambda turn: turn.start_s)


def publish_parts(publish: Row) -> dict[str, tuple[float, float]]:
    """Return the start and end of each part of a publish, except parts whose duration is zero.

    Both are seconds on the event clock of the publishing process. Events record only the durations of parts. A publish
    begins with gathering and ends with the pause. When the pause begins, the weights have arrived and loading starts.
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
