"""The figures as tables, for the terminal and for docs/performance.md. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

NONE_YET = "There are no figures from a GPU yet. `make gpu` measures them on any machine with torch and CUDA."


def page(record: dict[str, Any] | None) -> str:
    """Return the text below the heading of docs/performance.md; without a record, that there is none.

    Raises `ValueError` for a record that is not of a GPU in full size.
    """
    if record is None:
        return NONE_YET
    rows = record["rows"]
    if rows["device"] != "cuda" or rows["quick"]:
        raise ValueError("benchmarks/results/gpu.json holds no figures of a GPU in full size: remove it, or make gpu")
    parts = [
        "What `make gpu` measured, each target with what it is compared with:",
        targets_table(rows["targets"]),
        _conditions(record),
    ]
    for name, section in rows["sections"].items():
        if name == "machine":
            continue
        failed = f"This section failed: {section['error']}" if "error" in section else ""
        parts += [f"### {_HEADINGS[name]}", failed or section_text(name, section["figures"])]
    return "\n\n".join(parts)


def section_text(name: str, figures: Any) -> str:
    """Return the figures of a section."""
    return _TEXTS[name](figures)


def targets_table(targets: Sequence[dict[str, Any]]) -> str:
    """Return one line for each target."""
    words = {True: "yes", False: "no", None: "not measured"}
    rows = [[it["what"], it["anchor"], it["bound"], it["figure"] or "", words[it["met"]]] for it in targets]
    return _table(["target", "compared with", "bound", "measured", "met"], rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _conditions(record: dict[str, Any]) -> str:
    machine = record["rows"]["sections"].get("machine", {}).get("figures")
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"{record['date']}, {'' if machine is None else _machine(machine) + ', '}{versions}."


def _machine(figures: dict[str, Any]) -> str:
    gpus = [gpu["name"] for gpu in figures["gpus"]]
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    return f"{names}, driver {figures['driver']}, CUDA {figures['cuda']}, NCCL {figures['nccl']}"


def _kit(figures: dict[str, Any]) -> str:
    text = f"{figures['num_passed']} of {figures['num_checks']} checks passed"
    text += f", {len(figures['skipped'])} did not apply" if figures["skipped"] else ""
    text += f", {len(figures['not_run'])} were not run for lack of time" if figures["not_run"] else ""
    return "\n".join([f"{text}.", *(f"- {key} {why}" for key, why in figures["failed"].items())])


def _seconds(row: dict[str, Any]) -> str:
    it = row["seconds"]
    return f"{1000 * it['median']:.1f} ({1000 * it['least']:.1f} to {1000 * it['most']:.1f})"


def _why_not(row: dict[str, Any]) -> str | None:
    """Return why a row holds no figures; None if it does."""
    return next(
        (f"{key.replace('_', ' ')}: {row[key]}" for key in ("absent", "failed", "left_out") if key in row), None
    )


def _contenders(title: str, found: dict[str, dict[str, Any]], deviation: str) -> str:
    rows = []
    for name, row in found.items():
        if (why := _why_not(row)) is not None:
            rows.append([name, why, "", ""])
        else:
            rows.append([name, _seconds(row), f"{row['peak_bytes'] / 2**20:,.0f}", f"{row[deviation]:.1e}"])
    return f"{title}\n\n" + _table(["", "ms: median (least to most)", "peak MiB", deviation.replace("_", " ")], rows)


def _head(figures: Sequence[dict[str, Any]]) -> str:
    return "\n\n".join(
        _contenders(
            f"{it['model']}: {it['num_targets']:,} targets, hidden {it['hidden_size']:,}, vocabulary "
            f"{it['vocab_size']:,}, {it['dtype']}.",
            it["heads"],
            "largest_error",
        )
        for it in figures
    )


def _attention(figures: Sequence[dict[str, Any]]) -> str:
    return "\n\n".join(
        _contenders(
            f"{it['shape']}: {it['num_tokens']:,} tokens in {it['num_segments']} segments, the longest of "
            f"{it['longest']:,}; {it['heads'][0]} heads over {it['heads'][1]} of size {it['heads'][2]}, {it['dtype']}.",
            it["kernels"],
            "largest_difference",
        )
        for it in figures
    )


def _decode(figures: dict[str, Any]) -> str:
    rows = []
    for load in figures["loads"]:
        size = f"{load['num_tokens']:,}, {load['longest']}"
        for name, row in load["contenders"].items():
            speed = _why_not(row)
            if speed is None:
                it = row["tokens_per_s"]
                speed = f"{it['median']:,.0f} ({it['least']:,.0f} to {it['most']:,.0f})"
            rows.append([load["lengths"], size, name, speed])
    return _table(["lengths", "tokens, longest", "", "tokens/s: median (least to most)"], rows)


def _publish(figures: dict[str, Any]) -> str:
    rows = []
    for row in figures["publishes"]:
        start = [row.get("transport", "all"), f"{row['size_bytes'] / 1e9:.3g}"]
        if (why := _why_not(row)) is not None:
            rows.append([*start, why, "", "", "", ""])
            continue
        share, kept = row.get("share_of_limit"), (row["kept"] or {}).get("share")
        rows.append(
            [
                *start,
                f"{row['total_s']['median']:.3f}",
                f"{row['gb_per_s']:.2f}",
                f"{1000 * row['paused_s']['median']:.1f}",
                "" if share is None else f"{100 * share:.0f} % of {row['limit']}",
                "" if kept is None else f"{100 * kept:.0f} % of {row['kept']['interval_s']:.1f} s",
            ]
        )
    return _table(["transport", "GB", "s", "GB/s", "paused, ms", "share of the limit", "tokens kept"], rows)


def _quickstart(figures: dict[str, Any]) -> str:
    it = figures["step_s"]
    paused = [max(publish["paused_s"].values(), default=0.0) for publish in figures["publishes"]]
    return (
        f"{figures['num_steps']} steps over {figures['transport']}: {it['median']:.2f} s for a step of "
        f"{figures['step_tokens']:,.0f} tokens ({it['least']:.2f} to {it['most']:.2f}), the first after "
        f"{figures['first_step_s']:.1f} s; paused for at most {1000 * max(paused, default=0.0):.1f} ms."
    )


_HEADINGS = {
    "endpoint": "The endpoint kit on the embedded engine",
    "worker": "The worker kit",
    "head": "Logprobs from hidden states",
    "attention": "Attention over segments",
    "decode": "Decoding",
    "publish": "Publishing",
    "quickstart": "The quickstart with 0.5 B parameters",
}
_TEXTS: dict[str, Callable[[Any], str]] = {
    "machine": _machine,
    "endpoint": _kit,
    "worker": _kit,
    "head": _head,
    "attention": _attention,
    "decode": _decode,
    "publish": _publish,
    "quickstart": _quickstart,
}
