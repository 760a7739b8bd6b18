"""Plots of a run, drawn from what it wrote: rewards, token lag, lengths, and the timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError

_COLOURS = {"reward": "#1f6feb", "train": "#2da44e", "publish": "#cf222e", "generate": "#8250df"}
_TIMELINE_S = 10.0


def plot_run(directory: Path) -> list[Path]:
    """Draw the plots of a run directory into ``plots/``; returns the files, none if the run made no step.

    A full disk raises `CheckpointError`.
    """
    rows = _lines(directory / "metrics.jsonl")
    if not rows:
        return []
    import matplotlib

    matplotlib.use("Agg")
    summary = json.loads((directory / "summary.json").read_text())
    target = directory / "plots"
    try:
        target.mkdir(exist_ok=True)
        return [
            _plot_reward(rows, target / "reward.png"),
            _plot_histogram(
                summary["tokens_by_lag"], "token lag in versions", "trained tokens", target / "token_lag.png"
            ),
            _plot_lengths(rows, summary["completions_by_length"], target / "lengths.png"),
            _plot_timeline(_lines(directory / "events.jsonl"), target / "timeline.png"),
        ]
    except OSError as error:
        raise CheckpointError(f"plots cannot be written to {target}: {error.strerror}") from error


def smoothed(values: Sequence[float], window: int = 10) -> list[float]:
    """Return the running mean over the last ``window`` values."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / (i + 1 - max(0, i - window + 1)) for i in range(len(values))]


def _plot_reward(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    rewarded = [row for row in rows if row["reward"] is not None]
    rewards = [row["reward"] for row in rewarded]
    for axis, key, label in ((axes[0], "time_s", "seconds"), (axes[1], "num_samples", "completions sampled")):
        xs = [row[key] for row in rewarded]
        axis.plot(xs, rewards, ".", color=_COLOURS["reward"], alpha=0.25, label="one step")
        axis.plot(xs, smoothed(rewards), color=_COLOURS["reward"], label="mean of ten steps")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean reward")
    axes[0].set_ylim(-0.02, 1.02 if max(rewards, default=0) <= 1 else None)
    axes[1].legend(loc="lower right")
    return _save(figure, path)


def _plot_histogram(counts: dict[str, int], label: str, what: str, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    keys = sorted(map(int, counts))
    total = max(1, sum(counts.values()))
    axis.bar(keys, [counts[str(key)] / total for key in keys], color=_COLOURS["generate"])
    axis.set_xlabel(label)
    axis.set_ylabel(f"share of {what}")
    axis.grid(alpha=0.3, axis="y")
    axis.xaxis.get_major_locator().set_params(integer=True)
    return _save(figure, path)


def _plot_lengths(rows: Sequence[dict[str, Any]], counts: dict[str, int], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    lengths = [int(key) for key, count in counts.items() for _ in range(count)]
    axes[0].hist(lengths, bins=40, color=_COLOURS["generate"])
    axes[0].set_xlabel("tokens of a completion")
    axes[0].set_ylabel("completions")
    measured = [row for row in rows if row["completion_length"] is not None]
    axes[1].plot([row["version"] for row in measured], [row["completion_length"] for row in measured], color="#555")
    axes[1].set_xlabel("optimizer step")
    axes[1].set_ylabel("mean tokens of a completion")
    axes[1].grid(alpha=0.3)
    return _save(figure, path)


def _plot_timeline(events: Sequence[dict[str, Any]], path: Path) -> Path:
    """A few seconds from the middle of the run: how many groups are running, and what the trainer does."""
    import matplotlib.pyplot as plt

    ends = [event["end_s"] for event in events if event["kind"] == "train"]
    middle = ends[len(ends) // 2] if ends else 0.0
    low, high = middle - _TIMELINE_S / 2, middle + _TIMELINE_S / 2
    figure, axes = plt.subplots(2, 1, figsize=(11, 4), sharex=True, height_ratios=(2, 1), layout="constrained")
    running = [event for event in events if event["kind"] == "running"]
    axes[0].fill_between(
        [event["end_s"] for event in running],
        [event["num_groups"] for event in running],
        step="post",
        color=_COLOURS["generate"],
        alpha=0.6,
    )
    axes[0].set_ylabel("groups being generated")
    for height, kind in enumerate(("publish", "train")):
        spans = [(e["start_s"], e["end_s"] - e["start_s"]) for e in events if e["kind"] == kind]
        axes[1].broken_barh(spans, (height - 0.4, 0.8), color=_COLOURS[kind])
    axes[1].set_yticks([0, 1], ["update", "train"])
    axes[1].set_xlabel("seconds since the run began")
    axes[1].set_xlim(max(0.0, low), high)
    axes[0].grid(alpha=0.3)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
