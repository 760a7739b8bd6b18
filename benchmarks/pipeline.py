"""Pipeline against conventional reinforcement learning: learning per completion, trained tokens per second, staleness.

Every run is the quickstart (same model, task, seeds, batch size, machine) in one mode; modes take turns. Speed is
counted from the end of the first step to the end of the last, so that starting costs nobody anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import write_results

ROOT = Path(__file__).parents[1]
MODES = {
    "pipeline": ["--run.mode", "pipeline"],
    "conventional G=1": ["--run.mode", "conventional", "--run.conventional_steps", "1"],
    "conventional G=4": ["--run.mode", "conventional", "--run.conventional_steps", "4"],
    "conventional G=8": ["--run.mode", "conventional", "--run.conventional_steps", "8"],
}


def run_once(mode: str, seed: int, num_steps: int, model: Path, directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "inflight", "train", str(ROOT / "examples" / "quickstart.toml")]
    command += ["--run.directory", str(directory), "--run.num_steps", str(num_steps), "--run.seed", str(seed)]
    command += ["--run.stop_at_reward", "2.0", "--model.path", str(model), "--train.train_on_equal_rewards", "true"]
    command += ["--run.checkpoint_every_steps", "100000"]
    subprocess.run([*command, *MODES[mode]], check=True, stdout=subprocess.DEVNULL, timeout=1200)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-1]
    elapsed_s = last["time_s"] - first["time_s"]
    busy_s = sum(e["end_s"] - e["start_s"] for e in events if e["kind"] == "train" and e["start_s"] > first["time_s"])
    paused_s = sum(sum(row["publish"]["paused_s"].values()) for row in rows[1:] if row["publish"])
    return {
        "mode": mode,
        "seed": seed,
        "trained_tokens_per_s": (last["num_trained_tokens"] - first["num_trained_tokens"]) / elapsed_s,
        "train_share": busy_s / elapsed_s,
        "paused_share": paused_s / elapsed_s,
        "step_s": elapsed_s / (len(rows) - 1),
        "ess_mean": statistics.fmean(row["effective_sample_size"] for row in rows),
        "lag_mean": statistics.fmean(row["lag_mean"] for row in rows),
        "lag_max": max(row["lag_max"] for row in rows),
        "curve": [[row["num_samples"], row["time_s"], row["reward"], row["effective_sample_size"]] for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=96, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each mode")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(arguments.seeds):
            for mode in MODES:
                target = Path(directory) / f"{mode.replace(' ', '-')}-{seed}"
                runs.append(run_once(mode, seed, arguments.steps, arguments.model, target))
                row = {key: value for key, value in runs[-1].items() if key != "curve"}
                print(json.dumps(row), flush=True)
    speed = {(run["mode"], run["seed"]): run["trained_tokens_per_s"] for run in runs}
    ratios = {}
    for mode in MODES:
        if mode != "pipeline":
            values = [speed["pipeline", seed] / speed[mode, seed] for seed in range(arguments.seeds)]
            ratios[mode] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            print(f"pipeline over {mode}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
    write_results("pipeline", {"steps": arguments.steps, "ratios": ratios, "runs": runs})


if __name__ == "__main__":
    main()
