"""Plots of a run, drawn from its files: rewards, token lag, lengths, servers and the timeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError
from inflight.observe.trace.files import read_events, read_steps

_COLOURS = {"reward": "#1f6feb", "train": "#2da44e", "publish": "#cf222e", "generate": "#8250df"}
_PARTS = {"gather_s": "#f6c7c9", "wire_s": "#e5737b", "pause_s": "#8b0f1a"}
"""Colours of the parts of an update, by their names in the event; they are drawn on top of each other."""
_STATES = {"healthy": "#2da44e", "joining": "#1f6feb", "suspect": "#bf8700", "dead": "#cf222e"}
_TIMELINE_S = 10.0


def plot_run(directory: Path) -> None:
    """Draw the plots of a run directory into ``plots/``; none if the run took no step.

    A full disk raises `CheckpointError`.
    """
    rows = list(read_steps(directory))
    if not rows:
        return
    summary = json.loads((directory / "summary.json").read_text())
    figures = {
        "reward": _draw_rewards(rows),
        "token_lag": _draw_lags(summary["tokens_by_lag"]),
        "lengths": _draw_lengths(rows, summary["completions_by_length"]),
        "timeline": _draw_timeline(directory),
    }
    if histories := _histories(read_events(directory, ["fleet_changed"])):
        figures["fleet"] = _draw_fleet(histories, rows[-1]["time_s"])
    target = directory / "plots"
    try:
        target.mkdir(exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(target / f"{name}.png", dpi=120)
    except OSError as error:
        raise CheckpointError(f"plots cannot be written to {target}: {error.strerror}") from error


def _figure(*shape: int, width: float = 11, height: float = 4, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(*shape, **options)


def smoothed(values: Sequence[float], window: int = 10) -> list[float]:
    """Return the running mean over the last ``window`` values."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / (i + 1 - max(0, i - window + 1)) for i in range(len(values))]


def _draw_rewards(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axes = _figure(1, 2, sharey=True)
    rewarded = [row for row in rows if row["reward"] is not None]
    rewards = [row["reward"] for row in rewarded]
    for axis, key, label in ((axes[0], "time_s", "seconds"), (axes[1], "num_samples", "completions sampled")):
        xs = [row[key] for row in rewarded]
        axis.plot(xs, rewards, ".", color=_COLOURS["reward"], alpha=0.25, label="one step")
        axis.plot(xs, smoothed(rewards), color=_COLOURS["reward"], label="mean of ten steps")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="mean reward", ylim=(-0.02, 1.02 if max(rewards, default=0) <= 1 else None))
    axes[1].legend(loc="lower right")
    return figure


def _draw_lags(counts: dict[str, int]) -> Any:
    figure, axis = _figure(width=6)
    keys = sorted(map(int, counts))
    total = max(1, sum(counts.values()))
    axis.bar(keys, [counts[str(key)] / total for key in keys], color=_COLOURS["generate"])
    axis.set(xlabel="token lag in versions", ylabel="share of trained tokens")
    axis.grid(alpha=0.3, axis="y")
    axis.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _draw_lengths(rows: Sequence[dict[str, Any]], counts: dict[str, int]) -> Any:
    figure, axes = _figure(1, 2)
    lengths = [int(key) for key, count in counts.items() for _ in range(count)]
    axes[0].hist(lengths, bins=40, color=_COLOURS["generate"])
    axes[0].set(xlabel="tokens per completion", ylabel="completions")
    measured = [row for row in rows if row["completion_length"] is not None]
    axes[1].plot([row["version"] for row in measured], [row["completion_length"] for row in measured], color="#555")
    axes[1].set(xlabel="optimizer step", ylabel="mean tokens per completion")
    axes[1].grid(alpha=0.3)
    return figure


def _draw_timeline(directory: Path) -> Any:
    """Draw a few seconds from the middle of the run: the number of running groups and the trainer's activity.

    If updates met running groups, the middle one of these updates is in the middle of the plot.
    """
    num_running, met, steps = 0, [], []
    for event in read_events(directory, ["running_groups", "publish", "train"]):
        if event["kind"] == "running_groups":
            num_running = event["num_groups"]
        elif event["kind"] == "train":
            steps.append(event["end_s"])
        elif num_running:
            met.append(event["end_s"])
    ends = met or steps
    middle = ends[len(ends) // 2] if ends else 0.0
    low, high = middle - _TIMELINE_S / 2, middle + _TIMELINE_S / 2
    events = _events_between(directory, low, high)
    figure, axes = _figure(2, 1, sharex=True, height_ratios=(2, 1))
    running = [(event["end_s"], event["num_groups"]) for event in events if event["kind"] == "running_groups"]
    running += [(high, num_groups) for _, num_groups in running[-1:]]
    times, num_groups = zip(*running, strict=True) if running else ((), ())
    axes[0].fill_between(times, num_groups, step="post", color=_COLOURS["generate"], alpha=0.6)
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
        if event["kind"] == "fleet_changed" and low <= event["end_s"] <= high:
            axes[0].axvline(event["end_s"], color="#57606a", linestyle=":")
            axes[0].annotate(
                _text_of(event), (event["end_s"], 0.98), xycoords=("data", "axes fraction"), fontsize=7, va="top"
            )
    axes[1].set_yticks([0, 1], ["update", "train"])
    axes[1].set(xlabel="seconds since the run began", xlim=(max(0.0, low), high))
    axes[0].grid(alpha=0.3)
    return figure


def _events_between(directory: Path, low: float, high: float) -> list[dict[str, Any]]:
    """Return the events of a time window, preceded by the last earlier event with a number of running groups."""
    before: dict[str, Any] | None = None
    events = []
    for event in read_events(directory):
        if event["end_s"] >= low and event["start_s"] <= high:
            events.append(event)
        elif event["kind"] == "running_groups" and event["end_s"] < low:
            before = event | {"end_s": low}
    return events if before is None else [before, *events]


def _part_span(event: dict[str, Any], part: str) -> tuple[float, float]:
    """Return the start and length of a part of an update: gathering first, then the transfer, and the pause last."""
    ends = {"gather_s": event["start_s"] + event["gather_s"], "pause_s": event["end_s"]}
    end = ends.get(part, event["end_s"] - event.get("pause_s", 0.0))
    return end - event[part], event[part]


def _text_of(event: dict[str, Any]) -> str:
    """Return one line for each server that joined, left or changed state."""
    lines = [f"{name.partition('//')[2]} leaves" for name in event["left"]]
    return "\n".join([*lines, *(f"{name.partition('//')[2]} {after}" for name, _, after in event["changes"])])


def _histories(events: Iterable[dict[str, Any]]) -> dict[str, list[tuple[float, str | None]]]:
    """Return the times and states of every server whose state changed; None means that the server left."""
    histories: dict[str, list[tuple[float, str | None]]] = {}
    for event in events:
        for name, before, after in event["changes"]:
            histories.setdefault(name, [(0.0, before)]).append((event["end_s"], after))
        for name in event["left"]:
            histories.setdefault(name, [(0.0, "healthy")]).append((event["end_s"], None))
    return histories


def _draw_fleet(histories: Mapping[str, Sequence[tuple[float, str | None]]], end_s: float) -> Any:
    """Draw every server whose state changed, over the whole run, coloured by state."""
    from matplotlib.patches import Patch

    figure, axis = _figure(height=1.5 + 0.4 * len(histories))
    for height, history in enumerate(histories.values()):
        ends = [*(at for at, _ in history[1:]), end_s]
        for (start, state), end in zip(history, ends, strict=True):
            if state is not None:
                axis.broken_barh([(start, end - start)], (height - 0.4, 0.8), color=_STATES[state])
    axis.set_yticks(range(len(histories)), list(histories))
    axis.set_xlabel("seconds since the run began")
    handles = [Patch(color=colour) for colour in _STATES.values()]
    axis.legend(handles, list(_STATES), loc="upper center", bbox_to_anchor=(0.5, 1.3), ncols=len(_STATES), fontsize=8)
    return figure
