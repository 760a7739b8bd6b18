"""Seconds of a training step by the threads of the trainer, alone and beside a process that needs one core.

    inflight pretrained-model models/smollm2
    python -m benchmarks.threads models/smollm2

Threads wait for each other asleep (``PASSIVE``), as those of a run do, awake (``ACTIVE``), or as OpenMP's default is.
Each setting trains in a process of its own; settings take turns. The other process has its own session, like a server
of a run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.busy import busy_processes
from benchmarks.results import write_results
from benchmarks.shared_prefixes import micro_batches_of, samples_of, step_s

from inflight.run.machines.processes import CPU_RANK_VARIABLES
from inflight_fsdp import create_worker

NUM_PROMPT_TOKENS, NUM_TOKENS, GROUP_SIZE = 62, 62, 8
MAX_TOKENS = 2048
NUM_STEPS = 3


def step_times(model: Path, threads: int) -> list[float]:
    """Return the seconds of some steps after one to warm up."""
    torch.set_num_threads(threads)
    settings = {"dtype": "bfloat16", "master_dtype": "float32", "learning_rate": 1e-9, "device": "cpu"}
    worker: Any = create_worker({"model_path": str(model), **settings})
    vocab_size = worker._policy.causal_lm.config.vocab_size
    samples = samples_of(NUM_PROMPT_TOKENS, NUM_TOKENS, GROUP_SIZE, vocab_size)
    batches = micro_batches_of(samples, MAX_TOKENS, share_prefixes=True)
    step_s(worker, batches)
    return [step_s(worker, batches) for _ in range(NUM_STEPS)]


def main() -> None:
    """Measure each setting, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="measure in this process, and print the seconds of each step")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        print(*step_times(arguments.model, arguments.threads))
        return
    cores = len(os.sched_getaffinity(0))
    settings = [(1, "PASSIVE"), (cores, "PASSIVE"), (cores, "default"), (cores, "ACTIVE")]
    times: dict[tuple[int, str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for threads, waits in settings:
            for num_busy in (0, 1):
                command = [sys.executable, "-m", "benchmarks.threads", str(arguments.model), "--threads", str(threads)]
                environment = {**os.environ, **CPU_RANK_VARIABLES, "OMP_WAIT_POLICY": waits}
                if waits == "default":
                    del environment["OMP_WAIT_POLICY"]
                with busy_processes(num_busy):
                    text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                found = [float(word) for word in text.stdout.split()]
                times.setdefault((threads, waits, num_busy), []).append(statistics.median(found))
                print(threads, waits, num_busy, found, flush=True)
    rows = [
        {"threads": threads, "waits": waits.lower(), "busy": num_busy, "step_s": values}
        for (threads, waits, num_busy), values in times.items()
    ]
    write_results("threads", rows)


if __name__ == "__main__":
    main()
