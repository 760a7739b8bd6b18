"""Plots of a run, drawn from what it wrote: rewards, token lag, lengths, and the timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError
from inflight.pipeline.journal import read_events, read_lines

_COLOURS = {"reward": "#1f6feb", "train": "#2da44e", "publish": "#cf222e", "generate": "#8250df"}
_PARTS = {"gather_s": "#f6c7c9", "wire_s": "#e5737b", "hold_s": "#8b0f1a"}
"""Colours of what an update consists of, as its event names it; drawn over one another, the shortest last."""
_STATES = {"healthy": "#2da44e", "joining": "#1f6feb", "suspect": "#bf8700", "dead": "#cf222e"}
_TIMELINE_S = 10.0


def plot_run(directory: Path) -> list[Path]:
    """Draw the plots of a run directory into ``plots/``; returns the files, none if the run made no step.

    A full disk raises `CheckpointError`.
    """
    rows = list(read_lines(directory / "metrics.jsonl"))
    if not rows:
        return []
    import matplotlib

    matplotlib.use("Agg")
    summary = json.loads((directory / "summary.json").read_text())
    target = directory / "plots"
    fleet = [event for event in read_events(directory) if event["kind"] == "fleet"]
    try:
        target.mkdir(exist_ok=True)
        of_fleet = [_plot_fleet(fleet, rows[-1]["time_s"], target / "fleet.png")] if fleet else []
        return [
            _plot_reward(rows, target / "reward.png"),
            _plot_histogram(
                summary["tokens_by_lag"], "token lag in versions", "trained tokens", target / "token_lag.png"
            ),
            _plot_lengths(rows, summary["completions_by_length"], target / "lengths.png"),
            _plot_timeline(directory, target / "timeline.png"),
            *of_fleet,
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


def _plot_timeline(directory: Path, path: Path) -> Path:
    """A few seconds from the middle of the run: how many groups are running, and what the trainer does."""
    import matplotlib.pyplot as plt

    ends = [event["end_s"] for event in read_events(directory) if event["kind"] == "train"]
    middle = ends[len(ends) // 2] if ends else 0.0
    low, high = middle - _TIMELINE_S / 2, middle + _TIMELINE_S / 2
    events = _between(directory, low, high)
    figure, axes = plt.subplots(2, 1, figsize=(11, 4), sharex=True, height_ratios=(2, 1), layout="constrained")
    running = [(event["end_s"], event["num_groups"]) for event in events if event["kind"] == "running"]
    running += [(high, num_groups) for _, num_groups in running[-1:]]
    axes[0].fill_between(
        [at for at, _ in running],
        [num_groups for _, num_groups in running],
        step="post",
        color=_COLOURS["generate"],
        alpha=0.6,
    )
    axes[0].set_ylabel("groups being generated")
    for height, kind in enumerate(("publish", "train")):
        spans = [(e["start_s"], e["end_s"] - e["start_s"]) for e in events if e["kind"] == kind]
        axes[1].broken_barh(spans, (height - 0.4, 0.8), color=_COLOURS[kind], alpha=0.25 if kind == "publish" else 1)
    for part, colour in _PARTS.items():
        spans = [_part_span(event, part) for event in events if event["kind"] == "publish" and event.get(part)]
        axes[1].broken_barh(spans, (-0.4, 0.8), color=colour, label=part.removesuffix("_s"))
    if axes[1].get_legend_handles_labels()[0]:
        axes[1].legend(loc="upper right", ncols=3, fontsize=7)
    for event in events:
        if event["kind"] == "fleet" and low <= event["end_s"] <= high:
            axes[0].axvline(event["end_s"], color="#57606a", linestyle=":")
            axes[0].annotate(
                _told(event), (event["end_s"], 0.98), xycoords=("data", "axes fraction"), fontsize=7, va="top"
            )
    axes[1].set_yticks([0, 1], ["update", "train"])
    axes[1].set_xlabel("seconds since the run began")
    axes[1].set_xlim(max(0.0, low), high)
    axes[0].grid(alpha=0.3)
    return _save(figure, path)


def _between(directory: Path, low: float, high: float) -> list[dict[str, Any]]:
    """Return the events of some seconds, and before them the last that says how many groups were running."""
    before: dict[str, Any] | None = None
    events = []
    for event in read_events(directory):
        if event["end_s"] >= low and event["start_s"] <= high:
            events.append(event)
        elif event["kind"] == "running" and event["end_s"] < low:
            before = event | {"end_s": low}
    return events if before is None else [before, *events]


def _part_span(event: dict[str, Any], part: str) -> tuple[float, float]:
    """Where a part of an update is drawn: gathering at its start, the hold at its end, the transfer before that."""
    ends = {"gather_s": event["start_s"] + event["gather_s"], "hold_s": event["end_s"]}
    end = ends.get(part, event["end_s"] - event.get("hold_s", 0.0))
    return end - event[part], event[part]


def _told(event: dict[str, Any]) -> str:
    """One line for each server that joined, left, or changed its state."""
    lines = [f"{name.partition('//')[2]} leaves" for name in event["left"]]
    return "\n".join([*lines, *(f"{name.partition('//')[2]} {after}" for name, _, after in event["changes"])])


def _plot_fleet(events: Sequence[dict[str, Any]], end_s: float, path: Path) -> Path:
    """Every server that ever changed over the whole run, coloured by its state."""
    import matplotlib.pyplot as plt

    histories: dict[str, list[tuple[float, str | None]]] = {}
    for event in events:
        for name, before, after in event["changes"]:
            histories.setdefault(name, [(0.0, before)]).append((event["end_s"], after))
        for name in event["left"]:
            histories.setdefault(name, [(0.0, "healthy")]).append((event["end_s"], None))
    figure, axis = plt.subplots(figsize=(11, 1.5 + 0.4 * len(histories)), layout="constrained")
    for height, history in enumerate(histories.values()):
        ends = [*(at for at, _ in history[1:]), end_s]
        for (start, state), end in zip(history, ends, strict=True):
            if state is not None:
                axis.broken_barh([(start, end - start)], (height - 0.4, 0.8), color=_STATES[state])
    axis.set_yticks(range(len(histories)), list(histories))
    axis.set_xlabel("seconds since the run began")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _STATES.values()]
    axis.legend(handles, list(_STATES), loc="upper center", bbox_to_anchor=(0.5, 1.3), ncols=len(_STATES), fontsize=8)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
