"""One rank of DeepSpeed workers beside the FSDP worker: ``python -m tests.worker.zero_program DIRECTORY RANK SIZE``.

``cases.json`` in the directory has options by name. Each case leaves ``NAME.json`` and the checkpoint ``NAME``.
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import inflight_fsdp
from inflight_fsdp.deepspeed import create_worker
from inflight_fsdp.sharded import ShardedWorker
from tests.worker.rank_program import error_of
from tests.worker.worker_cases import accumulate, make_batch, part_of, policy_loss, settings

LENGTHS = (9, 4, 17, 1, 6, 40)
ADAM = {"betas": (0.8, 0.95), "max_gradient_norm": 0.5, "weight_decay": 0.1, "learning_rate": 0.01}


def steps(worker: ShardedWorker, seeds: range, rank: int, world_size: int) -> list[float]:
    """Norms of steps of three micro-batches, in whose order forwards and backwards are mixed."""
    norms = []
    for seed in seeds:
        first, second, third = (
            make_batch(LENGTHS, seed),
            make_batch((5, 20), seed + 100),
            make_batch((7, 3), seed + 200),
        )
        if world_size > 1:
            first = part_of(first, range(0, 2) if rank == 0 else range(2, 6))
            second = second if rank == 0 else part_of(second, range(0, 0))
            third = part_of(third, range(rank, rank + 1))
        losses = [policy_loss(worker.forward(batch), batch) for batch in (first, second)]
        with torch.no_grad():
            worker.forward(third)
        for i in (seed % 2, 1 - seed % 2):
            worker.backward(losses[i])
        accumulate(worker, [third])
        norms.append(worker.step().gradient_norm)
    return norms


def run_case(worker: ShardedWorker, path: Path, one_rank: Path, rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {"logprobs": worker.forward(make_batch(LENGTHS, 1)).detach().tolist()}
    seen["norms"] = steps(worker, range(3), rank, world_size)
    batch = make_batch((8, 8), 9)
    worker.backward(policy_loss(worker.forward(batch), batch) * (float("nan") if rank == 0 else 1.0))
    seen["refused"] = error_of(worker.step)
    seen["norms"] += steps(worker, range(3, 5), rank, world_size)
    worker.save(path)
    if one_rank.exists():
        worker.load(one_rank)
    accumulate(worker, [batch])
    worker.load(path)
    seen["resumed"] = steps(worker, range(5, 7), rank, world_size)
    worker.save(path.with_name(f"{path.name} resumed"))
    worker.close()
    return seen


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    # Torch itself, of its compiler, which DeepSpeed imports.
    warnings.filterwarnings("ignore", message=".torch.jit.script_method. is deprecated")
    store = dist.FileStore(str(directory / f"store{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=100))
    plain = {**settings(directory / "model", **ADAM), "dtype": "float32", "wire_dtype": "float32"}
    cases: dict[str, dict[str, Any]] = json.loads((directory / "cases.json").read_text())
    for name, options in cases.items():
        create = create_worker if "zero_stage" in options else inflight_fsdp.create_worker
        path = directory / f"{name}, {world_size}"
        seen = run_case(create({**plain, **options}), path, directory / f"{name}, 1", rank, world_size)
        if rank == 0:
            path.with_suffix(".json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
