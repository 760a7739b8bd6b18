"""One rank of workers in several layouts: ``python -m tests.worker.layout_program DIRECTORY RANK WORLD_SIZE``.

``layouts.json`` in the directory indicates which: by name, the worker's options and its model. Each layout's directory
gets ``rank{RANK}.json`` and checkpoints: ``gradients`` after a step in which the first moment is the gradient,
``stepped`` after two steps of Adam, ``gathered.safetensors`` then, and ``resumed`` after a step from the checkpoint of
one rank.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from inflight.base.worker_kinds import load_worker_kind
from inflight.contracts.trainer import data_ranks_of
from inflight.types import MicroBatch
from inflight.weights.encode.buckets import plan_buckets
from inflight_fsdp.sharded import ShardedWorker
from tests.worker.worker_cases import (
    accumulate,
    make_batch,
    make_tree,
    part_of,
    policy_loss,
    settings,
    shared_and_separate,
)

LENGTHS = (9, 4, 17, 1, 6, 40)
ADAM = {"betas": (0.8, 0.95), "max_gradient_norm": 0.5, "weight_decay": 0.1, "learning_rate": 0.01}


def factory(name: str) -> Callable[[Mapping[str, object]], ShardedWorker]:
    """Return what makes workers; TorchTitan and Megatron-Core take seconds to import."""
    # torch itself, when TorchTitan is imported; Megatron-Core's advice for CUDA.
    for message in (".torch.jit.script_method. is deprecated", "When using async grad allreduce"):
        warnings.filterwarnings("ignore", message=message)
    return cast(Callable[[Mapping[str, object]], ShardedWorker], load_worker_kind(name).create)


def shares(seed: int, size: int) -> list[list[MicroBatch]]:
    """The two micro-batches of each share of the data; the last share has nothing in the second."""
    whole, second = make_batch(LENGTHS, seed), make_batch((5, 20), seed + 100)
    cuts = [len(LENGTHS) * i // size for i in range(size + 1)]
    parts = [part_of(whole, range(start, stop)) for start, stop in itertools.pairwise(cuts)]
    return [[part, second if i == 0 else part_of(second, range(0, 0))] for i, part in enumerate(parts)]


def run_layout(directory: Path, layout: Mapping[str, Any], model: Path, one_rank: Path | None) -> dict[str, Any]:
    """Run one layout; ``one_rank`` has what one rank made of the same."""
    plain = {**settings(model), "dtype": "float32", "wire_dtype": "float32"}
    create = factory(layout["worker"])
    worker = create({**plain, **layout["options"]})
    share = data_ranks_of(worker)
    mine = shares(1, share.size)[share.rank]
    seen: dict[str, Any] = {"data_ranks": list(share)}
    seen["whole"] = worker.forward(make_batch(LENGTHS, 1)).detach().tolist()
    first, second = (policy_loss(worker.forward(batch), batch) for batch in mine)
    worker.backward(first)
    worker.backward(second)
    seen["gradient_norm"] = worker.step().gradient_norm
    worker.save(directory / "gradients")
    worker.exchange(b"", 60.0)
    worker.close()
    num_threads = [_num_threads()]
    worker = create({**plain, **ADAM, **layout["options"]})
    seen["norms"] = []
    for seed in (2, 3):
        accumulate(worker, shares(seed, share.size)[share.rank])
        seen["norms"].append(worker.step().gradient_norm)
    worker.begin_save(directory / "stepped")
    worker.finish_save(60.0)
    gathered = [t for b in worker.gather_weights(plan_buckets(worker.parameter_specs(), 4096)) for t in b.tensors]
    if worker.rank == 0:
        names = [spec.name for spec in worker.parameter_specs()]
        save_file(dict(zip(names, gathered, strict=True)), directory / "gathered.safetensors")
    worker.load((one_rank or directory) / "stepped")
    accumulate(worker, shares(4, share.size)[share.rank])
    worker.step()
    worker.save(directory / "resumed")
    tree = make_tree(5)
    seen["shared"], seen["shared gradient"], seen["separate gradient"] = shared_and_separate(worker, tree)
    worker.exchange(b"", 60.0)
    worker.close()
    seen["num_threads"] = [*num_threads, _num_threads()]
    return seen


def _num_threads() -> int:
    """Return the number of threads of this process. A gloo process group has three."""
    return len(os.listdir("/proc/self/task"))


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    assert "megatron" not in sys.modules, "it is to be imported when a worker of its kind is made"
    store = dist.FileStore(str(directory / f"store{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=100))
    for name, layout in json.loads((directory / "layouts.json").read_text()).items():
        if layout["ranks"] != world_size:
            continue
        path = directory / name
        path.mkdir(exist_ok=True)
        one_rank = None if world_size == 1 else directory / f"one rank, {layout['model']}"
        seen = run_layout(path, layout, directory / "models" / layout["model"], one_rank)
        (path / f"rank{rank}.json").write_text(json.dumps(seen))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
