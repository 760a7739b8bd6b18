"""AdamW with moments in 8 bits beside AdamW: ``python -m tests.worker.eight_bit_program DIRECTORY``, with torchao."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from inflight.weights.encode.buckets import plan_buckets
from inflight_fsdp import FsdpWorker, create_worker
from tests.worker.worker_cases import accumulate, make_batch, settings

LENGTHS = (9, 4, 17, 1, 6, 40)
OPTIONS = {"dtype": "float32", "wire_dtype": "float32", "betas": (0.9, 0.99), "learning_rate": 1e-3}


def weights_of(worker: FsdpWorker) -> list[torch.Tensor]:
    buckets = plan_buckets(worker.parameter_specs(), 1 << 20)
    return [tensor for bucket in worker.gather_weights(buckets) for tensor in bucket.tensors]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return sum(float((x - y).norm()) for x, y in zip(a, b, strict=True))


def main(directory: Path) -> None:
    full = create_worker(settings(directory / "model", **OPTIONS))
    small = create_worker(settings(directory / "model", optimizer="adamw8bit", **OPTIONS))
    start, norms = weights_of(full), []
    for seed in range(3):
        for worker in (small, full):
            accumulate(worker, [make_batch(LENGTHS, seed=seed)])
        norms.append((small.step().gradient_norm, full.step().gradient_norm))
    moments = [state["exp_avg"] for state in small._optimizer._adamw.state.values()]  # type: ignore[attr-defined]
    seen = {
        "norms": norms,
        "moved": distance(weights_of(full), start),
        "apart": distance(weights_of(small), weights_of(full)),
        "dtypes": sorted({str(getattr(moment, "codes", moment).dtype) for moment in moments}),
    }
    small.save(directory / "saved")
    resumed = create_worker(settings(directory / "model", optimizer="adamw8bit", **OPTIONS))
    resumed.load(directory / "saved")
    for worker in (small, resumed):
        accumulate(worker, [make_batch(LENGTHS, seed=9)])
        worker.step()
    seen["resumed apart"] = distance(weights_of(small), weights_of(resumed))
    (directory / "seen.json").write_text(json.dumps(seen))
    full.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
