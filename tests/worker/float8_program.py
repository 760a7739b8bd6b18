"""A worker that multiplies in float8 beside one that does not: ``python -m tests.worker.float8_program DIRECTORY``.

Needs torchao.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from inflight.errors import ConfigError
from inflight.weights.encode.buckets import plan_buckets
from inflight_fsdp import FsdpWorker, create_worker
from tests.models import make_model
from tests.worker.worker_cases import accumulate, make_batch, part_of, saved_gradients, settings

LENGTHS = (9, 4, 17, 1, 6, 40)
OPTIONS: dict[str, Any] = {"dtype": "float32", "wire_dtype": "float32"}


def gradient_of(worker: FsdpWorker, path: Path, *, parts: int) -> torch.Tensor:
    """The gradients of a step whose segments come in so many micro-batches."""
    batch, edges = make_batch(LENGTHS, seed=1), [len(LENGTHS) * i // parts for i in range(parts + 1)]
    accumulate(worker, [part_of(batch, range(a, b)) for a, b in itertools.pairwise(edges)])
    worker.step()
    worker.save(path)
    return torch.cat([gradient.flatten() for _, gradient in sorted(saved_gradients(path).items())])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main(directory: Path) -> None:
    model = make_model(directory / "model", tied=True, tokenizer=False)
    usual = create_worker(settings(model, **OPTIONS))
    narrow = create_worker(settings(model, float8=True, **OPTIONS))
    batch = make_batch(LENGTHS, seed=1)
    mask_T = batch.loss_mask_T
    with torch.no_grad():
        expected_T, found_T = usual.forward(batch), narrow.forward(batch)
        alone_T = torch.cat([narrow.forward(part_of(batch, range(i, i + 1))) for i in range(len(LENGTHS))])
    names = [[spec.name for spec in worker.parameter_specs()] for worker in (usual, narrow)]
    specs = narrow.parameter_specs()
    sent = [t for bucket in narrow.gather_weights(plan_buckets(specs, 1 << 20)) for t in bucket.tensors]
    kept = [t for bucket in usual.gather_weights(plan_buckets(specs, 1 << 20)) for t in bucket.tensors]
    whole = gradient_of(narrow, directory / "whole", parts=1)
    parts = gradient_of(create_worker(settings(model, float8=True, **OPTIONS)), directory / "parts", parts=3)
    reference = gradient_of(usual, directory / "reference", parts=1)
    try:
        odd = make_model(directory / "odd", hidden_size=24, tokenizer=False)
        refused = str(create_worker(settings(odd, float8=True, **OPTIONS)))
    except ConfigError as error:
        refused = str(error)
    seen = {
        "apart": float((found_T - expected_T)[mask_T].abs().mean()),
        "spread": float(expected_T[mask_T].std()),
        "packing": float((found_T - alone_T).abs().max()),
        "same names": names[0] == names[1],
        "same weights": all(torch.equal(a, b) for a, b in zip(sent, kept, strict=True)),
        "gradient apart": distance(whole, reference),
        "gradient of parts": distance(parts, whole),
        "refused": refused,
    }
    (directory / "seen.json").write_text(json.dumps(seen))
    usual.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
