"""The quickstart as benchmarks run it: its model, and the reward of its steps."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def quickstart_model() -> Path:
    """Return the model of the quickstart, made if it is not there."""
    model = ROOT / "models" / "tiny"
    if not model.exists():
        subprocess.run([sys.executable, "-m", "inflight", "tiny-model", str(model)], check=True, timeout=1800)
    return model


def mean_reward(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean over rows of metrics that have a reward."""
    return statistics.fmean(row["reward"] for row in rows if row["reward"] is not None)
