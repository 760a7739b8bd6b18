"""Router replay: how far engine and trainer are apart on a mixture of experts, with the sampled experts and without.

Every run trains the same tiny Qwen3-MoE on two ranks, on tokens of its own version, with the same seeds; the runs of a
seed take turns. In bfloat16 a sum in another order moves a router's scores, and some tokens go to other experts.
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

from inflight.engines.embedded.tiny import TinyShape, create_tiny_model, save_tiny_model, warm_start
from inflight.rollouts.tasks import load_task
from results import write_results

ROOT = Path(__file__).parents[1]
SHAPE = TinyShape("qwen3_moe", hidden_size=96, num_layers=4, num_heads=3)
DTYPES = ("bfloat16", "float32")


def run_once(model: Path, directory: Path, dtype: str, seed: int, num_steps: int, *, replay: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "inflight", "train", str(ROOT / "examples" / "quickstart.toml")]
    settings = {
        "run.directory": directory,
        "run.mode": "conventional",
        "run.num_steps": num_steps,
        "run.seed": seed,
        "run.stop_at_reward": 2.0,
        "run.checkpoint_every_steps": 100_000,
        "sampling.max_tokens": 64,
        "train.tokens_per_worker": 1024,
        "model.path": model,
        "model.dtype": dtype,
        "train.num_ranks": 2,
        "train.router_replay": str(replay).lower(),
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL, timeout=1800)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows]
    return {
        "dtype": dtype,
        "replay": replay,
        "seed": seed,
        "mismatch_k3": statistics.fmean(row["mismatch_k3"] for row in rows),
        "mismatch_k3_of_steps": [row["mismatch_k3"] for row in rows],
        "max_abs_log_ratio": max(row["max_abs_log_ratio"] for row in rows),
        "lag_max": max(row["lag_max"] for row in rows),
        "reward_first": statistics.fmean(rewards[:10]),
        "reward_last": statistics.fmean(rewards[-10:]),
        "seconds": rows[-1]["time_s"] - rows[0]["time_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each setting")
    parser.add_argument("--warm-steps", type=int, default=400, help="steps of imitation before")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = create_tiny_model(SHAPE, 0)
        warm_start(model, load_task("spell_backward", {}, 0), num_steps=arguments.warm_steps, seed=0)
        save_tiny_model(model, directory / "model")
        for dtype in DTYPES:
            for seed in range(arguments.seeds):
                for replay in (False, True):
                    target = directory / f"{dtype}-{seed}-{replay}"
                    settings = directory / "model", target, dtype, seed, arguments.steps
                    runs.append(run_once(*settings, replay=replay))
                    print(json.dumps(runs[-1]), flush=True)
    write_results("router_replay", {"steps": arguments.steps, "layers": SHAPE.num_layers, "runs": runs})


if __name__ == "__main__":
    main()
