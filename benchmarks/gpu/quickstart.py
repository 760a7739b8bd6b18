"""The quickstart's configuration for a few steps with a model of 0.5 B random parameters in bfloat16.

Its rewards mean nothing: what counts is that everything runs together, and how long a step takes.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.models import half_billion, save_random_model
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.timing import spread

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.toml"
OWN_TASK = "examples.own_parts:CountLetters"


def measure(settings: Settings) -> dict[str, Any]:
    """Return the figures of this section."""
    num_gpus = torch.cuda.device_count() if settings.on_gpu else 0
    directory = settings.place / "run"
    changes = changes_of(settings, save_random_model(half_billion(settings), settings), directory, num_gpus)
    command = [sys.executable, "-m", "inflight", "train", str(CONFIG), *changes]
    started = time.monotonic()
    answer = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=settings.left_s
    )
    seconds = time.monotonic() - started
    if answer.returncode != 0:
        words = " ".join(answer.stdout.split()[-80:])
        raise RuntimeError(f"inflight train ended with status {answer.returncode}: {words}")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    publishes = [row["publish"] for row in rows if row["publish"] is not None]
    return {
        "task": OWN_TASK if OWN_TASK in changes else "the quickstart's",
        "transport": changes[changes.index("--updates.transport") + 1],
        "num_steps": len(rows),
        "seconds": seconds,
        "first_step_s": rows[0]["time_s"],
        "step_s": spread([b["time_s"] - a["time_s"] for a, b in pairwise(rows)]),
        "step_tokens": statistics.fmean(row["num_step_tokens"] for row in rows),
        "lag_max": max(row["lag_max"] for row in rows),
        "publishes": publishes,
    }


def changes_of(settings: Settings, model: Path, directory: Path, num_gpus: int) -> list[str]:
    """Return what is changed in the quickstart's configuration, as arguments of ``inflight train``."""
    changes = {
        "run.directory": directory,
        "run.num_steps": 2 if settings.quick else 5,
        "model.path": model,
        "model.dtype": "bfloat16",
        "sampling.max_tokens": 16 if settings.quick else 64,
        # On one GPU trainer and server share it; of several each has its own, and IPC reaches no other.
        "updates.transport": ("shm", "ipc", "nccl")[min(num_gpus, 2)],
        "train.tokens_per_worker": 512 if settings.quick else 8192,
        "train.learning_rate": "1e-6",
        "train.train_on_equal_rewards": "true",  # a random model answers nothing right
    }
    if num_gpus == 0:
        changes |= {"servers.device": "cpu", "train.device": "cpu"}
    if num_gpus == 1:
        changes["servers.colocated"] = "true"
    if importlib.util.find_spec("reasoning_gym") is None:
        changes["task.name"] = OWN_TASK
    return [word for key, value in changes.items() for word in (f"--{key}", str(value))]
