"""A training step over groups with a common prompt: each prompt computed once, against every sequence by itself.

    inflight pretrained-model models/smollm2
    python -m benchmarks.shared_prefixes models/smollm2

Both ways take the same optimizer step on the same samples, in turns, in a process of one rank. A step is the forwards
and backwards of all micro-batches and the update. Memory is what autograd keeps for the backward of the largest
micro-batch, each storage counted once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.results import write_results

from inflight.losses import collate, prepare, preset
from inflight.rollouts.packing import Packing
from inflight.types import MicroBatch, Rollout, Sample
from inflight.wire import VersionSpan
from inflight_fsdp import create_worker

NUM_SEQUENCES = 16
LENGTHS = ((64, 32), (48, 48), (16, 128))
"""Tokens of prompts and of completions: 2:1, 1:1 and 1:8."""
GROUP_SIZES = (8, 16)


def samples_of(num_prompt_tokens: int, num_tokens: int, group_size: int, vocab_size: int) -> list[Sample]:
    """Return groups of random tokens."""
    rng = random.Random(0)
    samples = []
    for group in range(NUM_SEQUENCES // group_size):
        prompt = [rng.randrange(1, vocab_size) for _ in range(num_prompt_tokens)]
        for _ in range(group_size):
            completion = [rng.randrange(1, vocab_size) for _ in range(num_tokens)]
            spans = [VersionSpan(version=0, start=0, end=num_tokens)]
            rollout = Rollout(prompt, completion, [-8.0] * num_tokens, spans, "length", 0.0, 1.0)
            samples.append(Sample(rollout, [rng.uniform(-1, 1)] * num_tokens, [True] * num_tokens, group_index=group))
    return samples


def micro_batches_of(samples: Sequence[Sample], max_tokens: int, *, share_prefixes: bool) -> list[MicroBatch]:
    """Return the micro-batches of one rank."""
    (packed,) = Packing(max_tokens, 1, share_prefixes).pack(samples)
    return [collate([samples[i] for i in ids], share_prefixes=share_prefixes) for ids in packed]


def num_computed(batch: MicroBatch) -> int:
    """Return the number of tokens that the layers compute."""
    return batch.num_tokens if batch.prefix_ids_T is None else len(set(batch.prefix_ids_T.tolist()))


def step_s(worker: Any, batches: Sequence[MicroBatch]) -> float:
    """Take a step, and return its seconds."""
    loss = preset("grpo").loss
    started = time.perf_counter()
    plan = prepare(loss, batches, current_version=worker.version)
    for batch in batches:
        worker.backward(loss(batch, worker.forward(batch), plan).loss)
    worker.step()
    return time.perf_counter() - started


def kept_bytes(worker: Any, batches: Sequence[MicroBatch]) -> int:
    """Return the largest number of bytes that autograd keeps for the backward of a micro-batch."""
    largest = 0
    for batch in batches:
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            whole = tensor if tensor._base is None else tensor._base
            if not (whole.is_leaf and whole.requires_grad):  # not a parameter
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            worker.backward(0.0 * worker.forward(batch).sum())
        largest = max(largest, sum(storages.values()))
    worker.step()
    return largest


def main() -> None:
    """Measure each shape, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for dtype in arguments.dtypes:
        worker: Any = create_worker(
            {"model_path": str(arguments.model), "dtype": dtype, "master_dtype": "float32", "learning_rate": 1e-9}
            | {"device": "cpu"}
        )
        vocab_size = worker._policy.causal_lm.config.vocab_size
        for num_prompt_tokens, num_tokens in LENGTHS:
            for group_size in GROUP_SIZES:
                samples = samples_of(num_prompt_tokens, num_tokens, group_size, vocab_size)
                ways = {
                    name: micro_batches_of(samples, arguments.max_tokens, share_prefixes=name == "shared")
                    for name in ("separate", "shared")
                }
                kept = {name: kept_bytes(worker, batches) for name, batches in ways.items()}
                times: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(arguments.rounds):
                    for name, batches in ways.items():
                        times[name].append(step_s(worker, batches))
                medians = {name: statistics.median(values) for name, values in times.items()}
                ratios = [a / b for a, b in zip(times["separate"], times["shared"], strict=True)]
                rows.append(
                    {
                        "dtype": dtype,
                        "num_prompt_tokens": num_prompt_tokens,
                        "num_tokens": num_tokens,
                        "group_size": group_size,
                        "step_s": medians,
                        "speedup": statistics.median(ratios),
                        "speedups": [min(ratios), max(ratios)],
                        "kept_bytes": kept,
                        "computed_tokens": {name: sum(map(num_computed, it)) for name, it in ways.items()},
                        "threads": arguments.threads,
                    }
                )
                print(rows[-1], flush=True)
        worker.close()
    write_results("shared_prefixes", rows)


if __name__ == "__main__":
    main()
