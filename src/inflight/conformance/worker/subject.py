"""One rank of a worker under check: makes workers, lets ranks talk to each other, and keeps what was measured.

Knows no check. Every worker is made by the target's factory from ``model_path`` and the options of the command line.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inflight.conformance.checks import CheckSkipped, require
from inflight.conformance.judge import Hung
from inflight.conformance.models import make_tiny_model
from inflight.conformance.targets import WorkerTarget
from inflight.conformance.worker.ranks import Ranks, Store
from inflight.conformance.worker.thread import CheckThread
from inflight.conformance.worker.tolerances import Tolerance, tolerance_of
from inflight.contracts import TrainerWorker
from inflight.engines.factories import resolve

VOCAB_SIZE = 259
"""Odd, so that its rows cannot be shared out evenly."""
SEVERAL_RANKS = "several ranks"
_GROUP_TIMEOUT = timedelta(seconds=300)
"""Longer than any check may take: which rank hangs is found out otherwise."""
_MODEL_TIMEOUT_S = 60.0


class WorkerSubject:
    """See `inflight.conformance.judge.Subject`. Every rank makes the same calls in the same order."""

    def __init__(self, target: WorkerTarget, directory: Path, ranks: Ranks) -> None:
        self.target = target
        self.directory = directory
        self.ranks = ranks
        self.evidence: dict[str, Any] = {}
        """Of what several ranks note, that of the lowest is kept."""
        self.facts: Mapping[str, Any] = {}
        self._thread = CheckThread()

    @classmethod
    def open(cls, target: WorkerTarget, directory: Path, *, rank: int, num_ranks: int, session: int) -> WorkerSubject:
        """Join the ranks of a session through files in ``directory``, and see that a worker can be made."""
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        store = dist.FileStore(str(directory / f"store-{session}"), num_ranks)  # type: ignore[attr-defined]
        talk = dist.FileStore(str(directory / f"talk-{session}"), num_ranks)  # type: ignore[attr-defined]
        return cls.join(target, directory, store=store, talk=talk, rank=rank, num_ranks=num_ranks)

    @classmethod
    def join(
        cls, target: WorkerTarget, directory: Path, *, store: Any, talk: Store, rank: int, num_ranks: int
    ) -> WorkerSubject:
        """Form torch's default group over ``store``, talk over ``talk``, and see that a worker can be made."""
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_GROUP_TIMEOUT)
        subject = cls(target, directory, Ranks(talk, rank, num_ranks))
        subject._thread.call(subject._begin, _GROUP_TIMEOUT.total_seconds(), lambda: None)
        return subject

    def _begin(self) -> None:
        torch.set_num_threads(1)  # a thread's own; sums in one order, and ranks that do not take each other's cores
        worker = self.create()
        self.facts = {
            "implementation": f"{type(worker).__module__}.{type(worker).__qualname__}",
            "implementation_version": _version_of(type(worker)),
            "capabilities": {},
            "flags": {**{k: str(v) for k, v in self.target.options.items()}, "ranks": str(self.target.num_ranks)},
        }

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in this session."""
        return self.ranks.num_ranks

    @property
    def tolerance(self) -> Tolerance:
        """What counts as equal."""
        return tolerance_of(self.target.options)

    def note(self, **measured: Any) -> None:
        """Keep measured values as evidence."""
        self.evidence |= measured

    def missing(self, needs: tuple[str, ...]) -> str | None:
        """See `inflight.conformance.judge.Subject.missing`."""
        if SEVERAL_RANKS in needs and self.world_size == 1:
            return "it speaks of several ranks, and there is one"
        return None

    def prepare(self) -> None:
        """Forget the workers of the check before."""
        self.ranks.turn_the_page()
        gc.collect()

    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        """See `inflight.conformance.judge.Subject.call`. A rank that fails says so to those that wait for it."""
        try:
            self._thread.call(lambda: function(self), deadline_s, self.ranks.given_up)
        except CheckSkipped as reason:
            self.ranks.give_up(f"skipped: {reason}")
            raise
        except Hung:
            raise
        except Exception as error:
            self.ranks.give_up(f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Leave the group."""
        self._thread.end()
        with suppress(RuntimeError):
            dist.destroy_process_group()

    # -------------------------------------------------------------------------------------------------- for the checks

    def create(self, *, model: Path | None = None, tied: bool = False) -> TrainerWorker:
        """Return a new worker on ``model``, or on the kit's tiny model; every rank calls this."""
        path = model if model is not None else self.model(tied=tied)
        worker: TrainerWorker = resolve(self.target.factory)({"model_path": str(path), **self.target.options})
        return worker

    def model(self, *, tied: bool = False) -> Path:
        """Return the kit's tiny float32 checkpoint, made once."""
        return self.large_model("tied" if tied else "untied", hidden_size=32, num_layers=2, tied=tied)

    def large_model(self, name: str, *, hidden_size: int, num_layers: int, tied: bool = False) -> Path:
        """Return a checkpoint of the kit of this size; rank 0 makes it, once, and the others wait until it is there."""
        path = self.directory / f"model-{name}"
        if self.rank == 0 and not path.exists():
            fresh = path.with_name(f".{path.name}.new")
            make_tiny_model(
                fresh,
                tied=tied,
                hidden_size=hidden_size,
                num_layers=num_layers,
                vocab_size=VOCAB_SIZE,
                tokenizer=False,
            )
            fresh.rename(path)
        deadline = time.monotonic() + _MODEL_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 did not make {path} in {_MODEL_TIMEOUT_S:g} s")
            time.sleep(0.01)
        return path

    def require_on_all_ranks(self, holds: object, message: str) -> None:
        """Fail the check on every rank unless ``holds`` on all of them, so that none goes on alone; all call this."""
        problems = self.ranks.exchange("" if holds else message)
        for rank, problem in enumerate(problems):
            require(not problem, problem if rank == self.rank else f"on rank {rank}: {problem}")

    def fresh_path(self, name: str) -> Path:
        """Return a path where nothing is; every rank calls this, and gets the same."""
        path = self.directory / name
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self.ranks.meet()
        return path


def _version_of(kind: type) -> str:
    """Return the version of the package that a class comes from, as it says itself or as it was installed."""
    package = kind.__module__.partition(".")[0]
    if said := getattr(sys.modules[package], "__version__", None):
        return str(said)
    with suppress(PackageNotFoundError, KeyError):
        return version(packages_distributions()[package][0])
    return ""
