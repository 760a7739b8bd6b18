"""One rank of test_images.py: ``python -m tests.worker.image_program DIRECTORY RANK WORLD_SIZE``.

Rank 0 has the image of the first sequence and no more; rank 1 a micro-batch of text, and one with the other images.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from inflight_fsdp import create_worker
from tests.worker.image_cases import loss_of, packed, samples
from tests.worker.worker_cases import make_batch, settings


def main(directory: Path, rank: int, world_size: int) -> None:
    init = f"file://{directory / 'rendezvous'}"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size, timeout=timeout)
    worker = create_worker(settings(directory / "model"))
    made = samples(directory / "model")
    shares = [[made[:1], []], [made[1:2], made[2:]]]
    for chosen in shares[rank]:
        batch = packed(directory / "model", chosen) if chosen else make_batch((), 1)
        worker.backward(loss_of(worker.forward(batch), batch))
    worker.step()
    worker.save(directory / "two ranks")
    worker.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
