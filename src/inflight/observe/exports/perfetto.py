"""Exports a run in Chrome's Trace Event Format, which ui.perfetto.dev opens.

The processes of the trace are the run itself, the trainer and each server. A server's requests are slices in as few
tracks as possible; slices in one track do not overlap. The request of an episode contains slices for its turns and,
between them, for the environment. Each trainer rank and each part of a publish has its own track. Lag, reward, running
groups and the version of each server are counters; failures and changes of the fleet are instants. Times are
microseconds since the run began.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from inflight.errors import ConfigError
from inflight.observe.exports.incarnations import Incarnations, Row, TurnSpan, publish_parts, turns_of

_RUN, _TRAINER = "run", "trainer"
_COUNTERS = {
    "reward": "mean reward",
    "lag_mean": "mean lag",
    "effective_sample_size": "effective sample size",
    "groups_waiting": "groups waiting",
    "completion_length": "completion length",
    "utilisation": "slot utilisation",
}
"""Metrics of a step, and their labels."""
_INSTANTS = ("item_dropped", "episode_failed", "checkpoint_saved", "fleet_scaled", "failure", "run_ended")
"""Kinds of events without a duration, which are shown on the run's own track."""


def write_perfetto(directory: Path, out: Path) -> int:
    """Write the trace of a run and return the number of its events. Only the current row is kept in memory.

    Raises `ConfigError` if the directory contains no run, or if the file cannot be written.
    """
    trace = _Trace(Incarnations(directory))
    try:
        with out.open("w") as file:
            return _write_array(trace.rows(), file)
    except OSError as error:
        raise ConfigError(f"trace {str(out)!r} cannot be written: {error.strerror}") from error


def _write_array(rows: Iterator[Row], file: IO[str]) -> int:
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    num_rows = 0
    for num_rows, row in enumerate(rows, 1):
        file.write(("\n" if num_rows == 1 else ",\n") + json.dumps(row, allow_nan=False))
    file.write("\n]}\n")
    return num_rows


@dataclass(frozen=True, slots=True)
class _Inner:
    """A slice inside another slice."""

    name: str
    category: str
    span: tuple[float, float]
    facts: Mapping[str, Any]


class _Tracks:
    """The tracks of one group; slices in a track do not overlap.

    Of the tracks that are free when a slice begins, the slice is placed in the one that became free last. If slices
    arrive in the order of their ends, this uses the fewest possible tracks.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []

    def place(self, start: float, end: float) -> int:
        """Return the number of the slice's track, from 0."""
        free = [(at, number) for number, at in enumerate(self._ends) if at <= start]
        if not free:
            self._ends.append(end)
            return len(self._ends) - 1
        number = max(free)[1]
        self._ends[number] = end
        return number


class _Trace:
    """Converts events to rows of the format."""

    def __init__(self, incarnations: Incarnations) -> None:
        self._incarnations = incarnations
        self._origin: float | None = None
        self._tracks: dict[tuple[str, str], _Tracks] = {}
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, str], int] = {}
        self._of_kind: Mapping[str, Callable[[Row, float], Iterator[Row]]] = {
            "request": self._request,
            "train": self._train,
            "publish": self._publish,
            "served_versions": self._versions,
            "running_groups": self._running,
            "fleet_changed": self._fleet,
            "memory_released": self._memory_turn,
            "memory_restored": self._memory_turn,
            **dict.fromkeys(_INSTANTS, self._instant),
        }

    def rows(self) -> Iterator[Row]:
        for began_at, event in self._incarnations.events():
            if self._origin is None:
                self._origin = began_at
            if (of_kind := self._of_kind.get(event["kind"])) is not None:
                yield from of_kind(event, began_at - self._origin)
        for began_at, step in self._incarnations.steps():
            yield from self._step(step, began_at - (self._origin or 0.0))

    # ---------------------------------------------------------------------------------------------------------- kinds

    def _request(self, event: Row, shift_s: float) -> Iterator[Row]:
        versions = sorted({version for part in event["parts"] for _, _, version in part["spans"]})
        facts = {
            "item": event["item"],
            "request_id": event["request_id"],
            "completions": len(event["numbers"]),
            "tokens": sum(part["num_tokens"] for part in event["parts"]),
            "versions": versions,
            "finish_reasons": sorted({part["finish_reason"] for part in event["parts"]}),
        }
        error = event.get("error")
        if error:
            facts["error"] = error
        span = _span(event, shift_s)
        result = _first_to_last(versions) or {None: "without tokens", "cancelled": "cancelled"}.get(error, "lost")
        name = f"item {event['item']} {result}"
        inner, overlapping = _inner_slices(event, shift_s)
        yield from self._slice(event["endpoint"], "requests", name, span, facts, inner)
        for turn in overlapping:
            yield from self._slice(event["endpoint"], "overlapping turns", turn.name, turn.span, turn.facts)
        if error not in (None, "cancelled"):
            yield from self._mark(event["endpoint"], "failures", error, span[1], facts)

    def _train(self, event: Row, shift_s: float) -> Iterator[Row]:
        facts = {"version": event["version"], "items": event["items"]}
        for rank, (start_s, end_s) in enumerate(event["ranks"]):
            span = (start_s + shift_s, end_s + shift_s)
            yield from self._slice(_TRAINER, f"rank {rank}", f"train v{event['version']}", span, facts)

    def _publish(self, event: Row, shift_s: float) -> Iterator[Row]:
        """Yield slices for the publish, for its parts, and for the pause of each server."""
        start, end = _span(event, shift_s)
        facts = {key: event[key] for key in ("version", "size_bytes", "sent_bytes", "total_s", "outcomes")}
        yield from self._slice(_TRAINER, "publish", f"publish v{event['version']}", (start, end), facts)
        for part, span in publish_parts(event).items():
            placed = (span[0] + shift_s, span[1] + shift_s)
            yield from self._slice(_TRAINER, f"publish: {part}", part, placed, {"version": event["version"]})
        for endpoint, pause_s in event["paused_s"].items():
            facts = {"version": event["version"], "outcome": event["outcomes"].get(endpoint)}
            name = f"update to v{event['version']}"
            yield from self._slice(endpoint, "updates", name, (end - pause_s, end), facts)

        for endpoint, outcome in event["outcomes"].items():
            if outcome == "applied":
                yield from self._counter("weight version", event["version"], end, endpoint)

    def _versions(self, event: Row, shift_s: float) -> Iterator[Row]:
        for endpoint, version in event["servers"].items():
            if version is not None:
                yield from self._counter("weight version", version, event["end_s"] + shift_s, endpoint)

    def _running(self, event: Row, shift_s: float) -> Iterator[Row]:
        yield from self._counter("groups running", event["num_groups"], event["end_s"] + shift_s)

    def _fleet(self, event: Row, shift_s: float) -> Iterator[Row]:
        at = event["end_s"] + shift_s
        for endpoint, before, after in event["changes"]:
            yield from self._mark(endpoint, "state", f"{before or 'new'} to {after}", at, {"version": event["version"]})
        for endpoint in event["left"]:
            yield from self._mark(endpoint, "state", "left", at, {"version": event["version"]})

    def _memory_turn(self, event: Row, shift_s: float) -> Iterator[Row]:
        for endpoint in event["servers"]:
            yield from self._slice(endpoint, "memory", event["kind"], _span(event, shift_s), {})

    def _instant(self, event: Row, shift_s: float) -> Iterator[Row]:
        facts = {key: value for key, value in event.items() if key not in ("kind", "start_s", "end_s")}
        name = event.get("reason") or event.get("what") or event["kind"]
        yield from self._mark(_RUN, event["kind"], name, event["end_s"] + shift_s, facts)

    def _step(self, step: Row, shift_s: float) -> Iterator[Row]:
        for key, name in _COUNTERS.items():
            if isinstance(value := step.get(key), int | float) and math.isfinite(value):
                yield from self._counter(name, value, step["end_s"] + shift_s)

    # ----------------------------------------------------------------------------------------------------------- rows

    def _slice(
        self,
        process: str,
        track: str,
        name: str,
        span: tuple[float, float],
        facts: Mapping[str, Any],
        inner: Sequence[_Inner] = (),
    ) -> Iterator[Row]:
        """Yield a slice in a free track of this name, and then the slices inside it."""
        start, end = map(_microseconds, span)
        number = self._tracks.setdefault((process, track), _Tracks()).place(start, end)
        thread = track if number == 0 else f"{track} {number + 1}"
        pid, tid, new = self._place(process, thread)
        yield from new
        whole = _Inner(name, track.partition(":")[0], span, facts)
        for one in (whole, *inner):
            start, end = map(_microseconds, one.span)
            yield {
                "ph": "X",
                "name": one.name,
                "cat": one.category,
                "pid": pid,
                "tid": tid,
                "ts": start,
                "dur": end - start,
                "args": dict(one.facts),
            }

    def _mark(self, process: str, track: str, name: str, at_s: float, facts: Mapping[str, Any]) -> Iterator[Row]:
        pid, tid, new = self._place(process, track)
        yield from new
        scope = "g" if track == "failure" else "p"
        yield {
            "ph": "i",
            "name": name,
            "cat": track,
            "pid": pid,
            "tid": tid,
            "ts": _microseconds(at_s),
            "s": scope,
            "args": dict(facts),
        }

    def _counter(self, name: str, value: float, at_s: float, process: str = _RUN) -> Iterator[Row]:
        pid, tid, new = self._place(process, "counters")
        yield from new
        counter, _, series = name.rpartition(" ")  # Perfetto shows both in one line
        yield {"ph": "C", "name": counter, "pid": pid, "tid": tid, "ts": _microseconds(at_s), "args": {series: value}}

    def _place(self, process: str, thread: str) -> tuple[int, int, list[Row]]:
        """Return the ids of a process and a thread, and metadata rows for new ones."""
        new = []
        if process not in self._processes:
            pid = self._processes[process] = len(self._processes) + 1
            order = {_RUN: 0, _TRAINER: 1}.get(process, pid + 1)
            new.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
            new.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}})
        pid = self._processes[process]
        if (pid, thread) not in self._threads:
            tid = self._threads[pid, thread] = len(self._threads) + 1
            new.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}})
        return pid, self._threads[pid, thread], new


def _inner_slices(request: Row, shift_s: float) -> tuple[list[_Inner], list[_Inner]]:
    """Return the slices inside a request and, separately, the turns that do not fit there because they overlap.

    The time between turns belongs to the episode's environment.
    """
    inner: list[_Inner] = []
    overlapping: list[_Inner] = []
    free_s = sampled_s = request["start_s"]
    for turn in turns_of(request):
        if turn.start_s > sampled_s:
            inner.append(_environment(sampled_s + shift_s, turn.start_s + shift_s))
        if turn.start_s >= free_s:
            inner.append(_turn_slice(turn, request["item"], shift_s))
            free_s = turn.end_s
        else:
            overlapping.append(_turn_slice(turn, request["item"], shift_s))
        sampled_s = max(sampled_s, turn.end_s)
    if inner and request["end_s"] > sampled_s:
        inner.append(_environment(sampled_s + shift_s, request["end_s"] + shift_s))
    return inner, overlapping


def _environment(start_s: float, end_s: float) -> _Inner:
    return _Inner("environment", "environment", (start_s, end_s), {})


def _turn_slice(turn: TurnSpan, item: int, shift_s: float) -> _Inner:
    versions = sorted({version for _, _, version in turn.spans})
    facts = {"item": item, "tokens": turn.num_tokens, "versions": versions}
    span = (turn.start_s + shift_s, turn.end_s + shift_s)
    return _Inner(f"turn {turn.number} {_first_to_last(versions)}".rstrip(), "turn", span, facts)


def _first_to_last(versions: Sequence[int]) -> str:
    return "-".join(f"v{version}" for version in dict.fromkeys((*versions[:1], *versions[-1:])))


def _span(event: Row, shift_s: float) -> tuple[float, float]:
    return event["start_s"] + shift_s, event["end_s"] + shift_s


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
