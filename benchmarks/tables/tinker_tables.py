"""Tables of docs/tinker.md: methods of the SDK with the test of each, and what programs learned."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.tables.kept import kept
from tests.dialects.tinker.sdk_methods import CLIENTS, REFUSED, SDK_VERSION, SUPPORTED


def methods_table() -> str:
    """Return one row for each client and test, with the methods that it covers; asynchronous twins are left out."""
    lines = [f"| SDK {SDK_VERSION} | methods | test |", "|---|---|---|"]
    for client in CLIENTS:
        lines += _rows(client, SUPPORTED, "")
        lines += _rows(client, REFUSED, "refused: ")
    return "\n".join(lines)


def _rows(client: str, methods: Mapping[str, str], note: str) -> list[str]:
    by_test: dict[str, list[str]] = {}
    for method, test in methods.items():
        of, _, name = method.partition(".")
        if of == client and not name.endswith("_async"):
            by_test.setdefault(test, []).append(f"`{name}`")
    return [f"| `{client}` | {note}{', '.join(names)} | `{test}` |" for test, names in by_test.items()]


def programs_table() -> str:
    """Return one row for each program."""
    lines = [
        "| program | sampling client | reward, first three steps | reward, last three steps | steps | seconds per step "
        "| completions of several versions |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in kept("tinker_programs")["rows"]:
        steps = row["steps"]
        rewards = [step["reward"] for step in steps]
        seconds = [step["seconds"] for step in steps]
        if row["kind"] == "inflight":  # of the whole program, up to the step
            seconds = [after - before for before, after in zip([0.0, *seconds], seconds, strict=False)]
            share = sum(step["several_versions"] * step["completions"] for step in steps)
            several = f"{share / sum(step['completions'] for step in steps):.0%}"
        else:
            several = "none, by definition"
        lines.append(
            f"| {row['program']} | {row['kind']} | {statistics.fmean(rewards[:3]):.2f} "
            f"| {statistics.fmean(rewards[-3:]):.2f} | {len(steps)} | {statistics.median(seconds):.1f} | {several} |"
        )
    return "\n".join(lines)


TINKER_TABLES = {
    "tinker_methods": methods_table,
    "tinker_programs": programs_table,
}
