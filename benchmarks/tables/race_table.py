"""The tables of benchmarks/race.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

AIMS = {"wall_s": 0.5, "cpu_s": 0.45}
"""Of pipeline over TRL."""
_HEADS = ("tokens", "entrant", "goal reached", "seconds to the goal", "of which after loading", "CPU seconds", "steps")
_STEP_HEADS = ("seconds per step", "CPU seconds per step", "completions per step: sampled, trained")


def race_facts(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return what the page of the results shows, by name."""
    num_rounds = len({row["round"] for row in rows})
    return {
        "race_table": race_table(rows),
        "race_ratios": race_ratios(rows),
        "race_goal": " or ".join(dict.fromkeys(str(row["goal"]) for row in rows)),
        "race_rounds": f"{num_rounds} rounds" if num_rounds > 1 else "one round",
        "trl_version": " and ".join(dict.fromkeys(row["trl"] for row in rows)),
    }


def race_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each limit of tokens and entrant."""
    lines = [f"| {' | '.join(_HEADS + _STEP_HEADS)} |", "|---" * len(_HEADS + _STEP_HEADS) + "|"]
    for max_tokens, entrant in dict.fromkeys((row["max_tokens"], row["entrant"]) for row in rows):
        runs = [row for row in rows if (row["max_tokens"], row["entrant"]) == (max_tokens, entrant)]
        reached = [row for row in runs if row["is_reached"]]
        cells = [str(max_tokens), entrant, f"{len(reached)} of {len(runs)}"]
        cells += [_spread(reached, key, 0) for key in ("wall_s", "sampling_and_training_s", "cpu_s", "num_steps")]
        cells += [_spread(runs, key, 1) for key in ("step_s", "step_cpu_s")]
        cells.append(", ".join(_mean(runs, key) for key in ("samples_per_step", "trained_per_step")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def race_ratios(rows: Sequence[dict[str, Any]]) -> str:
    """Return the ratios of pipeline over TRL to the goal, in each round, beside the aims.

    Only rounds in which the pipeline reached the goal count. Where TRL did not, its time so far makes the ratio an
    upper bound.
    """
    lines = ["| tokens | measure | pipeline ÷ TRL: median (min to max) | target |", "|---|---|---|---|"]
    by_run = {(row["max_tokens"], row["entrant"], row["round"]): row for row in rows}
    for max_tokens in dict.fromkeys(row["max_tokens"] for row in rows):
        pairs = [
            (row, by_run[max_tokens, "trl", row["round"]])
            for row in rows
            if (row["max_tokens"], row["entrant"]) == (max_tokens, "pipeline")
            and row["is_reached"]
            and (max_tokens, "trl", row["round"]) in by_run
        ]
        for key, what in (("wall_s", "seconds"), ("cpu_s", "CPU seconds")):
            bound = "at most " if any(not trl["is_reached"] for _, trl in pairs) else ""
            ratios = [{key: pipeline[key] / trl[key]} for pipeline, trl in pairs]
            lines.append(f"| {max_tokens} | {what} to the goal | {bound}{_spread(ratios, key, 2)} | {AIMS[key]:.2f} |")
    return "\n".join(lines)


def _spread(runs: Sequence[dict[str, Any]], key: str, num_digits: int) -> str:
    """Return the median in bold, and the extremes."""
    if not runs:
        return "-"
    values = [run[key] for run in runs]
    median, low, high = (f"{of(values):,.{num_digits}f}" for of in (statistics.median, min, max))
    return f"**{median}** ({low} to {high})"


def _mean(runs: Sequence[dict[str, Any]], key: str) -> str:
    return f"{statistics.fmean(run[key] for run in runs):.1f}"
