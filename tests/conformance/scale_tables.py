"""The table of docs/scale.md: what the parts of the controller cost, before and after they were changed."""

from __future__ import annotations

from tests.conformance.kept import kept

_ROWS = (
    ("scheduling", "first_us_per_request", "scheduling, of the first 10,000 requests", "µs per request"),
    ("scheduling", "then_us_per_request", "scheduling and scoring, with 10,000 running", "µs per request"),
    ("http", "us_per_call", "HTTP, with 156 connections to the server", "µs per request"),
    ("wire", "ns_per_token", "reading an answer: JSON, with every token checked", "ns per token"),
    ("batch", "make_ns_per_token", "advantages, masks and lags of a step", "ns per token"),
    ("batch", "frame_ns_per_token", "packing and encoding a step", "ns per token"),
    ("batch", "send_ns_per_token", "sending a step to a rank over a socket", "ns per token"),
)


def controller_table() -> str:
    """Return CPU time of each part in the two states of the source that were measured."""
    rows = kept("scale-parts")["rows"]
    lines = ["| part | before | now |", "|---|---|---|"]
    for part, key, what, unit in _ROWS:
        cells = [f"{rows[name][part][key]:,.0f} {unit}" for name in ("before", "after")]
        lines.append(f"| {what} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


SCALE_TABLES = {"controller": controller_table}
