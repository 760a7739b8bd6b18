"""The tables of docs/evidence-replay.md."""

from __future__ import annotations

import statistics

from benchmarks.tables.kept import kept


def replays_table() -> str:
    """Return one row for each replay of the run that was recorded with vLLM."""
    lines = [
        "| trainer | ranks | first step that differs | difference in gradient norm: step 1, last step "
        "| equal trainer logprobs in step 1 | largest mean difference of logprobs in a step | final weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in kept("replay")["rows"]["replays"]:
        first, last = row["first"], row["last"]
        if row["is_bit_equal"]:
            cells = ["none", "equal", "all", "0", "equal, by SHA-256"]
        else:
            logprobs = first["logprobs"]
            cells = [
                f"{row['first_unequal']}",
                f"{first['gradient_norm_difference']:.1e}, {last['gradient_norm_difference']:.1e}",
                f"{logprobs['num_equal']:,} of {logprobs['num_targets']:,}",
                f"{row['largest_mean_logprob_difference']:.1e}",
                f"{row['weights']['relative']:.1e}",
            ]
        lines.append(f"| `{row['trainer']}` | {row['num_ranks']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def float64_table() -> str:
    """Return how far the gradient norm of the first step is from that in float64."""
    rows = kept("replay")["rows"]
    exact = rows["float64_gradient_norm"]
    lines = ["| computed by | gradient norm of step 1 | relative difference from float64 |", "|---|---|---|"]
    lines.append(f"| `fsdp`, 1 rank, in float64 | {exact:.9g} | |")
    for row in rows["replays"]:
        norm, ranks = row["gradient_norms"][0], f"{row['num_ranks']} rank{'s' * (row['num_ranks'] > 1)}"
        lines.append(f"| `{row['trainer']}`, {ranks} | {norm:.9g} | {(norm - exact) / exact:+.1e} |")
    return "\n".join(lines)


def sampled_table() -> str:
    """Return what sampling again on the same engine came to."""
    row = kept("replay")["rows"]["sampled"]
    lines = [
        "| completions | of these, with identical tokens | tokens | largest difference of a logprob |",
        "|---|---|---|---|",
    ]
    lines.append(
        f"| {row['completions']} | {row['with_recorded_tokens']} | {row['tokens']:,} | "
        f"{row['largest_logprob_difference']:.1e} |"
    )
    return "\n".join(lines)


def recording_table() -> str:
    """Return what recording costs."""
    rows = kept("recording")["rows"]
    speeds = {kind: [run["tokens_per_s"] for run in rows["runs"] if run["records"] is kind] for kind in (False, True)}
    step_s = min(run["seconds"] for run in rows["runs"]) / (rows["steps"] - 1)
    costs = {name: statistics.median(cost[name] for cost in rows["costs"]) for name in rows["costs"][0]}

    share = 100 * costs["processor_s_per_step"] / step_s

    def spread(values: list[float], form: str) -> str:
        low, middle, high = (format(it, form) for it in (min(values), statistics.median(values), max(values)))
        return f"{middle} ({low} to {high})"

    return "\n".join(
        [
            f"| median (extremes) of {rows['rounds']} rounds, {rows['steps']} steps each | |",
            "|---|---|",
            f"| trained tokens per s, without `run.record` | {spread(speeds[False], ',.0f')} |",
            f"| trained tokens per s, with `run.record` | {spread(speeds[True], ',.0f')} |",
            f"| ratio of with to without, in each round | {spread(rows['ratios'], '.3f')} |",
            f"| processor time for recording a step | {1000 * costs['processor_s_per_step']:.1f} ms |",
            f"| this time as a share of a step in the fastest run | {share:.2f} % |",
            f"| bytes on disk per trained token | {costs['bytes_per_token']:.1f} |",
        ]
    )


REPLAY_TABLES = {
    "replays": replays_table,
    "float64": float64_table,
    "sampled": sampled_table,
    "recording": recording_table,
}
