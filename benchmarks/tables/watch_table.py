"""The table of docs/watch.md."""

from __future__ import annotations

import statistics

from benchmarks.tables.kept import kept

ROUNDS = {
    "start_s": "from starting `inflight watch` to the printed address",
    "opened_to_drawn_s": "**from opening the address to all steps drawn**",
    "command_to_drawn_s": "**from starting `inflight watch` to all steps drawn**",
    "command_to_drawn_processor_s": "processor time of `inflight watch` until then",
    "command_to_read_s": "from starting `inflight watch` to all events read",
    "opened_again_s": "from opening the address again to all steps drawn",
}
PARTS = {
    "fold_steps_s": "processor time for reading and aggregating the steps",
    "fold_events_s": "processor time for reading and aggregating the events",
    "report_s": "processor time of `inflight report`",
}


def watch_table() -> str:
    """Return how long a page of a long run takes to open."""
    rows = kept("watch")["rows"]
    sizes = f"{rows['num_steps']:,} steps ({rows['steps_mb']:.0f} MB), {rows['events_mb']:.0f} MB of events"
    lines = [f"| {sizes} | median of {len(rows['rounds'])} (least to most) |", "|---|---|"]
    for name, what in ROUNDS.items():
        times = [row[name] for row in rows["rounds"]]
        lines.append(f"| {what} | {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}) |")
    lines += [f"| {what} | {rows['parts'][name]:.2f} s |" for name, what in PARTS.items()]
    return "\n".join(lines)
