"""One rank of the cases in test_fsdp_ranks.py: ``python -m tests.worker.rank_program DIRECTORY RANK WORLD_SIZE``.

Every rank runs the same cases in the same order and writes what it saw to ``rank{RANK}.json`` and to checkpoints.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inflight.errors import InflightError, PrecisionWarning
from inflight.types import MicroBatch
from inflight.weights.encode.buckets import plan_buckets
from inflight_fsdp import FsdpWorker, create_worker
from tests.worker.worker_cases import accumulate, file_bytes, make_batch, part_of, policy_loss, settings

LENGTHS = (9, 4, 17, 1, 6, 40)
FROZEN = ("model.embed_tokens.*", "*.self_attn.k_proj.*")
NARROWER = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "summed in bfloat16": {"dtype": "float32", "reduce_dtype": "bfloat16"},
    "summed in float32": {"dtype": "bfloat16", "reduce_dtype": "float32"},
    "all bfloat16": {"dtype": "bfloat16", "master_dtype": "bfloat16", "learning_rate": 1e-4},
}
ADAM = {"betas": (0.9, 0.99), "max_gradient_norm": 0.5, "weight_decay": 0.1}


def whole_batch(seed: int) -> MicroBatch:
    return make_batch(LENGTHS, seed)


def shares(case: str) -> list[list[MicroBatch]]:
    """The micro-batches of each of two ranks; further ranks get batches without tokens."""
    whole, empty = whole_batch(1), make_batch((), 1)
    no_targets = make_batch((6, 3), 2, targets=False)
    return {
        "even": [[part_of(whole, range(0, 3))], [part_of(whole, range(3, 6))]],
        "all on rank 1": [[empty], [whole]],
        "several": [
            [part_of(whole, range(0, 1)), part_of(whole, range(1, 2)), no_targets],
            [empty, part_of(whole, range(2, 5)), part_of(whole, range(5, 6))],
        ],
    }[case]


def my_share(case: str, rank: int) -> list[MicroBatch]:
    both = shares(case)
    return both[rank] if rank < 2 else [make_batch((), 1) for _ in both[0]]


def three_steps(worker: FsdpWorker, rank: int, world_size: int) -> list[tuple[float, float]]:
    results = []
    for step in range(3):
        # Ranks without a segment left take part with a batch of none.
        starts = range(rank, -(-len(LENGTHS) // world_size) * world_size, world_size)
        accumulate(worker, [part_of(whole_batch(10 + step), range(len(LENGTHS))[i : i + 1]) for i in starts])
        result = worker.step()
        results.append((result.gradient_norm, result.learning_rate))
    return results


def error_of(call: object, *arguments: object) -> list[str] | None:
    """The class and words of the error that a call raises."""
    try:
        call(*arguments)  # type: ignore[operator]
    except InflightError as error:
        return [type(error).__name__, str(error)]
    return None


def non_finite_case(worker: FsdpWorker, directory: Path, rank: int) -> dict[str, object]:
    """Only rank 1 has a gradient that is not finite."""
    worker.save(directory / "before")
    [batch] = my_share("even", min(rank, 1))
    worker.backward(policy_loss(worker.forward(batch), batch) * (math.nan if rank == 1 else 1.0))
    error = error_of(worker.step)
    worker.save(directory / "after")
    return {"error": error, "version": worker.version}


def full_disk_case(worker: FsdpWorker, directory: Path, rank: int) -> dict[str, object]:
    """Rank 0 can write the weights again, but not the larger file of the optimizer."""
    worker.save(directory / "checkpoint")
    before = file_bytes(directory) if rank == 0 else {}
    three_steps(worker, rank, worker.world_size)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = sorted(f.stat().st_size for f in (directory / "checkpoint").rglob("*.safetensors"))
    dist.barrier()
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((sizes[-1] + sizes[-2]) // 2, limits[1]))
    error = error_of(worker.save, directory / "checkpoint")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {"error": error, "untouched": rank != 0 or file_bytes(directory) == before}


def broken_checkpoint_case(worker: FsdpWorker, directory: Path, rank: int) -> dict[str, object]:
    """What the ranks say of a checkpoint that only rank 1 cannot see."""
    worker.save(directory / "good")
    dist.barrier()
    error = error_of(worker.load, directory / ("good" if rank != 1 else "nowhere"))
    return {"error": error}


def gather_case(worker: FsdpWorker, directory: Path) -> dict[str, object]:
    worker.save(directory / "checkpoint")
    specs = worker.parameter_specs()
    gathered = list(worker.gather_weights(plan_buckets(specs, 8192)))
    return {
        "specs": [[spec.name, list(spec.shape)] for spec in specs],
        "bucket_specs": [[spec.name, list(spec.shape)] for bucket in gathered for spec in bucket.specs],
        "values": [tensor.double().tolist() for bucket in gathered for tensor in bucket.tensors],
    }


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("default", PrecisionWarning)  # of masters in bfloat16; other warnings are errors
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=40))
    seen: dict[str, Any] = {}
    for case in ("even", "all on rank 1", "several"):
        worker = create_worker(settings(directory / "model"))
        accumulate(worker, my_share(case, rank))
        worker.step()
        worker.save(directory / "gradients" / case)
    seen["rounded away"] = {}
    for name, dtypes in NARROWER.items():
        worker = create_worker(settings(directory / "model", **dtypes))
        accumulate(worker, my_share("even", rank))
        seen["rounded away"][name] = worker.step().rounded_away
        worker.save(directory / "gradients" / name)
    worker = create_worker(settings(directory / "model", frozen=FROZEN))
    accumulate(worker, my_share("even", rank))
    worker.step()
    worker.save(directory / "gradients" / "frozen")
    worker = create_worker(settings(directory / "model", **ADAM))
    seen["steps"] = three_steps(worker, rank, world_size)
    seen["gather"] = gather_case(worker, directory / "stepped")
    offloaded = create_worker(settings(directory / "model", **ADAM, cpu_offload=True))
    seen["offloaded steps"] = three_steps(offloaded, rank, world_size)
    seen["offloaded gather"] = gather_case(offloaded, directory / "offloaded")
    offloaded.load(directory / "stepped" / "checkpoint")
    offloaded.save(directory / "offloaded" / "loaded")
    seen["non-finite"] = non_finite_case(worker, directory / "non-finite", rank)
    seen["broken"] = broken_checkpoint_case(worker, directory / "broken", rank)
    seen["full disk"] = full_disk_case(worker, directory / "full", rank)
    worker.load(directory / "one rank")
    seen["loaded version"] = worker.version
    worker.save(directory / "resharded")
    seen["missing model"] = error_of(create_worker, settings(directory / ("model" if rank == 0 else "nowhere")))
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    worker.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
