"""What ``inflight doctor`` says of each planted cause of drift, and of healthy pairs: python benchmarks/doctor.py

Writes benchmarks/results/doctor.json, of which docs/doctor.md has the table.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from results import write_results

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.doctor.examined import CASES, MODELS, examined

from inflight.conformance.models import make_tiny_model
from inflight.doctor.causes import diagnose


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        models = {
            "dense": make_tiny_model(Path(directory) / "dense"),
            "tied": make_tiny_model(Path(directory) / "tied", tied=True),
            "moe": make_tiny_model(Path(directory) / "moe", family="qwen3_moe"),
        }
        rows = [row_of(models[MODELS.get(cause, "dense")], cause, number) for cause, number, _ in CASES]
        rows += [row_of(model, "none", None) for model in models.values()]
    write_results("doctor", rows)


def row_of(model: Path, planted: str, number: int | None) -> dict[str, Any]:
    started = time.monotonic()
    found = diagnose(examined(model, planted))
    row = {"planted": planted, "cause": number, "model": model.name, "seconds": round(time.monotonic() - started, 1)}
    row |= {"said": [[it.cause.number, it.cause.name, it.where] for it in found]}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
