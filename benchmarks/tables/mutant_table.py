"""The table of mutants in docs/evidence-conformance.md, from what the last run of all of them found."""

from __future__ import annotations

import json

from tests.conformance.mutation import RESULTS, subjects


def mutant_table() -> str:
    """Return the table of mutants: what is wrong, the check that must catch it, and which others do."""
    results = json.loads(RESULTS.read_text())
    rows = ["| mutant | what is wrong | must be caught by | also caught by |\n|---|---|---|---|\n"]
    for subject in subjects():
        found = results[subject.kind].get(subject.name, {})
        own = f"**{subject.caught_by}**" if subject.caught_by in found else f"{subject.caught_by}: MISSED"
        others = ", ".join(check for check in found if check != subject.caught_by)
        fault = subject.fault[0].upper() + subject.fault[1:].rstrip(".")
        rows.append(f"| {subject.kind}: {subject.name.replace('_', ' ')} | {fault} | {own} | {others} |\n")
    return "".join(rows)
