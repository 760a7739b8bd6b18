"""The tables of kept campaigns: which faults were injected, and what held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.tables.kept import kept

_ORDER = ("controller", "server", "engine", "engine core", "engine server", "rank", "disk", "store", "reward")

Runs = Sequence[dict[str, Any]]


def campaign_table() -> str:
    """Return one row for each kind of fault, with the runs in which each rule held."""
    record = kept("campaign")
    rules, played = record["rows"]["rules"], _played(record)
    lines = [
        f"| fault in | kind | times | run continued | ended and was resumed | {' | '.join(rules)} |",
        f"|---|---|---|---|---|{'---|' * len(rules)}",
        *(f"| {' | '.join(cells)} |" for cells in _cells(played, rules)),
    ]
    minutes = record["rows"]["wall_s"] / 60
    machine, torch = record["machine"], record["versions"]["torch"]
    return "\n".join(lines) + (
        f"\n\n{_counts(played)} in {minutes:.0f} minutes: {_verdict(played)}. {record['date']}, "
        f"{machine['processor']}, {machine['cores']} cores, torch {torch}."
    )


def campaign_engines_table() -> str:
    """Return one row for each engine and kind of fault, and the totals of each engine and model."""
    record = kept("campaign_engines")
    rules, played = record["rows"]["rules"], _played(record)
    lines = [
        f"| engine | fault in | kind | times | run continued | ended and was resumed | {' | '.join(rules)} |",
        f"|---|---|---|---|---|---|{'---|' * len(rules)}",
    ]
    for engine in sorted({run["engine"] for run in played}):
        of_engine = [run for run in played if run["engine"] == engine]
        lines += [f"| {engine} | {' | '.join(cells)} |" for cells in _cells(of_engine, rules)]
    totals = [
        "| engine | model | runs | attached to the engine | started the engine | starts of the run | injected faults | "
        "in the engine | groups that the engine sampled | failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted({(run["engine"], run["engine_version"], run["model"]) for run in played}):
        runs = [run for run in played if (run["engine"], run["engine_version"], run["model"]) == key]
        forms = [run["engine_form"] for run in runs]
        incarnations = [incarnation for run in runs for incarnation in run["incarnations"]]
        struck = [what for incarnation in incarnations for _, what in incarnation["struck"]]
        num_groups = sum(incarnation["engine_groups"] for incarnation in incarnations)
        num_in_engine = sum(what.startswith("engine") for what in struck)
        cells = [f"{key[0]} {key[1]}", key[2], len(runs), forms.count("attached"), forms.count("started")]
        cells += [len(incarnations), len(struck), num_in_engine, f"{num_groups:,}", _verdict(runs)]
        totals.append(f"| {' | '.join(map(str, cells))} |")
    machine = record["machine"]
    return "\n".join([*totals, "", *lines]) + (
        f"\n\n{_counts(played)}. {record['date']}, {machine['processor']}, {machine['cores']} cores."
    )


def _played(record: dict[str, Any]) -> Runs:
    return [run for run in record["rows"]["runs"] if run["skipped"] is None]


def _counts(runs: Runs) -> str:
    num_incarnations = sum(len(run["incarnations"]) for run in runs)
    num_strikes = sum(len(incarnation["struck"]) for run in runs for incarnation in run["incarnations"])
    return f"{len(runs)} runs, {num_incarnations} starts, {num_strikes} injected faults"


def _verdict(runs: Runs) -> str:
    failed = [run["seed"] for run in runs if run["problems"]]
    return f"**{len(failed)} failed**" + (f" (seeds {', '.join(map(str, failed))})" if failed else "")


def _cells(runs: Runs, rules: Sequence[str]) -> list[list[str]]:
    """Return the cells of one row for each kind of fault, without the columns before it."""
    rows = _rows(runs)
    found = []
    for struck, how in sorted(rows, key=lambda key: (_ORDER.index(key[0]) if key[0] in _ORDER else 99, key)):
        row = rows[struck, how]
        held = [_share(row["runs"], row[rule]) for rule in rules]
        found.append([struck, how, *(str(row[column]) for column in ("times", "continued", "ended")), *held])
    return found


def _rows(runs: Runs) -> dict[tuple[str, str], dict[str, int]]:
    rows: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for run in runs:
        strikes = [
            (struck, how, incarnation) for incarnation in run["incarnations"] for how, struck in incarnation["struck"]
        ]
        strikes += [("prompts", "some are refused", run["incarnations"][-1])] if run["long_every"] else []
        for struck, how, incarnation in strikes:
            rows[struck, how]["times"] += 1
            rows[struck, how]["continued" if incarnation["exit"] == 0 else "ended"] += 1
        for key in {(struck, how) for struck, how, _ in strikes}:
            rows[key]["runs"] += 1
            for rule in run["problems"]:
                rows[key][rule] += 1
    return rows


def _share(num_runs: int, num_failed: int) -> str:
    return str(num_runs) if num_failed == 0 else f"**{num_runs - num_failed} of {num_runs}**"
