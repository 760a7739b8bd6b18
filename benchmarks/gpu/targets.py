"""What the figures should show, and whether they do. Loads no torch.

A target holds the figure, its bound and what it is compared with; ``met`` is None where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

HEADS = ("inflight, two passes", "inflight, one pass")
ENGINE, GENERATE = "engine", "generate"
_LARGEST_BYTES = 15_000_000_000
"""From here on a model counts as one of 16 GB."""


def targets_of(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of a record's rows."""
    figures = {name: section["figures"] for name, section in rows["sections"].items() if "figures" in section}
    targets = [_kit("endpoint", figures), _kit("worker", figures)]
    targets += _heads(figures.get("head", []))
    targets += _publishes(figures.get("publish", {}).get("publishes", []))
    targets += _decode(figures.get("decode", {}).get("loads", []))
    return targets


def kits_are_passed(targets: list[dict[str, Any]]) -> bool:
    """Return whether no kit that ran found anything."""
    return all(target["met"] is not False for target in targets if target["section"] in ("endpoint", "worker"))


def _target(section: str, what: str, anchor: str, bound: str, figure: str | None, met: bool | None) -> dict[str, Any]:
    return {"section": section, "what": what, "anchor": anchor, "bound": bound, "figure": figure, "met": met}


def _kit(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    found = figures.get(name)
    what, anchor = f"the {name} kit", "the contract"
    if found is None:
        return _target(name, what, anchor, "no check fails", None, None)
    num_failed, num_left = len(found["failed"]), len(found["not_run"])
    figure = f"{found['num_passed']} of {found['num_checks']} passed, {num_failed} failed, {num_left} not run"
    met = False if num_failed else None if num_left or not found["num_passed"] else True
    return _target(name, what, anchor, "no check fails", figure, met)


def _heads(shapes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Time and memory of the faster of our heads, against the fastest of the others."""
    for shape in shapes or [None]:
        what, bound = "time and memory of the head", "at most 1.00 and 1.00"
        if shape is None:
            yield _target("head", what, "the fastest other head", bound, None, None)
            continue
        timed = {name: row for name, row in shape["heads"].items() if "seconds" in row}
        ours, others = [name for name in timed if name in HEADS], [name for name in timed if name not in HEADS]
        what = f"{what}, {shape['model']}"
        if not ours or not others:
            yield _target("head", what, "the fastest other head", bound, None, None)
            continue
        mine, anchor = (min(names, key=lambda it: timed[it]["seconds"]["median"]) for names in (ours, others))
        time = timed[mine]["seconds"]["median"] / timed[anchor]["seconds"]["median"]
        memory = timed[mine]["peak_bytes"] / timed[anchor]["peak_bytes"]
        figure = f"{time:.2f} and {memory:.2f} ({mine})"
        yield _target("head", what, anchor, bound, figure, time <= 1 and memory <= 1)


def _publishes(publishes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    found = [row for row in publishes if row.get("transport") == "ipc" and "total_s" in row]
    share = max(found, key=lambda it: it["size_bytes"], default=None)
    yield _target(
        "publish",
        "a publish by IPC" + ("" if share is None else f", {share['size_bytes'] / 1e9:.1f} GB"),
        "one copy on the device",
        "at least 0.80 of its speed",
        None if share is None else f"{share['share_of_limit']:.2f}",
        None if share is None else share["share_of_limit"] >= 0.8,
    )
    large = [row for row in publishes if "paused_s" in row and row["size_bytes"] >= _LARGEST_BYTES]
    least = min(large, key=lambda it: it["paused_s"]["median"], default=None)
    yield _target(
        "publish",
        "pause of a staged update of 16 GB",
        "none",
        "below 50 ms",
        None if least is None else f"{1000 * least['paused_s']['median']:.1f} ms ({least['transport']})",
        None if least is None else least["paused_s"]["median"] < 0.05,
    )


def _decode(loads: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for load in loads or [None]:
        what, bound = "tokens per second of the embedded engine", "at least 2.00 times"
        rows = {} if load is None else load["contenders"]
        if not all("tokens_per_s" in rows.get(name, {}) for name in (ENGINE, GENERATE)):
            yield _target("decode", what, GENERATE, bound, None, None)
            continue
        ours, theirs = (rows[name]["tokens_per_s"]["median"] for name in (ENGINE, GENERATE))
        yield _target(
            "decode", f"{what}, {load['lengths']} lengths", GENERATE, bound, f"{ours / theirs:.2f}", ours >= 2 * theirs
        )
