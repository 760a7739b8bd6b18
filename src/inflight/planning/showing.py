"""The table and the plot of ``inflight plan``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.planning.candidates import Candidate
from inflight.planning.search import EvaluatedCandidate

_COLUMNS = (
    "", "mode", "endpoints", "training GPUs", "running each", "group", "lag bound", "scheduler", "tokens/s",
    "token age", "sample age", "steps/h", "endpoints busy", "slots held", "trainer busy",
)  # fmt: skip


def table(found: Sequence[EvaluatedCandidate], numbers: Sequence[int]) -> str:
    """Return a table of numbered configurations as text."""
    rows = [_COLUMNS, *(_row(number, it) for number, it in zip(numbers, found, strict=True))]
    if all(it.candidate.num_training_gpus == found[0].candidate.num_training_gpus for it in found):
        rows = [(*row[:3], *row[4:]) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(number: int, it: EvaluatedCandidate) -> tuple[str, ...]:
    own, steady = it.candidate, it.steady
    return (
        str(number),
        mode_of(own),
        str(own.num_endpoints),
        str(own.num_training_gpus),
        str(own.max_concurrent),
        str(own.group_size),
        "" if own.conventional_steps else str(own.max_lag),
        own.scheduler,
        f"{steady.tokens_per_time:,.0f}",
        f"{steady.lag:.2f}",
        f"{steady.age:.2f}",
        f"{3600 * steady.steps_per_time:,.0f}",
        "" if math.isnan(steady.busy_share) else f"{steady.busy_share:.0%}",
        f"{steady.slot_share:.0%}",
        f"{steady.train_share:.0%}",
    )


def mode_of(candidate: Candidate) -> str:
    """Return the mode of a run in the notation of the table."""
    return f"conventional G={candidate.conventional_steps}" if candidate.conventional_steps else "pipeline"


def draw(found: Sequence[EvaluatedCandidate], best: Sequence[EvaluatedCandidate], path: Path) -> None:
    """Plot tokens per second against token age for every configuration, with the Pareto front as a line.

    Raises `ConfigError` if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axis = figure.subplots()
    line = sorted(best, key=lambda it: it.steady.lag)
    axis.plot(*_points(line), color="#8c959f", linewidth=1, zorder=1, label="best trade-offs")
    for mode, colour, marker in (("conventional", "#1f6feb", "s"), ("pipeline", "#8250df", "o")):
        own = [it for it in found if mode_of(it.candidate).startswith(mode)]
        axis.scatter(*_points(own), c=colour, marker=marker, s=22, alpha=0.35, linewidths=0, zorder=2)
        chosen = [it for it in best if it in own]
        axis.scatter(*_points(chosen), c=colour, marker=marker, s=44, linewidths=0, zorder=3, label=mode)
    for number, it in enumerate(best, 1):
        at = (it.steady.lag, it.steady.tokens_per_time)
        axis.annotate(str(number), at, xytext=(-4, 6), textcoords="offset points", fontsize=8, ha="right")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set(xlabel="mean age of trained tokens, in optimizer steps", ylabel="trained tokens per second")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from error


def _points(found: Sequence[EvaluatedCandidate]) -> tuple[list[float], list[float]]:
    return [it.steady.lag for it in found], [it.steady.tokens_per_time for it in found]


def as_json(it: EvaluatedCandidate) -> dict[str, Any]:
    """Return a configuration and its figures as JSON values."""
    own, steady = it.candidate, it.steady
    return {
        "mode": "conventional" if own.conventional_steps else "pipeline",
        "conventional_steps": own.conventional_steps,
        "endpoints": own.num_endpoints,
        "training_gpus": own.num_training_gpus,
        "max_concurrent": own.max_concurrent,
        "group_size": own.group_size,
        "max_lag": own.max_lag,
        "scheduler": own.scheduler,
        "tokens_per_s": steady.tokens_per_time,
        "steps_per_hour": 3600 * steady.steps_per_time,
        "token_age": steady.lag,
        "sample_age": steady.age,
        "endpoints_busy": None if math.isnan(steady.busy_share) else steady.busy_share,
        "slots_held": steady.slot_share,
        "trainer_busy": steady.train_share,
        "dropped_groups": it.num_dropped,
    }
