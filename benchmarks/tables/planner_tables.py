"""Tables of docs/evidence-planner.md: predicted against measured, and papers in simulated time."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.kept import RESULTS, kept


def planner_table() -> str:
    """Return the measured and the predicted figures of each run."""
    if not (RESULTS / "planner.json").exists():
        return "Not measured yet: `python benchmarks/planner.py models/tiny`."
    rows = kept("planner")["rows"]
    lines = [
        "| quickstart with | tokens/s: measured (each run), predicted | age of completions | age of tokens |",
        "|---|---|---|---|",
    ]
    for row in rows["runs"]:
        what = f"{row['name']}{' (calibration)' if row['is_calibration'] else ''}"
        cells = [_cell(row[key], form) for key, form in (("tokens_per_s", ",.0f"), ("age", ".2f"), ("lag", ".2f"))]
        measured, predicted = cells[0].split(", ")
        each = "; ".join(f"{value:,.0f}" for value in row["tokens_per_s"]["all"])
        lines.append(f"| {what} | {measured} ({each}), {predicted} | {' | '.join(cells[1:])} |")
    shared = ", on a machine that was also doing other work" if rows["shared_machine"] else ""
    per_run = "one run" if rows["rounds"] == 1 else f"{rows['rounds']} runs, alternating with the others"
    load = "" if rows["load_before"] is None else f"; the load before the first run was {rows['load_before']:.1f}"
    lines.append(f"\nEach configuration: {per_run}{shared}{load}.")
    return "\n".join(lines)


def _cell(of: dict[str, Any], form: str) -> str:
    measured, predicted = of["measured"], of["predicted"]
    if abs(measured) < 0.05:
        return f"{measured:{form}}, {predicted:{form}}"
    return f"{measured:{form}}, {predicted:{form}} ({100 * (predicted / measured - 1):+.0f} %)"


def planner_scale_table() -> str:
    """Return how long a large simulation takes."""
    if not (RESULTS / "planner-scale.json").exists():
        return "Not measured yet: `python benchmarks/planner.py --scale`."
    row = kept("planner-scale")["rows"]
    return (
        "| simulated GPUs | completions | tokens | steps | CPU time on one core | load of the machine |\n"
        "|---|---|---|---|---|---|\n"
        f"| {row['gpus']:,} | {row['completions']:,} | {row['tokens'] / 1e9:.2f} billion | {row['steps']} | "
        f"{row['cpu_s']:.0f} s | {row['load']:.0f} |"
    )


def papers_table() -> str:
    """Return the published figures of each paper and those of our simulation."""
    rows = kept("papers")["rows"]
    lines = ["| paper | quantity | published | simulated here |", "|---|---|---|---|"]
    for row in rows["pipelinerl"]:
        lines.append(
            f"| PipelineRL | speed-up of the pipeline over phases of {row['phase']} steps, with no token older than "
            f"{row['phase'] - 1} steps in either; training on a token takes one GPU {row['cost']} times as long as "
            f"a token step | 1.4 to 1.6x | {_ratio(row['ratio'])}; {row['training']} of 32 GPUs train, and each of the "
            f"others runs {row['capacity']} completions; token age {row['token_age']:.1f} |"
        )
    lines += [
        f"| RhymeRL, HistoPipe | utilisation, {what} | {theirs} | {here} |"
        for what, theirs, here in _histopipe_rows({row["name"]: row for row in rows["histopipe"]})
    ]
    lines += _streamrl_lines(rows["streamrl"])
    for row in rows["areal"]:
        eta = f"eta {row['eta']}" if row["eta"] < 1000 else "unbounded eta"
        theirs = "1.49 to 2.77x" if row["eta"] in (4, 8) else ""
        lines.append(
            f"| AReaL | speed-up at {eta}, with 75 % of the GPUs generating and 25 % training, over alternating "
            f"phases on all GPUs; training on a token takes one GPU {row['cost']} times as long as a token step | "
            f"{theirs} | {_ratio(row['ratio'])}; "
            f"token age {row['token_age']:.1f} |"
        )
    row = rows["llamarl"]
    lines.append(
        f"| LlamaRL | speed-up of stages on separate devices over both stages on every device, for {row['num']:,} "
        f"random cost curves and memory sizes | at least 1; measured 2.52, 3.98 and 10.7x | never below "
        f"**{row['smallest']:.2f}x**, median {row['median']:.2f}x; equal for {100 * row['equal_share']:.0f} % |"
    )
    cpu_s = rows["cpu_s"]
    each = ", ".join(f"`{name}` {seconds:.0f} s" for name, seconds in cpu_s.items())
    lines.append(f"\nCPU time on one core: {sum(cpu_s.values()):.0f} s ({each}).")
    return "\n".join(lines)


def _ratio(of: dict[str, float]) -> str:
    return f"**{of['mean']:.2f}x** ({of['low']:.2f} to {of['high']:.2f}, {of['num']} seeds)"


def _histopipe_rows(rows: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    plain, whole, cuts = rows["sorted"], rows["whole workers"], rows["cuts"]
    num, fleet = plain["endpoints"], whole["endpoints"]
    return [
        (f"{num} sorted rank groups, one worker each", "0.26", f"**{plain['single']:.2f}**"),
        ("the same groups in pairs of opposite order", "0.52", f"**{plain['pairs']:.2f}**"),
        (f"whole workers, {fleet} for {num} rank groups", "0.72", f"**{whole['single']:.2f}**"),
        (
            "the same whole workers in pairs of opposite order, with the times of opposite groups added",
            "0.92, spread 1.20",
            f"**{whole['pair_sums']:.2f}**, spread {whole['spread']:.2f}",
        ),
        (f"the same pairs, as the {fleet} workers run them", "", f"**{whole['pairs']:.2f}**"),
        (f"cuts between completions (the default), on {cuts['endpoints']} workers", "", f"**{cuts['single']:.2f}**"),
        ("the same cuts in pairs of opposite order", "", f"**{cuts['pairs']:.2f}**"),
    ]


def _streamrl_lines(rows: list[dict[str, Any]]) -> list[str]:
    expected = {
        (256, "longest first"): "1.06x", (256, "oracle"): "1.23x", (256, "recall 87 %"): "1.04x",
        (128, "longest first"): "1.26x", (128, "oracle"): "1.37x", (128, "recall 87 %"): "1.27x",
    }  # fmt: skip
    names = {
        "longest first": "longest first on each instance of a fixed division",
        "oracle": "algorithm 2 with true lengths",
        "recall 87 %": "algorithm 2 with {recall:.0%} recall, mispredicting completions of any length",
        "recall 87 %, errors in proportion": "algorithm 2 with {recall:.0%} recall and log-normal errors",
        "longest first over all instances": "longest first over all instances (`tail = 0`) with true lengths",
        "longest first over all instances, recall 87 %": "longest first over all instances with {recall:.0%} recall",
        "least_loaded, without guesses": "`least_loaded`, without predictions",
        "no instance below its knee": "bound: no instance ever runs fewer completions than its knee",
    }
    other = {(row["capacity"], row["name"]): row["ratio"]["mean"] for row in rows if row["instances"] == 16}
    return [
        f"| StreamRL | {row['capacity']} running completions; {names[row['name']].format(recall=row['recall'])} | "
        f"{expected.get((row['capacity'], row['name']), '')} | {_ratio(row['ratio'])}; 16 instances "
        f"{other[row['capacity'], row['name']]:.2f}x |"
        for row in rows
        if row["instances"] == 8
    ]


PLANNER_TABLES = {"planner": planner_table, "planner_scale": planner_scale_table, "papers": papers_table}
