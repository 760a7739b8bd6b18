"""Distillation beside reinforcement learning: the tiny model learns from the model that the quickstart trains.

    inflight tiny-model models/tiny
    python -m benchmarks.distillation

The teacher is `inflight train examples/quickstart.toml`, whose curve is that of reinforcement learning. The students
are `inflight train examples/distillation.toml` with each preset and seed, one after the other, from the same first
weights. ``opd`` is also tried with a teacher that has a URL; forward KL needs one.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from benchmarks.results import write_results

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
RL = "pipelinerl_paper"
IN_RANKS = ("opd", "tinker_opd", "mopd")
BY_URL: dict[str, tuple[str, ...]] = {"opd": (), "verl_forward_kl": ("--distillation.top_k", "16")}
NUM_AVERAGED = 5
"""Steps at the beginning and at the end whose rewards are averaged."""


def run(example: str, directory: Path, *overrides: str, token: str = "") -> dict[str, Any]:
    """Make one run; return its curve, its KL to the teacher if it has one, and its seconds."""
    command = [sys.executable, "-m", "inflight", "train", str(ROOT / "examples" / example)]
    command += ["--run.directory", str(directory), *overrides]
    environment = {**os.environ, **({"INFLIGHT_TOKEN": token} if token else {})}
    subprocess.run(command, check=True, timeout=3600, cwd=ROOT, env=environment)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    kl = [row[name] for row in rows for name in ("teacher_kl_top_k", "teacher_kl_k1") if name in row]
    return {
        "steps": len(rows),
        "seconds": rows[-1]["time_s"],
        "reward_first": statistics.fmean(rewards[:NUM_AVERAGED]),
        "reward_last": statistics.fmean(rewards[-NUM_AVERAGED:]),
        "kl_first": kl[0] if kl else None,
        "kl_last": statistics.fmean(kl[-NUM_AVERAGED:]) if kl else None,
        "curve": [[row["time_s"], row["reward"]] for row in rows],
    }


@contextmanager
def served(model: Path, directory: Path, token: str) -> Iterator[str]:
    """Yield the URL of a server of a model."""
    ready = directory / "ready.json"
    command = [sys.executable, "-m", "inflight", "serve", str(model), "--port", "0", "--ready-file", str(ready)]
    command += ["--exit-with-stdin", "--threads", "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "INFLIGHT_TOKEN": token})
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, "the teacher's server did not start"
            time.sleep(0.1)
        yield json.loads(ready.read_text())["url"]
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def measure(directory: Path) -> list[dict[str, Any]]:
    """Return a row for each run."""
    rows: list[dict[str, Any]] = []

    def add(preset: str, teacher: str, seed: int, example: str, *overrides: str, token: str = "") -> None:
        found = run(example, directory / f"run-{len(rows)}", "--run.seed", str(seed), *overrides, token=token)
        rows.append({"preset": preset, "teacher": teacher, "seed": seed, **found})
        print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)

    for seed in SEEDS:
        add(RL, "none", seed, "quickstart.toml")
    teacher = directory / "run-0" / "checkpoints" / "version-000100"
    for seed in SEEDS:
        for preset in IN_RANKS:
            teachers = f"[{{path = {json.dumps(str(teacher))}}}]"
            words = ("--loss.preset", preset, "--distillation.teachers", teachers)
            add(preset, "path", seed, "distillation.toml", *words)
    token = secrets.token_urlsafe(24)
    with served(teacher, directory, token) as url:
        for seed in SEEDS:
            for preset, more in BY_URL.items():
                words = ("--loss.preset", preset, "--distillation.teachers", f"[{{url = {json.dumps(url)}}}]", *more)
                add(preset, "url", seed, "distillation.toml", *words, token=token)
    return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw reward against time, a line for each run."""
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    kinds = list(dict.fromkeys((row["preset"], row["teacher"]) for row in rows))
    for kind, colour in zip(kinds, mpl.colormaps["tab10"].colors, strict=False):
        preset, teacher = kind
        label = "reinforcement learning" if preset == RL else f"{preset}, teacher {teacher}"
        for row in (row for row in rows if (row["preset"], row["teacher"]) == kind):
            times, rewards = zip(*(point for point in row["curve"] if point[1] is not None), strict=True)
            smoothed = [statistics.fmean(rewards[max(0, i - 2) : i + 1]) for i in range(len(rewards))]
            axis.plot(times, smoothed, color=colour, label=label, alpha=0.8, linewidth=1.2)
            label = ""
    axis.set_xlim(0, 2 * max(row["seconds"] for row in rows if row["preset"] != RL))
    axis.set_xlabel("seconds")
    axis.set_ylabel("mean reward (three steps)")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory))
    write_results("distillation", rows)
    plot(rows, ROOT / "docs" / "images" / "distillation.png")


if __name__ == "__main__":
    main()
