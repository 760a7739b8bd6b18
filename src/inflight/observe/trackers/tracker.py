"""The interface of an experiment tracker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker follows."""

    run_id: str
    """A unique id, which a resumed run keeps."""
    directory: Path
    """The run directory. A tracker may write to a subdirectory with its name."""
    config: Mapping[str, Any]
    version: int
    """Number of completed steps. A resumed run repeats later steps, which replace those that were reported before."""


@runtime_checkable
class Tracker(Protocol):
    """An experiment tracker. A single thread calls its methods.

    A tracker is constructed with its table in ``run.tracker_options`` before the run starts; a `ConfigError` from the
    constructor ends the run. After an exception from a method, the tracker is not called again and the run continues.
    """

    @abstractmethod
    def begin(self, run: TrackedRun) -> str:
        """Begin or continue to track a run; return where to find it: a URL, a path or a command."""

    @abstractmethod
    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step. Nested names have slashes, as in ``publish/pause_s``."""

    @abstractmethod
    def end(self, failure: str | None) -> None:
        """Finish; ``failure`` is the error that ended the run, if any."""


def numbers_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings, with names such as ``publish/pause_s``, in which a server appears as its
    HOST:PORT.
    """
    for key, value in values.items():
        name = prefix + key.rpartition("://")[2]
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{name}/")
        elif isinstance(value, int | float):
            yield name, float(value)
