"""A compiled worker beside a plain one: ``python -m tests.worker.compile_program DIRECTORY TRAINER keep|recompute``.

In a process of its own: graphs, counters and limits of the compiler are those of a process.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from inflight_fsdp.sharded import ShardedWorker
from tests.models import make_model
from tests.worker.worker_cases import make_batch, policy_loss, settings

warnings.filterwarnings("ignore", message=".torch.jit.script_method. is deprecated")  # torch itself
LENGTHS = ((9, 4, 17, 1, 6, 40), (5, 20), (30, 30, 30), (100, 3, 50, 60))
"""Segments that differ, and segments that are alike, which attention takes another way."""


def seen_of(worker: ShardedWorker, lengths: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Logprobs of one micro-batch, and its gradients; none are left behind."""
    batch = make_batch(lengths, seed)
    logprobs_T = worker.forward(batch)
    worker.backward(policy_loss(logprobs_T, batch))
    gradients = [part.gradient.clone() for part in worker._parameters.parts.values()]
    worker._clear_gradients()
    return [logprobs_T.detach(), *gradients]


def differences(
    worker: ShardedWorker, other: ShardedWorker, seed: int, lengths: tuple[int, ...]
) -> tuple[float, float]:
    """How far logprobs are apart, and gradients, these beside the largest of all."""
    (logprobs, *gradients), (logprobs_, *gradients_) = (seen_of(w, lengths, seed) for w in (worker, other))
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    apart = max(float((a - b).abs().max()) for a, b in zip(gradients, gradients_, strict=True))
    return float((logprobs - logprobs_).abs().max()), apart / largest


def main(directory: Path, trainer: str, recompute: bool) -> None:
    torch.set_num_threads(1)
    create_worker = importlib.import_module(trainer).create_worker
    path = make_model(directory / "model", num_layers=3, tokenizer=False)
    options = {"dtype": "float32", "wire_dtype": "float32", "activation_checkpointing": recompute}
    eager, compiled = (create_worker(settings(path, **options, compile=flag)) for flag in (False, True))
    counters.clear()
    apart = [differences(eager, compiled, seed, lengths) for seed, lengths in enumerate(LENGTHS)]
    num_graphs = counters["stats"]["unique_graphs"]
    apart += [differences(eager, compiled, num, (num, 11)) for num in range(20, 32)]
    seen = {
        "logprobs": max(logprobs for logprobs, _ in apart),
        "gradients": max(gradients for _, gradients in apart),
        "graphs": num_graphs,
        "graphs of twelve more lengths": counters["stats"]["unique_graphs"] - num_graphs,
        "breaks": list(counters["graph_break"]),
        "same names": list(eager._parameters.parts) == list(compiled._parameters.parts),
    }
    (directory / "seen.json").write_text(json.dumps(seen, indent=1))
    compiled.close()
    eager.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "recompute")
