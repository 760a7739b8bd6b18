"""One of four ranks, two copies of two shards: ``python -m tests.worker.hybrid_program DIRECTORY RANK WORLD_SIZE``."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

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
    seen = {"refused": refused, "steps": steps, "resharded version": other.version}
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
