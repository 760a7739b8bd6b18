"""What has to hold for a run, whatever struck it; each rule returns what is wrong in sentences.

- ledger: counts of checkpoints, metrics and summary add up and agree.
- items: nothing that a checkpoint says is settled is made again, what it settles was scored since the one before, and
  what it lists as not settled is taken up by the run that is resumed from it. The task's own record is compared.
- versions: each optimizer step stands once, in order, in the metrics; the run gets to its end.
- reward: finite, and not lower at the end than a short run may waver; long runs get back to where they were.
- ends clearly: with status 0, 1 or 130, an `InflightError` that begins in a line of its own, and no traceback (one that
  a message quotes of a child is indented); an incarnation that nothing strikes, or only what a run survives, ends well.
- in time: no wait outlives the deadlines of the run.
- nothing left: no process, port, shared memory, temporary or half-written file.
- engine: in runs with a real engine, it sampled, and sampled again after it was struck, if the run lasted; versions and
  lags of what was sampled are possible.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.runner import PACED_AFTER, Incarnation, Record
from tests.campaigns.schedule import CONTROLLER, ENGINE_PARTS, SERVERS, Schedule
from tests.campaigns.settings import GROUP_SIZE, KEEPS

_SCORED_REASONS = ("equal rewards", "stale")
"""Why an item is dropped after it was scored."""
MAX_LAG = 8
"""The setting of the quickstart."""


def ledger(record: Record) -> list[str]:
    problems = []
    for version, state in _checkpoints(record):
        told = state["ledger"]
        settled = told["num_trained"] + sum(told["num_dropped"].values())
        if settled + len(set(told["unsettled"])) != told["next_new"] or len(set(told["unsettled"])) != len(
            told["unsettled"]
        ):
            problems.append(
                f"checkpoint {version}: {settled} settled, {len(told['unsettled'])} not, {told['next_new']} issued"
            )
        rows = [row for row in _rows(record) if row["version"] == version]
        if rows and rows[-1]["ledger"]["trained"] != told["num_trained"]:
            problems.append(
                f"version {version} trained {rows[-1]['ledger']['trained']}, its checkpoint {told['num_trained']}"
            )
    trained = sequences = 0
    for row in _rows(record):
        before, trained = trained, row["ledger"]["trained"]
        sequences += row["num_step_sequences"]
        if trained <= before or sequences > GROUP_SIZE * trained:
            problems.append(f"step {row['version']}: {trained} items trained after {before}, {sequences} sequences")
    if _is_done(record):
        summary = json.loads((record.directory / "summary.json").read_text())
        if summary["ledger"]["trained"] != trained or summary["failure"] is not None:
            problems.append(f"the summary says {summary['ledger']['trained']} trained, the last step {trained}")
    return problems


def items(record: Record) -> list[str]:
    problems = []
    made, scored = _record_of_task(record)
    states = [incarnation.resumed for incarnation in record.incarnations] + [_final_state(record)]
    for incarnation, (before, after) in zip(record.incarnations, itertools.pairwise(states), strict=True):
        again = sorted(_settled(before) & set(made[incarnation.index]))
        if again:
            problems.append(
                f"incarnation {incarnation.index} made items {again[:5]} again, which its checkpoint had settled"
            )
        if after is None:
            continue
        new = _settled(after) - _settled(before)
        unscored = [item for item in new if scored[incarnation.index][item] < GROUP_SIZE]
        dropped = _dropped(after) - _dropped(before)
        allowed = sum(count for reason, count in dropped.items() if reason not in _SCORED_REASONS)
        if len(unscored) > allowed:
            problems.append(
                f"incarnation {incarnation.index} settled {len(unscored)} items without scores: {sorted(unscored)[:5]}"
            )
        if lost := _settled(before) - _settled(after):
            problems.append(f"incarnation {incarnation.index} forgot that items {sorted(lost)[:5]} were settled")
        if before is not None and incarnation.version >= incarnation.resumed_version + 2:
            left = [item for item in before["ledger"]["unsettled"] if item not in made[incarnation.index]]
            new = [item for item in made[incarnation.index] if item >= before["ledger"]["next_new"]]
            if left and new:  # a short run may end before all that waited are issued again, but they come first
                problems.append(
                    f"incarnation {incarnation.index} issued items {sorted(new)[:5]}, but items {left[:5]} never again"
                )
    return problems


def versions(record: Record) -> list[str]:
    problems = []
    found = [row["version"] for row in _rows(record)]
    if found != sorted(set(found)) or found[:1] not in ([], [1]) or found != list(range(1, len(found) + 1)):
        problems.append(f"metrics.jsonl holds versions {found}")
    if _torn(record):
        problems.append(f"metrics.jsonl has a torn line: {_torn(record)[:80]!r}")
    for row in _rows(record):
        published = (row.get("publish") or {}).get("version", row["version"])
        if published != row["version"]:
            problems.append(f"step {row['version']} published version {published}")
    if _is_done(record) and (not found or found[-1] != record.schedule.num_steps):
        problems.append(f"the run is done at version {found[-1:]}, it has {record.schedule.num_steps} steps")
    if record.incarnations and record.incarnations[-1].exit != 0:
        problems.append(f"the run did not get to its end in {len(record.incarnations)} incarnations")
    reached = [incarnation.resumed_version for incarnation in record.incarnations]
    if reached != sorted(reached):
        problems.append(f"it was resumed from versions {reached}")
    return problems


def reward(record: Record) -> list[str]:
    rewards = [row["reward"] for row in _rows(record) if row["reward"] is not None]
    if not all(math.isfinite(value) and 0.0 <= value <= 1.0 for value in rewards):
        return [f"rewards {rewards}"]
    if len(rewards) < 6:
        return []
    width = 10 if len(rewards) >= 40 else 3
    before, after = statistics.fmean(rewards[:width]), statistics.fmean(rewards[-width:])
    least = 1.5 * before if width == 10 else 0.6 * before
    return [f"the reward went from {before:.3f} to {after:.3f}"] if after < least else []


def ends_clearly(record: Record) -> list[str]:
    problems = []
    for incarnation in record.incarnations:
        name = f"incarnation {incarnation.index}"
        if incarnation.hang is not None:
            continue
        if "\nTraceback (most recent call last)" in f"\n{incarnation.said}":
            problems.append(f"{name} shows a traceback: {_around(incarnation.said, 'Traceback')}")
        expected = {0, 1, 130}
        for strike in incarnation.strikes:
            if strike.target == CONTROLLER and strike.kind == "SIGKILL":
                expected.add(-9)
            if (
                strike.target == CONTROLLER
                and strike.kind == "SIGTERM"
                and incarnation.version == incarnation.resumed_version
            ):
                expected.add(-15)  # before the run could say what to do then
        if incarnation.was_put_down:
            expected.add(-9)
        if incarnation.exit not in expected:
            problems.append(f"{name} ended with status {incarnation.exit}: {incarnation.said[-200:]}")
        if incarnation.exit == 1 and len(incarnation.last_line) < 20:
            problems.append(f"{name} ended with status 1 and says: {incarnation.said[-200:]!r}")
        if incarnation.exit not in (0, -9, -15) and _has_to_survive(incarnation, record.schedule):
            struck = "; ".join(map(str, incarnation.strikes)) or "nothing"
            problems.append(
                f"{name} ended with status {incarnation.exit} after {struck}: {incarnation.last_line[:300]}"
            )
    return problems


def in_time(record: Record) -> list[str]:
    return [
        f"incarnation {incarnation.index}: {incarnation.hang}"
        for incarnation in record.incarnations
        if incarnation.hang is not None
    ]


def nothing_left(record: Record) -> list[str]:
    problems = [
        f"incarnation {incarnation.index}: {what}" for incarnation in record.incarnations for what in incarnation.left
    ]
    if _is_done(record):
        problems += [
            f"{path.relative_to(record.place)} is left"
            for path in sorted(record.place.rglob("*"))
            if ".partial" in path.name or ".tmp" in path.name or path.parent == record.place / "tmp"
        ]
        kept = list((record.directory / "checkpoints").glob("version-*/"))
        if len(kept) > KEEPS:
            problems.append(f"{len(kept)} checkpoints are kept, not {KEEPS}")
        states = list((record.directory / "checkpoints").glob("version-*.json"))
        if len(states) > KEEPS:
            problems.append(f"{len(states)} states of checkpoints are kept, not {KEEPS}")
    return problems


def engine(record: Record) -> list[str]:
    if record.schedule.engine is None:
        return []
    problems = [] if record.engine_problem is None else [record.engine_problem]
    for row in _rows(record):
        ages = [int(age) for age in row["completions_by_age"]]
        lags = [row["lag_mean"], row["lag_max"], *ages]
        if not all(0 <= lag <= MAX_LAG for lag in lags if lag is not None):
            problems.append(f"step {row['version']} trained on lags {lags}")
    for group in _groups(record):
        if not 0 <= group["oldest"] <= group["newest"] <= record.schedule.num_steps:
            problems.append(f"versions {group['oldest']} to {group['newest']} sampled item {group['item']}")
    for incarnation in record.incarnations:
        name = f"incarnation {incarnation.index}"
        was_struck = any(strike.target in record.schedule.engine_targets for strike in incarnation.strikes)
        had_to_sample = not was_struck and not incarnation.was_engine_down
        if incarnation.exit != 0 or incarnation.version < incarnation.resumed_version + PACED_AFTER + 1:
            continue
        # On a busy machine, the engine may join so late that nothing is issued any more.
        if incarnation.num_issued_since_joined == 0:
            continue
        was_late = "cannot take part yet" in incarnation.said
        if had_to_sample and not was_late and incarnation.num_engine_groups == 0:
            problems.append(f"{name}: the engine sampled nothing, although nothing struck it")
        elif incarnation.engine_up_s > record.schedule.deadlines.back_s and incarnation.num_groups_since == 0:
            problems.append(
                f"{name}: the engine was healthy for {incarnation.engine_up_s:.0f} s, but did not sample again"
            )
    return problems


RULES: dict[str, Callable[[Record], list[str]]] = {
    "ledger": ledger,
    "items": items,
    "versions": versions,
    "reward": reward,
    "ends clearly": ends_clearly,
    "in time": in_time,
    "nothing left": nothing_left,
    "engine": engine,
}


def judge(record: Record) -> dict[str, list[str]]:
    """Return what is wrong, by rule; rules that hold are left out."""
    found = {}
    for name, rule in RULES.items():
        try:
            problems = rule(record)
        except Exception as error:  # what cannot be judged does not hold
            problems = [f"cannot be judged: {error!r}"]
        if problems:
            found[name] = problems
    return found


def _has_to_survive(incarnation: Incarnation, schedule: Schedule) -> bool:
    targets = schedule.engine_targets
    stopped = {
        strike.target
        for strike in incarnation.strikes
        if strike.target in SERVERS and strike.label == "SIGSTOP for good"
    }
    if incarnation.was_engine_down or any(it.target in targets and it.is_outage for it in incarnation.strikes):
        stopped.add("the engine")
    # A controller that is told to end may be told so while a server of its own starts; that ends it well, too.
    was_told = any(strike.target == CONTROLLER and strike.kind == "SIGTERM" for strike in incarnation.strikes)
    started = (*SERVERS, *(() if schedule.engine is None or schedule.engine.is_attached else ENGINE_PARTS))
    starting = any(strike.target in started and strike.step < 0 for strike in incarnation.strikes)
    return (
        all(strike.is_survivable for strike in incarnation.strikes)
        and len(stopped) < 2
        and not was_told
        and not starting
    )


def _is_done(record: Record) -> bool:
    return bool(record.incarnations) and record.incarnations[-1].exit == 0


def _lines(record: Record) -> list[str]:
    path = record.directory / "metrics.jsonl"
    return path.read_text().split("\n") if path.exists() else []


def _rows(record: Record) -> list[dict[str, Any]]:
    rows = []
    for line in _lines(record):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _groups(record: Record) -> list[dict[str, Any]]:
    path = record.directory / "events.jsonl"
    lines = path.read_text().split("\n") if path.exists() else []
    return [json.loads(line) for line in lines if '"kind":"group"' in line and line.endswith("}")]


def _torn(record: Record) -> str:
    """Return a line that is not whole, "" if all are."""
    for line in _lines(record):
        try:
            if line:
                json.loads(line)
        except ValueError:
            return line
    return ""


def _checkpoints(record: Record) -> list[tuple[int, dict[str, Any]]]:
    paths = sorted((record.directory / "checkpoints").glob("version-*.json"))
    return [(int(path.stem.removeprefix("version-")), json.loads(path.read_text())) for path in paths]


def _final_state(record: Record) -> dict[str, Any] | None:
    pointer = record.directory / "checkpoints" / "latest.json"
    if not pointer.exists():
        return None
    version = json.loads(pointer.read_text())["version"]
    state: dict[str, Any] = json.loads((pointer.parent / f"version-{version:06d}.json").read_text())
    return state


def _settled(state: dict[str, Any] | None) -> set[int]:
    return set() if state is None else set(range(state["ledger"]["next_new"])) - {*state["ledger"]["unsettled"]}


def _dropped(state: dict[str, Any] | None) -> Counter[str]:
    return Counter() if state is None else Counter(state["ledger"]["num_dropped"])


def _record_of_task(record: Record) -> tuple[list[Counter[int]], list[Counter[int]]]:
    """Return how often each item was made and scored, incarnation by incarnation."""
    made: list[Counter[int]] = []
    scored: list[Counter[int]] = []
    for line in (record.place / "control" / "record.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == "incarnation":
            made.append(Counter())
            scored.append(Counter())
        else:
            (made if entry["kind"] == "item" else scored)[-1][entry["item"]] += 1
    return made, scored


def _around(text: str, word: str) -> str:
    lines = text[text.index(word) :].splitlines()
    return " | ".join((lines[0], *lines[-3:]))[:400]


def logs(directory: Path, num_lines: int = 12) -> dict[str, Sequence[str]]:
    """Return the last lines of every log of a run."""
    return {
        path.name: path.read_text(errors="replace").splitlines()[-num_lines:]
        for path in sorted((directory / "logs").glob("*.log"))
    }
