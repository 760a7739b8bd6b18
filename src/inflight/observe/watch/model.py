"""The state of a run as the page shows it, accumulated from events. Its size is bounded, however long the run is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from inflight.observe.watch.lanes import Lane
from inflight.observe.watch.notices import Notices
from inflight.observe.watch.rollouts import Items, longest_part
from inflight.observe.watch.series import StepTable, TimeBins, VersionCounts, columns_of
from inflight.observe.watch.server_states import ServerStates

Event = Mapping[str, Any]

_PARTS = ("gather_s", "wire_s", "load_s", "pause_s", "first_token_s")
"""Parts of a publish, in the order of the rows of its lane."""
_SECTIONS = ("publish", "ledger", "littles_law")
"""Nested dicts of a step whose values are also plotted."""
_QUIET_REASONS = ("equal rewards", "stale", "filtered", "surplus")
"""Reasons for dropping an item that are not failures."""


@dataclass
class Reading:
    """The progress of reading the files of a run."""

    has_steps: threading.Event = field(default_factory=threading.Event)
    """Set once a follower has read the steps that existed when it started."""
    is_complete: bool = False
    """Whether the model contains everything that existed when the follower started."""
    problem: str = ""
    """Why the files cannot be read; empty if they can."""


class Rates:
    """Amounts over time: tokens and busy time of each server, training time of each rank, and running groups."""

    def __init__(self) -> None:
        self.tokens, self.busy, self.training, self.running = TimeBins(), TimeBins(), TimeBins(), TimeBins()
        self._num_running = (0.0, 0)

    def set_running(self, time_s: float, num_groups: int) -> None:
        """Record how many groups are being sampled or scored from this time on."""
        since_s, num = self._num_running
        if time_s > since_s:
            self.running.add("running", since_s, time_s, num * (time_s - since_s))
        self._num_running = (time_s, num_groups)

    def forget_after(self, time_s: float) -> None:
        """Remove data after ``time_s``, which the next process repeats."""
        for bins in (self.tokens, self.busy, self.training, self.running):
            bins.forget_after(time_s)
        self._num_running = (time_s, 0)


class RunModel:
    """The known state of one run. One thread may call `fold` while others read the state."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = threading.Lock()
        self.revision = 0
        """Changes whenever events have been added."""
        self.reading = Reading()
        self.reading.has_steps.set()
        self.number = 0
        """How many times another run has replaced the one in the directory."""
        self._forget_all()

    def _forget_all(self) -> None:
        """Reset to the state before the first event."""
        self.began: Event = {}
        self.version = 0
        self.end_s = 0.0
        """Time of the newest event."""
        self.status = "empty"
        """``empty``, ``running``, ``finished``, ``interrupted``, ``failed``, or ``unreadable`` after damaged events."""
        self.steps = StepTable()
        self.counts = {"ages": VersionCounts(), "lags": VersionCounts()}
        self.ledger: Event = {}
        self._last_ledger: dict[str, Any] = {}
        """Final counts of the ledger, once the run has ended."""
        self.rates = Rates()
        self.items = Items()
        self.lanes: dict[str, Lane] = {}
        self.servers = ServerStates()
        self.notices = Notices()

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration; empty before the first event."""
        config: Mapping[str, Any] = self.began.get("config") or {}
        return config

    # ------------------------------------------------------------------------------------------------------- folding

    def fold(self, events: Iterable[Event], at_once: int = 500) -> bool:
        """Add events and steps from an `EventFollower` to the state; return whether there were any.

        Other threads may read the state after every ``at_once`` events.
        """
        events, is_changed = iter(events), False
        while chunk := list(islice(events, at_once)):
            with self.lock:
                steps: list[Event] = []
                for event in chunk:
                    if event["kind"] == "step":
                        steps.append(event)
                    elif fold := _FOLDS.get(event["kind"]):
                        fold(self, event)
                        self.end_s = max(self.end_s, event["end_s"])
                self._fold_steps(steps)
                self.revision += 1
            is_changed = True
        return is_changed

    def _fold_steps(self, steps: Sequence[Event]) -> None:
        """Add steps; a step whose version is already known replaces all steps from that version on."""
        first = 0
        last = self.steps.last
        for i, step in enumerate(steps):
            if step["version"] <= last:
                self._add_steps(steps[first:i])
                self.steps.forget_from(step["version"])
                self.counts["ages"].forget_from(step["version"])
                first = i
            last = step["version"]
        self._add_steps(steps[first:])

    def _add_steps(self, steps: Sequence[Event]) -> None:
        if not steps:
            return
        for step in steps:
            if ages := step.get("completions_by_age"):
                self.counts["ages"].add(step["version"], zip(map(int, ages), ages.values(), strict=True))
        columns = columns_of(steps)
        for section in _SECTIONS:
            parts = columns_of([it if isinstance(it, dict) else {} for it in columns.pop(section, [{}])])
            columns |= {f"{section}.{name}": values for name, values in parts.items()}
        del columns["start_s"], columns["end_s"]
        self.steps.add(columns.pop("version"), columns)
        newest = steps[-1]
        self.version = newest["version"]
        self.ledger = self._last_ledger or newest.get("ledger") or {}
        self.end_s = max(self.end_s, newest["end_s"])

    def _began(self, event: Event) -> None:
        if event.get("is_new_run"):
            self._forget_all()
            self.number += 1
        is_again = bool(self.began) and abs(event["began_at"] - self.began["began_at"]) > 0.5
        self.began = {**event, "config": event.get("config") or self.config}
        self.version = max(self.version, event["version"]) if not is_again else event["version"]
        self.status, self._last_ledger = "running", {}
        if is_again:
            self._forget_after(event["start_s"], event["version"])
            self.notices.mark(event, "resumed", f"resumed from version {event['version']}")

    def _forget_after(self, time_s: float, version: int) -> None:
        """Remove what the previous process did after the checkpoint from which the run was resumed."""
        self.end_s = time_s
        self.counts["lags"].forget_from(version + 1)
        for lane in self.lanes.values():
            lane.forget_after(time_s)
        self.rates.forget_after(time_s)
        self.items.forget_after(time_s, version)
        self.notices.forget_marks_after(time_s)
        self.servers.leave_all(time_s)

    def _request(self, event: Event) -> None:
        start_s, end_s, name = event["start_s"], event["end_s"], event["endpoint"]
        item = self.items.at(event["item"], start_s, end_s)
        if item.state != "unfinished":  # issued again
            item.state, item.reason, item.version, item.rewards, item.lengths = "unfinished", "", None, (), ()
            item.parts = {}
        segments = longest_part(event["parts"], item.parts)
        num_tokens = 0
        for part in event["parts"]:
            before = item.parts.get(part["number"])
            num_tokens += max(0, part["num_tokens"] - (before[0] if before else 0))
            item.parts[part["number"]] = (part["num_tokens"], part["spans"], part["finish_reason"])
            if turns := part.get("turns"):
                item.turns[part["number"]] = turns
        item.endpoints[name] = None
        error = event["error"]
        item.requests.append(
            {
                "start_s": start_s,
                "end_s": end_s,
                "endpoint": name,
                "request_id": event["request_id"],
                "numbers": list(event["numbers"]),
                "num_tokens": num_tokens,
                "error": error,
            }
        )
        self._lane(f"server {name}", name, "server").add(
            start_s, end_s, (event["item"], num_tokens, segments, _outcome(error), self._turns(event))
        )
        self.rates.tokens.add(name, start_s, end_s, num_tokens)
        self.rates.busy.add(name, start_s, end_s, end_s - start_s)
        server = self.servers.working(name, end_s)
        server["num_requests"] += 1
        server["num_tokens"] += num_tokens
        server["last_s"] = end_s
        if _outcome(error) == 1:
            server["num_errors"] += 1
            self.notices.fail(event, "request lost", error, name)

    @staticmethod
    def _turns(event: Event) -> list[list[float]]:
        """Return the start and end of each turn that was sampled in a request."""
        parts = [part["turns"] for part in event["parts"] if part.get("turns")]
        return sorted([turn[0], turn[1]] for turns in parts for turn in turns if turn[1] >= event["start_s"])

    def _running(self, event: Event) -> None:
        self.rates.set_running(event["end_s"], event["num_groups"])

    def _group(self, event: Event) -> None:
        item = self.items.at(event["item"], event["start_s"], event["end_s"])
        item.state, item.oldest, item.newest = "waiting", event["oldest"], event["newest"]
        item.rewards, item.lengths = event["rewards"], event["lengths"]

    def _drop(self, event: Event) -> None:
        item = self.items.at(event["item"], event["start_s"], event["end_s"])
        item.state, item.reason = "dropped", event["reason"]
        if event["what"]:
            item.what.append(event["what"])
        if event["reason"] not in _QUIET_REASONS:
            self.notices.fail(event, f"dropped: {event['reason']}", event["what"], f"item {event['item']}")

    def _episode_failed(self, event: Event) -> None:
        self.items.at(event["item"], event["start_s"], event["end_s"]).what.append(event["what"])
        self.notices.fail(event, f"episode: {event['reason']}", event["what"], f"item {event['item']}")

    def _train(self, event: Event) -> None:
        version = event["version"]
        self.version = max(self.version, version)
        for rank, (start_s, end_s) in enumerate(event["ranks"]):
            self._lane(f"rank {rank}", f"trainer rank {rank}", "rank").add(start_s, end_s, version, 0)
            self.rates.training.add(f"rank {rank}", start_s, end_s, end_s - start_s)
        for number in event["items"]:
            item = self.items.at(number, event["start_s"], event["end_s"])
            item.state, item.version = "trained", version
            self.counts["lags"].add(
                version,
                (
                    (version - 1 - of_token, end - start)
                    for _, spans, _ in item.parts.values()
                    for start, end, of_token in spans
                ),
            )

    def _publish(self, event: Event) -> None:
        lane = self._lane("publish", "publish", "publish")
        end_s = event["end_s"]
        resumed = end_s
        begins = {
            "gather_s": event["start_s"],
            "wire_s": max(event["start_s"], end_s - event["pause_s"] - event["wire_s"]),
            "pause_s": end_s - event["pause_s"],
            "load_s": end_s - event["pause_s"],
            "first_token_s": resumed,
        }
        for row, part in enumerate(_PARTS):
            if (length := event[part]) is not None:
                lane.add(begins[part], begins[part] + length, event["version"], row)
        for name, outcome in event["outcomes"].items():
            server = self.servers.working(name, end_s) if outcome == "applied" else self.servers.at(name)
            server["outcome"] = outcome
            if (paused_s := event["paused_s"].get(name)) is not None:
                server["paused_s"] = (server["paused_s"] or 0.0) + paused_s
            if outcome == "applied":
                server["version"] = event["version"]
            else:
                self.notices.fail(event, "publish", f"version {event['version']}: {outcome}", name)

    def _fleet(self, event: Event) -> None:
        for name, before, after in event["changes"]:
            self._change(event, name, after, before)
        for name in event.get("left") or ():
            self._change(event, name, "left", None)
        for name, state in (event.get("states") or {}).items():
            if self.servers.at(name)["state"] != state:
                self._change(event, name, state, None)

    def _change(self, event: Event, name: str, state: str, before: str | None) -> None:
        self.servers.change(name, event["end_s"], state, before)
        self.notices.mark(event, "fleet", f"{name} {state}")
        if state in ("suspect", "dead"):
            self.notices.fail(event, "server", state, name)

    def _versions(self, event: Event) -> None:
        for name, version in event["servers"].items():
            self.servers.at(name)["version"] = version

    def _memory(self, event: Event) -> None:
        for name in event["servers"]:
            self._lane("memory", "memory turns", "memory").add(
                event["start_s"], event["end_s"], (event["kind"].removeprefix("memory_"), name)
            )

    def _failure(self, event: Event) -> None:
        self.status = "failed"
        self.notices.mark(event, "failure", event["what"])
        self.notices.fail(event, "run", event["what"], "")

    def _ended(self, event: Event) -> None:
        if self.status != "failed":
            self.status = "interrupted" if event["is_interrupted"] else "finished"
        self._last_ledger = event.get("ledger") or {}
        self.ledger = self._last_ledger or self.ledger

    # ----------------------------------------------------------------------------------------------------- its parts

    def _lane(self, key: str, name: str, kind: str) -> Lane:
        if key not in self.lanes:
            self.lanes[key] = Lane(name, kind)
        return self.lanes[key]

    def _saved(self, event: Event) -> None:
        self.notices.mark(event, "saved", f"checkpoint of version {event['version']}")

    def _scaled(self, event: Event) -> None:
        self.notices.mark(event, "scale", f"{event['change']}: {', '.join(event['servers'])}")


_FOLDS: Mapping[str, Callable[[RunModel, Event], None]] = {
    "run_started": RunModel._began,
    "request": RunModel._request,
    "running_groups": RunModel._running,
    "group": RunModel._group,
    "item_dropped": RunModel._drop,
    "episode_failed": RunModel._episode_failed,
    "train": RunModel._train,
    "publish": RunModel._publish,
    "checkpoint_saved": RunModel._saved,
    "fleet_changed": RunModel._fleet,
    "served_versions": RunModel._versions,
    "fleet_scaled": RunModel._scaled,
    "memory_released": RunModel._memory,
    "memory_restored": RunModel._memory,
    "failure": RunModel._failure,
    "run_ended": RunModel._ended,
}


def _outcome(error: str | None) -> int:
    """Return 0 for a request that was answered, 1 for one that was lost, and 2 for one that the run cancelled."""
    return 0 if error is None else 2 if error == "cancelled" else 1
