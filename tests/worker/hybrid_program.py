"""One of four ranks, two copies of two shards: ``python -m tests.worker.hybrid_program DIRECTORY RANK WORLD_SIZE``."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from inflight.weights.encode.buckets import plan_buckets
from inflight_fsdp import create_worker
from tests.worker.rank_program import ADAM, error_of, three_steps
from tests.worker.worker_cases import settings


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    refused = error_of(create_worker, settings(directory / "model", shard_size=3))
    worker = create_worker(settings(directory / "model", shard_size=2, **ADAM))
    steps = three_steps(worker, rank, world_size)
    worker.save(directory / "hybrid")
    other = create_worker(settings(directory / "model", **ADAM))
    other.load(directory / "hybrid")
    other.save(directory / "resharded")
    experts = create_worker(settings(directory / "experts", **ADAM))
    three_steps(experts, rank, world_size)
    experts.save(directory / "experts stepped")
    reloaded = create_worker(settings(directory / "experts", shard_size=1, **ADAM))
    reloaded.load(directory / "experts stepped")
    gathered = [t for b in reloaded.gather_weights(plan_buckets(reloaded.parameter_specs(), 4096)) for t in b.tensors]
    if rank == 0:
        names = [spec.name for spec in reloaded.parameter_specs()]
        save_file(dict(zip(names, gathered, strict=True)), directory / "experts gathered.safetensors")
    seen = {"refused": refused, "steps": steps, "resharded version": other.version}
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
