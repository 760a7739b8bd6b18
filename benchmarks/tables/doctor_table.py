"""The table of docs/evidence-doctor.md: planted causes, diagnoses and times."""

from __future__ import annotations

from benchmarks.tables.kept import kept


def doctor_table() -> str:
    """Return one row for each planted cause and each healthy pair."""
    lines = ["| injected fault | cause | diagnosis | where | time |", "|---|---|---|---|---|"]
    for row in kept("doctor")["rows"]:
        pair = row["model"] if "," in row["model"] else f"{row['model']} model"
        planted = f"none ({pair})" if row["cause"] is None else row["planted"]
        said = [f"{number}. {name}" for number, name, _ in row["said"][:1]] or ["healthy"]
        where = [f"`{place}`" if "." in place else place for _, _, place in row["said"][:1]] or [""]
        lines.append(f"| {planted} | {row['cause'] or ''} | {said[0]} | {where[0]} | {row['seconds']:g} s |")
    return "\n".join(lines)
