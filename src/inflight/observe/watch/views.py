"""The data that the page requests, as JSON values. Each function holds the run's lock while it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.observe.watch.model import RunModel

_SPANS_AT_ONCE = 6000
"""Number of spans that a page can draw quickly; lanes with more spans in a window are sent as bins."""
_MAX_WIDTH = 4000


def overview(run: RunModel, names: Sequence[str]) -> dict[str, Any]:
    """Return the state of a run, its histograms, and the named series of its steps."""
    with run.lock:
        steps = run.steps
        bins = steps.bins()
        known = [name for name in names if name in steps.names]
        end_s = max(run.end_s, 1e-3)
        return {
            "name": run.directory.name or str(run.directory),
            "directory": str(run.directory),
            "status": run.status,
            "is_read": run.reading.is_complete,
            "unreadable": run.reading.problem,
            "revision": run.revision,
            "number": run.number,
            "version": run.version,
            "num_steps": _at(run.config, "run", "num_steps"),
            "began_at": run.began.get("began_at"),
            "end_s": run.end_s,
            "inflight": run.began.get("inflight"),
            "config": run.config,
            "steps": {
                "width": steps.width,
                "last": steps.last,
                "versions": [i * steps.width for i in bins],
                "names": steps.names,
                "not_finite": steps.first_not_finite,
                "series": {name: steps.values(name, bins) for name in known},
            },
            "ages": run.counts["ages"].total(),
            "lags": run.counts["lags"].total(),
            "rates": {
                "width_s": run.rates.tokens.width_s,
                "tokens": run.rates.tokens.per_second(end_s),
                "busy": run.rates.busy.per_second(end_s),
                "busy_width_s": run.rates.busy.width_s,
                "training": run.rates.training.per_second(end_s),
                "training_width_s": run.rates.training.width_s,
                "running": run.rates.running.per_second(end_s),
                "running_width_s": run.rates.running.width_s,
            },
            "ledger": run.ledger,
            "servers": [{**server, "history": list(server["history"])} for server in run.servers],
            "marks": list(run.notices.marks),
            "failures": list(run.notices.failures),
            "num_failures": dict(run.notices.num_failures),
        }


def timeline(run: RunModel, from_s: float, to_s: float, width: int) -> dict[str, Any]:
    """Return what the lanes contain in a window, for a drawing of ``width`` pixels. Raises `InvalidRequestError`."""
    if not (math.isfinite(from_s) and math.isfinite(to_s) and from_s < to_s):
        raise InvalidRequestError(f"the window from {from_s} to {to_s} s is empty: its end must be after its start")
    if not 1 <= width <= _MAX_WIDTH:
        raise InvalidRequestError(f"the width of a timeline must be 1 to {_MAX_WIDTH} pixels, not {width}")
    with run.lock:
        lanes = sorted(run.lanes.items(), key=lambda entry: (_LANE_ORDER[entry[1].kind], _natural(entry[0])))
        max_spans = max(200, _SPANS_AT_ONCE // max(1, len(lanes)))
        return {
            "from_s": from_s,
            "to_s": to_s,
            "end_s": run.end_s,
            "lanes": [
                {
                    "key": key,
                    "name": lane.name,
                    "kind": lane.kind,
                    "num_rows": lane.num_rows,
                    "forgotten_until_s": lane.forgotten_until_s,
                    **lane.window(from_s, to_s, max(1, width // 2), max_spans),
                }
                for key, lane in lanes
            ],
            "marks": [mark for mark in run.notices.marks if from_s <= mark["time_s"] <= to_s],
        }


def rollouts(run: RunModel, state: str, order: str, offset: int, limit: int) -> dict[str, Any]:
    """Return a page of the list of rollouts."""
    with run.lock:
        return run.items.page(state, order, max(0, offset), min(max(1, limit), 500))


def rollout(run: RunModel, number: int, *, with_tokens: bool = True) -> dict[str, Any]:
    """Return all known details of an item. Raises `InvalidRequestError` if the item is unknown."""
    from inflight.observe.watch.details import rollout_details  # imports the reader of tensors

    with run.lock:
        item = run.items.get(number)
        if item is None:
            raise InvalidRequestError(f"item {number} is unknown: it is too old to be kept by the page, or too new")
        detail = item.detail()
    tokens = rollout_details(run.directory, detail["version"], number) if with_tokens else None
    return {**detail, "tokens": tokens}


_LANE_ORDER = {"server": 0, "rank": 1, "publish": 2, "memory": 3}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts rank 2 before rank 10."""
    words = "".join(c if c.isdigit() else f" {c} " for c in name).split()
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


def _at(config: Any, *path: str) -> Any:
    for key in path:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def run_name(directories: Sequence[Path], directory: Path) -> str:
    """Return the shortest name that distinguishes a run from the others."""
    same = [other for other in directories if other.name == directory.name]
    return directory.name if len(same) < 2 else f"{directory.parent.name}/{directory.name}"
