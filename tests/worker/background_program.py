"""One rank of saves in the background: ``python -m tests.worker.background_program DIRECTORY RANK WORLD_SIZE``.

Four ranks are two copies of two shards, two ranks share one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
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
    worker = create_worker(settings(directory / "model", shard_size=2, **ADAM))
    three_steps(worker, rank, world_size)
    worker.save(directory / "blocking")
    may_write, fsync = threading.Event(), os.fsync
    os.fsync = lambda descriptor: (may_write.wait(60), fsync(descriptor))[1]  # a slow disk
    worker.begin_save(directory / "background")
    steps = three_steps(worker, rank, world_size)  # its collectives, while the ranks' threads wait for theirs
    was_pending, was_there = worker.save_pending, (directory / "background").exists()
    may_write.set()
    worker.finish_save(60)
    os.fsync = fsync
    worker.save(directory / "trained on")
    worker.begin_save(directory / "model")  # which is not a checkpoint of a worker
    failure = error_of(worker.finish_save, 60)
    worker.load(directory / "background")
    again = three_steps(worker, rank, world_size)
    worker.begin_save(directory / "trained again")
    worker.close()
    seen = {"pending": was_pending, "there": was_there, "failure": failure, "steps": steps, "again": again}
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
