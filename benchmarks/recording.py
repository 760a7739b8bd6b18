"""What ``run.record`` costs: the quickstart with it and without, in turns, and what recording itself takes.

Speed is counted from the end of the first step to the end of the last. It also measures the processor time of making
and writing the records of a run again, which does not depend on other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from inflight.observe.trace.records import RECORD, RecordWriter, read_steps
from quickstart import quickstart_model
from results import write_results

ROOT = Path(__file__).parents[1]


def run_once(directory: Path, seed: int, num_steps: int, *, records: bool) -> dict[str, Any]:
    """Train, and return the speed."""
    settings = {
        "run.directory": directory,
        "run.num_steps": num_steps,
        "run.seed": seed,
        "run.record": str(records).lower(),
        "run.stop_at_reward": 2.0,
        "run.checkpoint_every_steps": 100_000,
        "model.path": quickstart_model(),
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "inflight", "train", str(ROOT / "examples" / "quickstart.toml"), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    seconds = rows[-1]["time_s"] - rows[0]["time_s"]
    num_tokens = rows[-1]["num_trained_tokens"] - rows[0]["num_trained_tokens"]
    return {"records": records, "seed": seed, "seconds": seconds, "tokens_per_s": num_tokens / seconds}


def cost_of(directory: Path) -> dict[str, float]:
    """Write the record of a run again; return the processor time of a step, and bytes by token."""
    steps = list(read_steps(directory / RECORD))[1:]
    with tempfile.TemporaryDirectory() as name:
        writer = RecordWriter(Path(name))
        began = time.process_time()
        for step in steps:
            writer.write_step(step)
        processor_s = time.process_time() - began
        size_bytes = sum(path.stat().st_size for path in Path(name).iterdir())
    num_tokens = sum(sample.rollout.num_tokens for step in steps for sample in step.samples)
    return {
        "processor_s_per_step": processor_s / len(steps),
        "bytes_per_token": size_bytes / num_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs with and without")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    arguments = parser.parse_args()
    runs, costs = [], []
    for seed in range(arguments.rounds):
        for records in (True, False) if seed % 2 else (False, True):
            with tempfile.TemporaryDirectory() as name:
                runs.append(run_once(Path(name) / "run", seed, arguments.steps, records=records))
                if records:
                    costs.append(cost_of(Path(name) / "run"))
            print(json.dumps(runs[-1]), flush=True)
    speeds = {kind: [run["tokens_per_s"] for run in runs if run["records"] is kind] for kind in (True, False)}
    ratios = [after / before for after, before in zip(speeds[True], speeds[False], strict=True)]
    write_results(
        "recording",
        {
            "steps": arguments.steps,
            "rounds": arguments.rounds,
            "runs": runs,
            "costs": costs,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "load_average": os.getloadavg()[1],
        },
    )


if __name__ == "__main__":
    main()
