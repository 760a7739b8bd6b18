"""One of two ranks of TorchTitan workers: ``python -m tests.worker.titan_program DIRECTORY RANK WORLD_SIZE``."""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.worker.rank_program import error_of
from tests.worker.worker_cases import accumulate, make_batch, part_of, settings

warnings.filterwarnings("ignore", message=".torch.jit.script_method. is deprecated")  # torch itself, on this import
from inflight_fsdp.torchtitan import create_worker  # noqa: E402

LENGTHS = (9, 4, 17, 1, 6, 40)


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    options = {**settings(directory / "model"), "dtype": "float32", "wire_dtype": "float32", "betas": (0.8, 0.95)}
    refused = error_of(create_worker, {**options, "shard_size": 3})
    worker = create_worker({**options, "shard_size": 1})
    norms = []
    for seed in range(2):
        first, second = make_batch(LENGTHS, seed=seed), make_batch((5, 20), seed=seed + 100)
        mine = part_of(first, range(0, 2) if rank == 0 else range(2, 6))
        accumulate(worker, [mine, second if rank == 0 else part_of(second, range(0, 0))])
        norms.append(worker.step().gradient_norm)
    worker.save(directory / "saved")
    (directory / f"rank{rank}.json").write_text(json.dumps({"refused": refused, "norms": norms}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
