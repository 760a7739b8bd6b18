"""The tables of docs/evidence-scale.md."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.tables.kept import kept

_TOKENS = 4 * 225
"""Of one request."""
_ROWS = (
    ("scheduling", "first_us_per_request", "scheduling the first 10,000 requests", "µs per request"),
    ("scheduling", "then_us_per_request", "scheduling and scoring, with 10,000 requests running", "µs per request"),
    ("http", "us_per_call", "HTTP, with 156 connections to the server", "µs per request"),
    ("wire", "ns_per_token", "reading a response: parsing JSON and checking every token", "ns per token"),
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
    sums = [_us_per_request(rows[name]) for name in ("before", "after")]
    cells = [f"{us:,.0f} µs per request" for us in sums]
    lines.append(f"| all rows except the first | {cells[0]} | {cells[1]} |")
    cells = [f"{1e6 * _TOKENS / us:,.0f}" for us in sums]
    lines.append(f"| **largest possible number of tokens per second on one core** | **{cells[0]}** | **{cells[1]}** |")
    return "\n".join(lines)


def _us_per_request(parts: Mapping[str, Mapping[str, float]]) -> float:
    per_request = parts["scheduling"]["then_us_per_request"] + parts["http"]["us_per_call"]
    return per_request + sum(_TOKENS * parts[part][key] / 1e3 for part, key, _, unit in _ROWS if unit == "ns per token")


def killed_host_table() -> str:
    """Return how two runs on two hosts learned, of which one lost a host."""
    lines = ["| run | reward, first ten steps | last ten | steps | servers that sampled | seconds |"]
    lines.append("|---|---|---|---|---|---|")
    for name, run in kept("scale")["rows"]["curve"].items():
        known = [reward for reward in run["rewards"] if reward is not None]
        first, last = (sum(part) / len(part) for part in (known[:10], known[-10:]))
        what = name if run["killed_at"] is None else f"a host killed after step {run['killed_at']}"
        lines.append(
            f"| {what} | {first:.2f} | {last:.2f} | {len(run['rewards'])} | {run['endpoints']} | {run['run_s']:.0f} |"
        )
    return "\n".join(lines)


def lost_host_table() -> str:
    """Return how long a run takes to continue after it has lost a host."""
    lost = kept("scale")["rows"]["lost"]
    rows = (
        ("from the start of the run to its first step", "start_s"),
        ("from killing the host with the rank to the next new step", "ranks_s"),
        ("from killing a host with a server to the start of another server", "server_s"),
    )
    return "\n".join(["| | seconds |", "|---|---|", *(f"| {what} | {lost[key]:.1f} |" for what, key in rows)])


def senders_table() -> str:
    """Return how a run learned whose ranks all send, while the host of one was killed and came back."""
    run = kept("scale")["rows"]["senders"]
    known = [reward for reward in run["rewards"] if reward is not None]
    first, last = (sum(part) / len(part) for part in (known[:10], known[-10:]))
    columns = ("reward, first ten steps", "last ten", "steps", "host killed after step")
    columns += ("seconds until another step", "updates applied by servers", "seconds")
    lines = [f"| {' | '.join(columns)} |", "|" + len(columns) * "---|"]
    lines.append(
        f"| {first:.2f} | {last:.2f} | {len(run['rewards'])} | {run['killed_at']} | {run['back_s']:.1f} | "
        f"{run['num_applied']} of {run['num_outcomes']} | {run['run_s']:.0f} |"
    )
    return "\n".join(lines)


SCALE_TABLES = {
    "controller": controller_table,
    "killed_host": killed_host_table,
    "lost_host": lost_host_table,
    "senders_in_namespaces": senders_table,
}
