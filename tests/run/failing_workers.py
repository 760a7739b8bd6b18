"""Workers whose last rank fails in its second backward, each in another way; found as an entry point by the tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from inflight.contracts import TrainerWorker, WorkerKind
from inflight.errors import TrainerError
from inflight_fsdp import FSDP, FsdpWorker, WorkerConfig
from inflight_fsdp.config import parse_config
from inflight_fsdp.sharded import make_worker


def raise_an_error() -> None:
    raise TrainerError("the worker of the test fails on purpose")


def raise_what_nobody_expects() -> None:
    raise ZeroDivisionError("the worker of the test fails on purpose")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still() -> None:
    time.sleep(3600)


WAYS = {way.__name__: way for way in (raise_an_error, raise_what_nobody_expects, be_killed, stand_still)}


class FailingWorker(FsdpWorker):
    """Fails on the last rank in the backward of its second step; the other ranks wait for it, also when it is gone."""

    fail: Callable[[], None]

    def backward(self, loss: torch.Tensor) -> None:
        if self.version == 1 and self.rank == self.world_size - 1:
            self.fail()
        super().backward(loss)


class DeafWorker(FailingWorker):
    """The other ranks do not notice that one is gone, as in a collective of NCCL."""

    def backward(self, loss: torch.Tensor) -> None:
        if self.version == 1 and self.rank != self.world_size - 1:
            time.sleep(3600)
        super().backward(loss)


class FailingKind(WorkerKind):
    def create(self, settings: Mapping[str, object]) -> FailingWorker:
        others = dict(settings)
        kind = DeafWorker if others.pop("deaf", False) else FailingWorker
        fail = WAYS[str(others.pop("way"))]
        worker = make_worker(kind, parse_config(others, WorkerConfig))
        worker.fail = fail  # type: ignore[method-assign]
        return worker


class KindOfTheFirstRank(WorkerKind):
    """Fails on rank 1 before any collective: rank 0 waits for it in one."""

    def create(self, settings: Mapping[str, object]) -> TrainerWorker:
        if dist.get_rank() == 1:
            raise TrainerError("the worker of the test cannot be made on this rank")
        return FSDP.create(settings)


FAILING, ON_THE_FIRST_RANK = FailingKind(), KindOfTheFirstRank()


def register(directory: Path) -> dict[str, str]:
    """Write the entry points to a directory; return the environment in which they are found."""
    package = directory / "failing_worker-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-worker\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        f"[inflight.workers]\nfailing = {__name__}:FAILING\nfirst-rank-only = {__name__}:ON_THE_FIRST_RANK\n"
    )
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": os.pathsep.join(map(str, (root / "src", root, directory)))}
