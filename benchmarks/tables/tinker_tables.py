"""Tables of docs/tinker.md and docs/evidence-tinker.md: the methods of the SDK, the rewards of programs, and what the
API costs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.tables.kept import ROOT, kept
from tests.dialects.tinker.sdk_methods import CLIENTS, REFUSED, SUPPORTED

CERTIFICATES = ROOT / "docs" / "certificates" / "tinker"


def methods_table() -> str:
    """Return one row for each client and test, with the methods that it covers; asynchronous twins are left out.

    There is a column for each certified release of the SDK.
    """
    releases = {path.stem: json.loads(path.read_text()) for path in sorted(CERTIFICATES.glob("*.json"))}
    lines = [f"| client | methods | test | {' | '.join(f'SDK {it}' for it in releases)} |"]
    lines.append("|" + "---|" * (3 + len(releases)))
    for client in CLIENTS:
        lines += _rows(client, SUPPORTED, "", releases)
        lines += _rows(client, REFUSED, "refused: ", releases)
    return "\n".join(lines)


def _rows(client: str, methods: Mapping[str, str], note: str, releases: Mapping[str, Any]) -> list[str]:
    def outcome(release: Any, test: str) -> str:
        found = {it["passed"] for it in release["methods"].values() if it["test"] == test}
        return "passed" if found == {True} else "failed" if found else "not tested"

    by_test: dict[str, list[str]] = {}
    for method, test in methods.items():
        of, _, name = method.partition(".")
        if of == client and not name.endswith("_async"):
            by_test.setdefault(test, []).append(f"`{name}`")
    rows = []
    for test, names in by_test.items():
        outcomes = [outcome(it, test) for it in releases.values()]
        rows.append(f"| `{client}` | {note}{', '.join(names)} | `{test}` | {' | '.join(outcomes)} |")
    return rows


def refused_methods() -> str:
    """Return the methods that are refused, as one line."""
    names = dict.fromkeys(method.partition(".")[2].removesuffix("_async") for method in REFUSED)
    return ", ".join(f"`{name}`" for name in names)


def programs_table() -> str:
    """Return one row for each program."""
    lines = [
        "| program | sampling client | reward, first three steps | reward, last three steps | steps | seconds per step "
        "| completions from several versions |",
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


def overhead_table() -> str:
    """Return one row for each model, with the median round and the range of the rounds' ratios."""
    lines = [
        "| parameters | direct calls, seconds per step | SDK, seconds per step | ratio, median (range) of rounds |",
        "|---|---|---|---|",
    ]
    for row in kept("tinker_overhead")["rows"]:
        direct, sdk = (statistics.median(it[name] for it in row["rounds"]) for name in ("direct_s", "sdk_s"))
        middle, low, high = row["ratio"]
        lines.append(
            f"| {row['num_parameters']:,} | {direct:.2f} | {sdk:.2f} "
            f"| {middle:.2f} ({low:.2f} to {high:.2f}), {len(row['rounds'])} rounds |"
        )
    return "\n".join(lines)


TINKER_TABLES = {
    "tinker_refused": refused_methods,
    "tinker_methods": methods_table,
    "tinker_programs": programs_table,
    "tinker_overhead": overhead_table,
}
