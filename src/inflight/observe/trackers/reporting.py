"""Reports the steps of a run to its trackers, each in its own thread so that none can affect the run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.base.extensions import make
from inflight.errors import ConfigError
from inflight.observe.trace import events
from inflight.observe.trackers.tracker import TrackedRun, Tracker, numbers_of

_MAX_WAITING = 1000
"""Number of steps that may wait for a slow tracker; further steps are dropped."""
_END_S = 30.0
"""How long, in seconds, all trackers together may take to finish once the run has ended."""
_NOT_METRICS = {"kind", "start_s", "end_s", "version"}


def load_trackers(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> dict[str, Tracker]:
    """Return the trackers of these names: entry points in the group ``inflight.trackers``, or ``module:attribute``.

    Raises `ConfigError` if a tracker is not installed or rejects its options, or if options name an unlisted tracker.
    """
    if unused := sorted(options.keys() - set(names)):
        raise ConfigError(f"run.tracker_options has {unused[0]!r}, which run.trackers does not list: add it there")
    return {name: make(Tracker, "tracker", "trackers", name, {}, options.get(name, {}), {}) for name in names}


class Reporting:
    """Passes the steps of a run to its trackers. ``note`` receives each tracker's location, and a line if one fails."""

    def __init__(self, trackers: Mapping[str, Tracker], run: TrackedRun, note: Callable[[str], None]) -> None:
        self._threads = [_TrackerThread(name, tracker, run, note) for name, tracker in trackers.items()]

    def report(self, event: events.Event) -> None:
        """Pass on a step; other events are ignored."""
        if self._threads and isinstance(event, events.StepCompleted):
            metrics = dict(numbers_of(event.model_dump(exclude=_NOT_METRICS)))
            for thread in self._threads:
                thread.log_step(event.version, metrics)

    def end(self, failure: str | None, within_s: float = _END_S) -> None:
        """Let the trackers finish. ``note`` receives a line about each one that takes too long."""
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.finish(failure)
        for thread in self._threads:
            thread.wait(deadline)


class _TrackerThread:
    """Calls one tracker."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, note: Callable[[str], None]) -> None:
        self._name = name
        self._tracker = tracker
        self._note = note
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue()
        """Pending calls; None ends the thread."""
        self._is_behind = False
        # A daemon thread, so that a tracker that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._call, args=(run,), name=f"inflight-tracker-{name}", daemon=True)
        self._thread.start()

    def log_step(self, version: int, metrics: Mapping[str, float]) -> None:
        if not self._thread.is_alive():
            return  # it failed, which was noted
        if self._waiting.qsize() < _MAX_WAITING:
            self._waiting.put(lambda: self._tracker.step(version, metrics))
        elif not self._is_behind:
            self._is_behind = True
            self._note(
                f"tracker {self._name!r} is {_MAX_WAITING} steps behind: further steps are dropped until it catches up"
            )

    def finish(self, failure: str | None) -> None:
        self._waiting.put(lambda: self._tracker.end(failure))
        self._waiting.put(None)

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._note(f"tracker {self._name!r} did not finish in time: its data may be incomplete")

    def _call(self, run: TrackedRun) -> None:
        try:
            self._note(f"tracker {self._name!r}: {self._tracker.begin(run)}")
            while (call := self._waiting.get()) is not None:
                call()
        except BaseException as error:  # whatever a tracker raises, even SystemExit, the run continues
            self._note(f"tracker {self._name!r} failed and receives no more steps: {type(error).__name__}: {error}")
