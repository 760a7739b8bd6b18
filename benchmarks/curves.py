"""Reward curves of a run on a real model: full weights, LoRA and vLLM, three seeds each, and one without bursts.

    inflight pretrained-model models/smollm2
    make engines                                                  # for vllm
    python -m benchmarks.curves --vllm .engines/vllm-0.32.0/bin/python

Each run is `inflight train examples/sums.toml` with the settings of its variant and a seed, one after the other.
Variants that are measured again replace their rows in ``results/curves.json``; the plot shows all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from benchmarks.results import DIRECTORY, read_results, write_results

ROOT = Path(__file__).parents[1]
VARIANTS: dict[str, tuple[str, ...]] = {
    "full weights": (),
    "LoRA": ("--train.lora", "{ rank = 16, alpha = 32, targets = 'all-linear' }", "--train.learning_rate", "3e-4"),
    "vLLM": ("--servers.engine", "vllm"),
    "one group at a time": ("--rollouts.burst", "1"),
}
COLOURS = {"full weights": "#0969da", "LoRA": "#8250df", "vLLM": "#bc4c00", "one group at a time": "#57606a"}


def run_variant(overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """Make one run; return its steps, its evaluations and its seconds, starting processes included."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "inflight", "train", str(ROOT / "examples" / "sums.toml")]
        command += ["--run.directory", f"{directory}/run", "--run.seed", str(seed), *overrides]
        started = time.monotonic()
        subprocess.run(command, check=True, timeout=3600, cwd=ROOT)
        seconds = time.monotonic() - started
        rows = _lines(Path(directory) / "run" / "metrics.jsonl")
        evaluations = _lines(Path(directory) / "run" / "evaluation.jsonl")
        summary = json.loads((Path(directory) / "run" / "summary.json").read_text())
    return {
        "seed": seed,
        "seconds": seconds,
        "curve": [[row["time_s"], row["num_samples"], row["reward"]] for row in rows],
        "lag_mean": statistics.fmean(row["lag_mean"] for row in rows),
        "ess_min": min(row["effective_sample_size"] for row in rows),
        "tokens_per_s": sum(row["num_trained_tokens"] for row in rows) / rows[-1]["time_s"],
        "share_with_two_or_more_versions": summary["share_with_two_or_more_versions"],
        "evaluations": evaluations,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw reward against steps and against time, a line for each seed."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for row in rows:
        times, _, rewards = zip(*(point for point in row["curve"] if point[2] is not None), strict=True)
        steps = [i for i, point in enumerate(row["curve"], 1) if point[2] is not None]
        for axis, x in zip(axes, (steps, times), strict=True):
            label = row["variant"] if row["seed"] == 0 else None
            axis.plot(x, _smoothed(rewards), color=COLOURS[row["variant"]], label=label, alpha=0.8)
    for axis, label in zip(axes, ("optimizer steps", "seconds"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean reward (three steps)")
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _smoothed(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - 2) : i + 1]) for i in range(len(values))]


def main() -> None:
    """Make the runs, write the results and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter with vLLM (default: without vLLM)")
    arguments = parser.parse_args()
    rows = read_results("curves")["rows"] if (DIRECTORY / "curves.json").exists() else []
    for name in arguments.only:
        if name == "vLLM" and arguments.vllm is None:
            print("vLLM is left out: --vllm is missing")
            continue
        engine = ("--servers.python", arguments.vllm) if name == "vLLM" else ()
        rows = [row for row in rows if row["variant"] != name]
        for seed in range(arguments.seeds):
            row = {"variant": name, **run_variant((*VARIANTS[name], *engine), seed)}
            rows.append(row)
            rewards = [point[2] for point in row["curve"] if point[2] is not None]
            print(
                f"{name}, seed {seed}: reward {statistics.fmean(rewards[:3]):.3f} in the first three steps, "
                f"{statistics.fmean(rewards[-3:]):.3f} in the last three; {row['seconds']:.0f} s",
                flush=True,
            )
            write_results("curves", rows)
    plot(rows, ROOT / "docs" / "images" / "curves.png")


if __name__ == "__main__":
    main()
