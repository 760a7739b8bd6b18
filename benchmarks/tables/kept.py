"""Results of benchmarks that are kept in the project, as tables of docs read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def kept(benchmark: str) -> Any:
    """Return the file of one benchmark."""
    return json.loads((RESULTS / f"{benchmark}.json").read_text())


def kept_rows(what: str, benchmark: str = "engines") -> Sequence[dict[str, Any]]:
    """Return one part of what a benchmark measured."""
    rows: Sequence[dict[str, Any]] = kept(benchmark)["rows"][what]
    return rows


def milliseconds(seconds: float | None) -> str:
    """Return a time as a cell of a table; nothing for None."""
    return "" if seconds is None else f"{1000 * seconds:.0f} ms"
