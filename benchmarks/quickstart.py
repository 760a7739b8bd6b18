"""The quickstart as benchmarks run it: its model, and how its reward went."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
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


def run_quickstart(*overrides: str, num_steps: int = 100, more_config: str = "") -> dict[str, Any]:
    """Run the quickstart, with more text in its configuration or other values; return how its reward went."""
    model = quickstart_model()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "run.toml"
        config.write_text((ROOT / "examples" / "quickstart.toml").read_text() + more_config)
        command = [sys.executable, "-m", "inflight", "train", str(config), "--run.directory", f"{directory}/run"]
        command += ["--run.num_steps", str(num_steps), "--model.path", str(model), *overrides]
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
        seconds = time.monotonic() - started
        rows = [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": len(rows),
        "seconds": seconds,
        "lag_mean": statistics.fmean(row["lag_mean"] for row in rows),
        "lag_max": max(row["lag_max"] for row in rows),
        "ess_mean": statistics.fmean(row["effective_sample_size"] for row in rows),
        "publish_bytes": rows[-1]["publish"]["sent_bytes"],
        "publish_s": statistics.median(row["publish"]["total_s"] for row in rows if row.get("publish")),
        "reward_first": mean_reward(rows[:10]),
        "reward_last": mean_reward(rows[-10:]),
        "curve": [[row["num_samples"], row["time_s"], row["reward"]] for row in rows],
    }


def mean_reward(rows: Sequence[dict[str, Any]]) -> float:
    """Return the mean over rows of metrics that have a reward."""
    return statistics.fmean(row["reward"] for row in rows if row["reward"] is not None)
