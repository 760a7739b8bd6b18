"""Compares two commits, in turns on one machine: the quickstart, and the embedded engine against ``generate``.

    python benchmarks/beside.py REVISION

compares HEAD with another commit. Each is checked out in a directory of its own and runs its own code, its own example
and its own benchmark of the engine; only the quickstart's model is the same. Speed and pauses of the quickstart are
counted from the end of the first step to the end of the last.

The commits run in turns. On a machine whose speed changes from one minute to the next, ``--together`` runs both at the
same time, so that a change affects both; each then has half of the machine, and figures are those of a loaded one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.distribution import write_metadata
from quickstart import mean_reward, quickstart_model
from results import write_results

ROOT = Path(__file__).parents[1]


def run(tree: Path, *arguments: str) -> None:
    """Run Python with the packages of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=1800
    )


def quickstart_of(tree: Path, seed: int, num_steps: int) -> dict[str, float]:
    """Train as the quickstart of a checkout does, and return its figures."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["-m", "inflight", "train", "examples/quickstart.toml", "--run.directory", f"{directory}/run"]
        command += ["--run.num_steps", str(num_steps), "--run.seed", str(seed), "--model.path", str(quickstart_model())]
        run(tree, *command, "--run.checkpoint_every_steps", "100000", "--run.stop_at_reward", "2.0")
        rows = [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]
    elapsed_s = rows[-1]["time_s"] - rows[0]["time_s"]
    return {
        "reward_first": mean_reward(rows[:10]),
        "reward_last": mean_reward(rows[-10:]),
        "trained_tokens_per_s": (rows[-1]["num_trained_tokens"] - rows[0]["num_trained_tokens"]) / elapsed_s,
        "paused_share": sum(paused_s(row["publish"]) for row in rows[1:] if row["publish"]) / elapsed_s,
        "lag_mean": statistics.fmean(row["lag_mean"] for row in rows),
        "ess_mean": statistics.fmean(row["effective_sample_size"] for row in rows),
    }


def paused_s(publish: dict[str, Any]) -> float:
    """Return how long a publish paused the endpoints, all of them together. Commits before cf53fc4 say ``held_s``."""
    seconds: dict[str, float] = publish["paused_s"] if "paused_s" in publish else publish["held_s"]
    return sum(seconds.values())


def engine_of(tree: Path) -> dict[str, float]:
    """Run the benchmark of a checkout's engine once, and return tokens per second over those of ``generate``."""
    run(tree, "benchmarks/engine.py", "--repeats", "1")
    rows = json.loads((tree / "benchmarks" / "results" / "engine.json").read_text())["rows"]
    return {f"engine over generate, {row['model']}, {row['lengths']}": row["ratio_median"] for row in rows}


def checkouts(directory: Path, revisions: Mapping[str, str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Check each revision out in a directory of its own; return the directories and the commits by label."""
    trees, commits = {}, {}
    for label, revision in revisions.items():
        tree = trees[label] = directory / label
        subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
        subprocess.run(["git", "checkout", "--quiet", "--detach", revision], cwd=tree, check=True)
        short = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tree, stdout=subprocess.PIPE, check=True)
        commits[label] = short.stdout.decode().strip()
        write_metadata(tree / "src", tree)  # its own entry points, and not those of what is installed
    return trees, commits


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run")
    parser.add_argument("--together", action="store_true", help="run both commits at the same time")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadPoolExecutor(2 if arguments.together else 1) as executor,
    ):
        trees, commits = checkouts(Path(directory), {"before": arguments.revision, "after": "HEAD"})

        def measured(label: str) -> dict[str, float]:
            return quickstart_of(trees[label], number, arguments.steps) | engine_of(trees[label])

        for number in range(arguments.rounds):
            labels = ("before", "after") if number % 2 == 0 else ("after", "before")
            for label, values in zip(labels, executor.map(measured, labels), strict=True):
                print(json.dumps({"round": number, "commit": commits[label], **values}), flush=True)
                for name, value in values.items():
                    figures.setdefault(name, {}).setdefault(label, []).append(value)
    rows: dict[str, Any] = {
        name: {label: spread(values) for label, values in sides.items()} for name, sides in figures.items()
    }
    found = {"commits": commits, "rounds": arguments.rounds, "steps": arguments.steps, "figures": rows}
    write_results("beside_together" if arguments.together else "beside", found)


if __name__ == "__main__":
    main()
