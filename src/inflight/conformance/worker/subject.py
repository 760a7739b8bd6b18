"""One rank of a worker under check: creates workers, exchanges values with other ranks, and records measurements.

The target's kind creates every worker from ``model_path`` and the options on the command line.
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
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from inflight.base.worker_kinds import load_worker_kind
from inflight.conformance.checks import CheckSkipped, require, skip
from inflight.conformance.judge import Hung
from inflight.conformance.models import Family, lower_logits, make_seeing_model, make_tiny_model
from inflight.conformance.targets import WorkerTarget
from inflight.conformance.worker.ranks import Ranks
from inflight.conformance.worker.thread import CheckThread
from inflight.conformance.worker.tolerances import Tolerance, tolerance_of
from inflight.contracts import ImageWorker, TrainerWorker
from inflight.contracts.trainer import DataRanks, data_ranks_of
from inflight.errors import ConfigError, UnsupportedError

VOCAB_SIZE = 259
"""The size is odd, so that ranks cannot have equal numbers of rows."""
_GROUP_TIMEOUT = timedelta(seconds=300)
"""This is longer than any check may take, because the deadlines of checks show which rank hangs."""
_MODEL_TIMEOUT_S = 60.0
_ONE_RANK = "it needs several ranks, and there is only one"


class WorkerSubject:
    """Implements `inflight.conformance.judge.Subject` for a worker. Every rank makes the same calls in the same
    order."""

    def __init__(self, target: WorkerTarget, directory: Path, ranks: Ranks) -> None:
        self.target = target
        self.directory = directory
        self.ranks = ranks
        self.evidence: dict[str, Any] = {}
        """If several ranks note the same name, the lowest rank's value is kept."""
        self.facts: Mapping[str, Any] = {}
        self.reports_images = False
        """Whether the worker is an `ImageWorker`, regardless of its model."""
        self._share = DataRanks(0, 1)
        self._thread = CheckThread()

    @classmethod
    def open(cls, target: WorkerTarget, directory: Path, *, rank: int, num_ranks: int, session: int) -> WorkerSubject:
        """Join the ranks of a session through files in ``directory``. Errors raised while creating a worker
        propagate."""
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        store = dist.FileStore(str(directory / f"store-{session}"), num_ranks)  # type: ignore[attr-defined]
        exchange_store = dist.FileStore(str(directory / f"exchange-{session}"), num_ranks)  # type: ignore[attr-defined]
        return cls.join(target, directory, store=store, exchange_store=exchange_store, rank=rank, num_ranks=num_ranks)

    @classmethod
    def join(
        cls, target: WorkerTarget, directory: Path, *, store: Any, exchange_store: Any, rank: int, num_ranks: int
    ) -> WorkerSubject:
        """Form torch's default group over ``store``; values are exchanged over ``exchange_store``.

        Errors raised while creating a worker propagate.
        """
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_GROUP_TIMEOUT)
        subject = cls(target, directory, Ranks(exchange_store, rank, num_ranks))
        subject._thread.call(subject._begin, _GROUP_TIMEOUT.total_seconds(), lambda: None)
        return subject

    def _begin(self) -> None:
        torch.set_num_threads(1)  # of this thread: sums have a fixed order, and ranks do not compete for cores
        worker = self.create()
        self._share = data_ranks_of(worker)
        self.reports_images = isinstance(worker, ImageWorker)
        self.facts = {
            "implementation": f"{type(worker).__module__}.{type(worker).__qualname__}",
            "implementation_version": _version_of(type(worker)),
            "capabilities": {},
            "flags": self.target.flags,
        }
        del worker
        gc.collect()
        gc.freeze()  # otherwise, each collection before a check would traverse everything imported

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.num_ranks

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's share of the data. Several ranks may compute one share together."""
        return self._share.rank

    @property
    def data_size(self) -> int:
        return self._share.size

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.target.options)

    def note(self, **measured: Any) -> None:
        self.evidence |= measured

    def missing(self, needs: tuple[str, ...]) -> str | None:
        return _ONE_RANK if "ranks" in needs and self.world_size == 1 else None

    def prepare(self) -> None:
        """Drop the workers of the previous check."""
        self.ranks.begin_check()
        gc.collect()

    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        """Call a check's function; if it fails, notify the ranks that are waiting for this one."""
        try:
            self._thread.call(lambda: function(self), deadline_s, self.ranks.abandoned_by_other)
        except CheckSkipped as reason:
            self.ranks.abandon(f"skipped: {reason}")
            raise
        except Hung:
            raise
        except Exception as error:
            self.ranks.abandon(f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        self._thread.end()
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def create(self, *, model: Path | None = None, tied: bool = False, **more: object) -> TrainerWorker:
        """Return a new worker for ``model`` or the kit's tiny model, with additional options. All ranks call this."""
        path = model if model is not None else self.model(tied=tied)
        options = self.target.options if self.world_size == 1 else self.target.options | self.target.options_of_ranks
        return load_worker_kind(self.target.factory).create({"model_path": str(path), **options, **more})

    def create_or_skip(self, model: Path, what: str) -> TrainerWorker:
        """Return a new worker for ``model``. Skips the check, naming ``what``, if the model is not supported."""
        try:
            return self.create(model=model)
        except (UnsupportedError, ConfigError) as error:
            skip(f"it accepts no {what}: {error}")

    def model(self, *, tied: bool = False) -> Path:
        """Return the kit's tiny float32 checkpoint, which is created once."""
        return self.large_model("tied" if tied else "untied", hidden_size=32, num_layers=2, tied=tied)

    def large_model(
        self, name: str, *, hidden_size: int, num_layers: int, vocab_size: int = VOCAB_SIZE, tied: bool = False
    ) -> Path:
        """Return the kit's checkpoint of this size, which rank 0 creates once while the other ranks wait."""
        size: dict[str, Any] = {"hidden_size": hidden_size, "num_layers": num_layers, "vocab_size": vocab_size}
        family: Family = "qwen3_moe" if self.target.experts else "qwen3"
        return self._made_once(
            name, lambda path: make_tiny_model(path, family=family, tied=tied, tokenizer=False, **size)
        )

    def steep_model(self, steepness: float) -> Path:
        """Return the kit's untied checkpoint with logits multiplied by this factor, which rank 0 creates once."""

        def change(weights: dict[str, torch.Tensor]) -> None:
            weights["model.norm.weight"] *= steepness

        return self._changed_model("steep", change)

    def low_model(self, depth: float) -> Path:
        """Return an untied checkpoint whose logits are all far below 0, by about ``depth``, which rank 0 creates
        once."""

        return self._changed_model("low", partial(lower_logits, depth=depth))

    def _changed_model(self, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        """Return the kit's untied checkpoint after a change to its weights, which rank 0 creates once."""
        source = self.model()

        def make(path: Path) -> None:
            shutil.copytree(source, path)
            weights = load_file(source / "model.safetensors")
            change(weights)
            save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

        return self._made_once(name, make)

    def seeing_model(self) -> Path:
        """Return the kit's checkpoint of a model that accepts images, which rank 0 creates once."""
        return self._made_once("seeing", make_seeing_model)

    def mixture(self) -> Path:
        """Return the kit's mixture of experts, which rank 0 creates once."""
        return self._made_once("mixture", lambda path: make_tiny_model(path, family="qwen3_moe", tokenizer=False))

    def _made_once(self, name: str, make: Callable[[Path], object]) -> Path:
        path = self.directory / f"model-{name}"
        if self.rank == 0 and not path.exists():
            fresh = path.with_name(f".{path.name}.new")
            make(fresh)
            fresh.rename(path)
        deadline = time.monotonic() + _MODEL_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 did not create {path} in {_MODEL_TIMEOUT_S:g} s")
            time.sleep(0.01)
        return path

    def require_on_all_ranks(self, holds: object, message: str) -> None:
        """Fail the check on every rank unless ``holds`` is true on all of them, so that no rank continues alone. All
        ranks call this."""
        problems = self.ranks.exchange("" if holds else message)
        for rank, problem in enumerate(problems):
            require(not problem, problem if rank == self.rank else f"on rank {rank}: {problem}")

    def compare_norm(self, worker: TrainerWorker, expected: float, what: str) -> float:
        """Take a step, and fail unless it reports the expected gradient norm; return the norm. All ranks call this."""
        found = worker.step().gradient_norm
        self.note(**{f"gradient_norm ({what})": found, f"expected ({what})": expected})
        self.require_on_all_ranks(
            abs(found - expected) <= self.tolerance.gradient * expected,
            f"{what}: the gradient norm is {found:.6g}, {found / expected:.4g} times the {expected:.6g} of autograd",
        )
        return found

    def skip_on_one_rank(self) -> None:
        if self.world_size == 1:
            skip(_ONE_RANK)

    def fresh_path(self, name: str) -> Path:
        """Return an unused path, the same on every rank. All ranks call this."""
        path = self.directory / name
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self.ranks.wait_for_all()
        return path


def _version_of(kind: type) -> str:
    """Return the version of the package that defines a class, as the package or its metadata reports it."""
    package = kind.__module__.partition(".")[0]
    if said := getattr(sys.modules[package], "__version__", None):
        return str(said)
    with suppress(PackageNotFoundError, KeyError):
        return version(packages_distributions()[package][0])
    return ""
