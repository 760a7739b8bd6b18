"""One rank that publishes what it holds: ``python -m tests.worker.sharded_program DIRECTORY RANK SIZE``.

``cases.json`` in the directory has cases by name. Rank 0 serves the weights itself, and writes for each version
whether the model that it serves equals what gathering gives, bit for bit. Every rank compares its weights during a
forward and a backward pass with those before.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inflight.base.worker_kinds import load_worker_kind
from inflight.contracts import ShardedWeightSource, TrainerWorker
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.send.gathering import gather_only
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.send.ranks import PartSender
from inflight.weights.transports import make_sender
from tests.weights.test_abandoned import Local
from tests.worker.worker_cases import accumulate, make_batch, settings

BUCKET_BYTES = 50_000


def sender_of(case: dict[str, Any], directory: Path, rank: int) -> Any:
    folder = directory / f"rank-{rank}" if case["transport"] == "file" else None
    return make_sender(case["transport"], directory=folder)


def run_case(name: str, case: dict[str, Any], directory: Path, rank: int) -> dict[str, Any]:
    plain = settings(Path(case["model"]), dtype="float32", wire_dtype="float32")
    worker: Any = load_worker_kind(case["worker"]).create(plain | case["settings"])
    assert isinstance(worker, ShardedWeightSource)
    seen: dict[str, Any] = {"is_sharded": bool(worker.shardings()), "equal": [], "sent": []}
    if worker.world_size == 1 or seen["is_sharded"]:
        seen["passes"] = read_during_passes(worker)
    if worker.world_size == 1:
        worker.close()
        return seen
    encoding = case.get("encoding", "raw")
    if rank:
        with PartSender(worker, sender_of(case, directory / name, rank)) as sender:
            for version in range(3):
                train(worker, version)
                sender.send(30.0)
                gather_only(worker, BUCKET_BYTES)
            if case.get("overlaps"):
                seen["overlap"] = train_during(worker, lambda: sender.send(30.0))
    else:
        local, other = Local(Path(case["model"])), Local(Path(case["model"]))
        own = sender_of(case, directory / name, rank)
        delta = case.get("delta", False)
        with (
            WeightPublisher(
                [local.endpoint], own, run_id=name, sharded=worker, encoding=encoding, delta=delta
            ) as publisher,
            WeightPublisher([other.endpoint], make_sender("shm"), run_id=name, encoding=encoding) as gathering,
        ):
            for version in range(3):
                train(worker, version)
                report = publish_weights(worker, publisher, bucket_bytes=BUCKET_BYTES, deadline_s=30.0)
                publish_weights(worker, gathering, bucket_bytes=BUCKET_BYTES, deadline_s=30.0)
                served, wanted = weights_of(local), weights_of(other)
                seen["equal"].append(all(torch.equal(served[key], value) for key, value in wanted.items()))
                seen["sent"].append(report.sent_bytes / report.size_bytes)
            if not case.get("overlaps"):
                worker.close()
                return seen
            before = {name: tensor.clone() for name, tensor in weights_of(local).items()}

            def publish() -> None:
                publish_weights(worker, publisher, bucket_bytes=BUCKET_BYTES, deadline_s=30.0)

            seen["overlap"] = train_during(worker, publish)
            served = weights_of(local)
            seen["overlap"]["is_as_before"] = all(torch.equal(served[name], it) for name, it in before.items())
    worker.close()
    return seen


def train_during(worker: Any, publish: Callable[[], None]) -> dict[str, Any]:
    """Run a forward and a backward, and begin a step, while a publish has read one part; return what waited."""
    parts, has_read, may_continue = worker._parameters.local, threading.Event(), threading.Event()

    def held(*arguments: Any) -> Iterator[Any]:
        for number, bucket in enumerate(parts(*arguments)):
            yield bucket
            if number == 0:
                has_read.set()
                assert may_continue.wait(60)

    worker._parameters.local = held
    meeting = dist.new_group(backend="gloo")  # the step communicates in the default group meanwhile
    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(publish)
        assert has_read.wait(60)
        accumulate(worker, [make_batch((9, 4, 17), 8)])
        stepping = pool.submit(worker.step)
        dist.barrier(meeting)
        is_waiting = not wait([stepping], timeout=0.3).done
        dist.barrier(meeting)
        may_continue.set()
        publishing.result(60)
        stepped = stepping.result(60).version
    worker._parameters.local = parts
    return {"is_waiting": is_waiting, "version": stepped}


def read_during_passes(worker: Any) -> dict[str, bool]:
    """Read all weights before each module's forward and backward; return whether they were always those from before."""
    plan = plan_buckets(worker.parameter_specs(), BUCKET_BYTES)
    read = worker.gather_weights if worker.world_size == 1 else worker.local_weights
    before = [tensor.clone() for bucket in read(plan) for tensor in bucket.tensors]
    are_equal: dict[str, list[bool]] = {"forward": [], "backward": []}

    def compare(when: str) -> None:
        found = [tensor.clone() for bucket in read(plan) for tensor in bucket.tensors]
        are_equal[when].append(all(torch.equal(*it) for it in zip(before, found, strict=True)))

    def watch(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        compare("forward")
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: compare("backward"))

    hook = torch.nn.modules.module.register_module_forward_hook(watch)
    accumulate(worker, [make_batch((9, 4, 17), 8)])
    hook.remove()
    return {when: len(found) > 5 and all(found) for when, found in are_equal.items()}


def weights_of(local: Local) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = local.endpoint._engine.weights.by_name
    return found


def train(worker: TrainerWorker, version: int) -> None:
    if version:
        batch = make_batch((9, 4, 17), version)
        accumulate(worker, [batch])
        worker.step()


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    # Torch itself, of its compiler, which TorchTitan and DeepSpeed import; Megatron-Core's advice for CUDA.
    for message in (".torch.jit.script_method. is deprecated", "When using async grad allreduce"):
        warnings.filterwarnings("ignore", message=message)
    store = dist.FileStore(str(directory / f"store{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    cases = json.loads((directory / "cases.json").read_text())
    seen = {name: run_case(name, case, directory, rank) for name, case in cases.items()}
    (directory / f"seen{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
