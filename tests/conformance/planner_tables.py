"""Tables of docs/planner.md: predicted against measured, and papers in simulated time."""

from __future__ import annotations

from typing import Any

from tests.conformance.kept import RESULTS, kept


def planner_table() -> str:
    """Return what each run came to, and what was predicted for it."""
    if not (RESULTS / "planner.json").exists():
        return "Not measured yet: `python benchmarks/planner.py models/tiny`."
    rows = kept("planner")["rows"]
    lines = [
        "| quickstart with | tokens/s: measured, predicted | age of completions | age of tokens |",
        "|---|---|---|---|",
    ]
    for row in rows["runs"]:
        what = f"{row['name']}{' (calibration)' if row['is_calibration'] else ''}"
        cells = [_cell(row[key], form) for key, form in (("tokens_per_s", ",.0f"), ("age", ".2f"), ("lag", ".2f"))]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    shared = ", on a machine that other work shared" if rows["shared_machine"] else ""
    per_run = "1 run" if rows["rounds"] == 1 else f"{rows['rounds']} runs in turns"
    lines.append(f"\n{per_run} of each{shared}; load before the first {rows['load_before']:.1f}.")
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
        "| simulated GPUs | completions | tokens | steps | CPU time, one core | load of the machine |\n"
        "|---|---|---|---|---|---|\n"
        f"| {row['gpus']:,} | {row['completions']:,} | {row['tokens'] / 1e9:.2f} billion | {row['steps']} | "
        f"{row['cpu_s']:.0f} s | {row['load']:.0f} |"
    )


def papers_table() -> str:
    """Return each paper's number beside ours."""
    rows = kept("papers")["rows"]
    lines = ["| paper | what | its number | here |", "|---|---|---|---|"]
    for row in rows.get("pipelinerl", ()):
        theirs = "1.4 to 1.6x" if row["lag"] == 8 else ""
        lines.append(
            f"| PipelineRL | no token older than {row['lag']}, over phases of {row['lag']} steps; a token trains in "
            f"{row['cost']} token times of a GPU | {theirs} | **{row['ratio']:.2f}x** ({row['training']} of 32 GPUs "
            f"train, {row['capacity']} running each; token age {row['token_age']:.1f}) |"
        )
    theirs_of = {"sorted": "0.26", "pairs": "0.52", "linear": "0.72", "linear pairs": "0.92"}
    for name, share in rows.get("histopipe", {}).items():
        lines.append(f"| RhymeRL, HistoPipe | utilisation, {name} | {theirs_of[name]} | **{share:.2f}** |")
    expected = {256: ("1.06", "1.23", "1.04"), 128: ("1.26", "1.37", "1.27")}
    for row in rows.get("streamrl", ()):
        theirs = expected[row["capacity"]]
        for name, number in zip(("longest first", "oracle", "recall 87 %"), theirs, strict=True):
            lines.append(
                f"| StreamRL | {name}, 512 completions per instance, {row['capacity']} running | {number}x | "
                f"**{row[name]:.2f}x** |"
            )
    for row in rows.get("areal", ()):
        theirs = {8: "1.49 to 2.77x", 4: "1.49 to 2.77x"}.get(row["eta"], "")
        lines.append(
            f"| AReaL | eta {row['eta']} on a 75/25 split, over turns on all GPUs; a token trains in {row['cost']} "
            f"token times of a GPU | {theirs} | **{row['ratio']:.2f}x** (token age {row['token_age']:.1f}) |"
        )
    if (row := rows.get("llamarl")) is not None:
        lines.append(
            f"| LlamaRL | stages apart over both on every device, {row['num']:,} random cost curves and memories | at "
            f"least 1; measured 2.52, 3.98 and 10.7x | never below **{row['smallest']:.2f}x**, median "
            f"{row['median']:.2f}x; equal for {100 * row['equal_share']:.0f} % |"
        )
    return "\n".join(lines)


PLANNER_TABLES = {"planner": planner_table, "planner_scale": planner_scale_table, "papers": papers_table}
