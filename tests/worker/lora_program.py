"""One rank of the cases in test_lora.py: ``python -m tests.worker.lora_program DIRECTORY RANK WORLD_SIZE``."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from inflight.types import MicroBatch
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.send.gathering import gather_only
from inflight_fsdp import FsdpLoraWorker, create_worker
from tests.worker.worker_cases import accumulate, make_batch, part_of, settings

LENGTHS = (9, 4, 17, 6)
LORA = {"rank": 3, "alpha": 6, "targets": ["q_proj", "v_proj", "down_proj"], "seed": 5}
"""A rank that two ranks cannot share evenly."""


def batches_of(seed: int, rank: int = 0, num_ranks: int = 1) -> list[MicroBatch]:
    """Whole segments of one batch, dealt out to the ranks."""
    batch = make_batch(LENGTHS, seed)
    return [part_of(batch, range(i, i + 1)) for i in range(len(LENGTHS)) if i % num_ranks == rank]


def train(worker: FsdpLoraWorker, *seeds: int) -> None:
    for seed in seeds:
        accumulate(worker, batches_of(seed, worker.rank, worker.world_size))
        worker.step()


def merged_weights(worker: FsdpLoraWorker) -> dict[str, torch.Tensor]:
    """The weights under the LoRA, as rank 0 publishes them; every rank calls this."""
    if worker.rank:
        gather_only(worker, 1000)
        return {}
    source = worker.merged(1000)
    specs = source.parameter_specs()
    found = [t.clone() for bucket in source.gather_weights(plan_buckets(specs, 5000)) for t in bucket.tensors]
    return {spec.name: tensor for spec, tensor in zip(specs, found, strict=True)}


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    worker = create_worker(settings(directory / "model", lora=LORA))
    assert isinstance(worker, FsdpLoraWorker)
    worker.save(directory / "ranks" / "fresh")
    train(worker, 1)
    worker.save(directory / "ranks" / "one")
    train(worker, 2)
    worker.begin_save(directory / "ranks" / "two")
    merged = merged_weights(worker)
    if rank == 0:
        save_file(merged, directory / "ranks" / "merged.safetensors")
    worker.finish_save(30.0)
    worker.load(directory / "alone" / "one")
    train(worker, 2)
    worker.save(directory / "ranks" / "two, resumed")
    worker.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
