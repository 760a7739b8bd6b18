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
    """Unique, and the same after the run was resumed."""
    directory: Path
    """The run's own, which trackers may write to under their name."""
    config: Mapping[str, Any]
    version: int
    """Steps that are made already. A resumed run makes later ones again; what was notified of them is void."""


@runtime_checkable
class Tracker(Protocol):
    """Shows a run to people. All calls come from one thread, which waits for each.

    Constructed with its table in ``run.tracker_options``, before the run starts; a `ConfigError` from there ends the
    run. An exception from a method ends the calls, and the run continues.
    """

    @abstractmethod
    def begin(self, run: TrackedRun) -> str:
        """Begin to follow a run, or continue; return where people find it: a URL, a path or a command."""

    @abstractmethod
    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one step. Names of parts have slashes, as in ``publish/pause_s``."""

    @abstractmethod
    def end(self, failure: str | None) -> None:
        """Write everything down; ``failure`` is what ended the run too early."""


def numbers_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings, with names such as ``publish/pause_s``; a server is its HOST:PORT."""
    for key, value in values.items():
        name = prefix + key.rpartition("://")[2]
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{name}/")
        elif isinstance(value, int | float):
            yield name, float(value)
