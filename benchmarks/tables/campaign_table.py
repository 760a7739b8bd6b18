"""The table of a kept campaign: which faults were injected, and what held."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.tables.kept import kept

_ORDER = ("controller", "server", "rank", "disk", "store", "reward")


def campaign_table() -> str:
    """Return one row for each kind of fault, with the runs in which each rule held."""
    record = kept("campaign")
    rules, runs = record["rows"]["rules"], record["rows"]["runs"]
    played = [run for run in runs if run["skipped"] is None]
    lines = [
        f"| fault in | kind | times | run continued | ended and was resumed | {' | '.join(rules)} |",
        f"|---|---|---|---|---|{'---|' * len(rules)}",
    ]
    rows = _rows(played)
    for struck, how in sorted(rows, key=lambda key: (_ORDER.index(key[0]) if key[0] in _ORDER else 99, key)):
        row = rows[struck, how]
        held = [_share(row["runs"], row[rule]) for rule in rules]
        lines.append(
            f"| {struck} | {how} | {row['times']} | {row['continued']} | {row['ended']} | {' | '.join(held)} |"
        )
    failed = [run["seed"] for run in played if run["problems"]]
    num_incarnations = sum(len(run["incarnations"]) for run in played)
    num_strikes = sum(len(incarnation["struck"]) for run in played for incarnation in run["incarnations"])
    minutes = record["rows"]["wall_s"] / 60
    machine, torch = record["machine"], record["versions"]["torch"]
    verdict = f"**{len(failed)} failed**" + (f" (seeds {', '.join(map(str, failed))})" if failed else "")
    return "\n".join(lines) + (
        f"\n\n{len(played)} runs, {num_incarnations} starts, {num_strikes} injected faults in {minutes:.0f} minutes: "
        f"{verdict}. {record['date']}, "
        f"{machine['processor']}, {machine['cores']} cores, torch {torch}."
    )


def _rows(runs: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, int]]:
    rows: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for run in runs:
        strikes = [
            (struck, how, incarnation) for incarnation in run["incarnations"] for how, struck in incarnation["struck"]
        ]
        strikes += [("prompts", "one in a few refused", run["incarnations"][-1])] if run["long_every"] else []
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
