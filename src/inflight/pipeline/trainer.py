"""One trainer rank as a process of its own: ``python -m inflight.pipeline.trainer FD``.

It takes requests from the run over a socket pair, drives a `TrainerWorker` through them, and answers. Every rank gets
the same requests and makes the same calls. It says what it begins to do, so that the run can tell what a rank was
doing when it died. It ends when the run does.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from inflight.contracts import BackgroundSaver, TrainerWorker
from inflight.errors import ConfigError, InflightError, NonFiniteError, PrecisionWarning
from inflight.losses import Metric, Metrics, Plan, PolicyLoss, add_metrics, encode_metrics, prepare
from inflight.pipeline.channel import WorkerChannel
from inflight.pipeline.config import RunConfig
from inflight.pipeline.messages import (
    Answer,
    Doing,
    Done,
    Failed,
    FinishSave,
    Members,
    Publish,
    Request,
    Save,
    Served,
    Start,
    Train,
    Trained,
    micro_batches_of,
)
from inflight.pipeline.publishing import Publishing, Pull, Push
from inflight.types import MicroBatch

_SAID_OF_OTHERS = ("gloo/transport", "NCCL")
"""Words of errors of collectives, which fail on each rank when one is gone."""


def collectives_backend(device: str) -> str:
    """Return torch's backend for the collectives of ranks that compute on a kind of device, ``cpu`` or ``cuda``.

    How weights travel to servers has no part in it. Counts and verdicts of the ranks are in host memory, on GPUs too.
    """
    return "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"


def blames_another_rank(error: Exception) -> bool:
    """Return whether an error says that another rank is gone, and not what is wrong on this one."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _SAID_OF_OTHERS)


def load_worker_factory(name: str) -> Callable[[Mapping[str, object]], TrainerWorker]:
    """Return the factory registered under ``inflight.workers``. Raises `ConfigError` with the known names."""
    found = {entry.name: entry for entry in entry_points(group="inflight.workers")}
    if name not in found:
        raise ConfigError(f"unknown worker {name!r}; installed: {', '.join(sorted(found)) or 'none'}")
    try:
        factory: Callable[[Mapping[str, object]], TrainerWorker] = found[name].load()
    except ImportError as error:
        raise ConfigError(f"worker {name!r} cannot be loaded: {error}; pip install 'inflight[{name}]'") from error
    return factory


class Trainer:
    """One rank with its model loaded and its servers connected. ``begin`` is told what it does next."""

    def __init__(self, start: Start, begin: Callable[[str], None]) -> None:
        config = start.config
        self._begin = begin
        torch.set_num_threads(config.train.threads)
        settings = _worker_settings(config)
        if int(os.environ["WORLD_SIZE"]) > 1:
            self._begin("the forming of the trainer's group")
            device = settings.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
            dist.init_process_group(
                collectives_backend(device),
                init_method=f"file://{os.environ['INFLIGHT_RENDEZVOUS']}",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
        self._begin("the loading of the model")
        factory = load_worker_factory(config.train.trainer)
        self._worker = factory(settings)
        self._saver = _saver(self._worker, config.train.trainer) if config.run.background_saves else None
        self._saving: int | None = None
        """Version whose save was begun, until the run was told that it has ended."""
        self._save_timeout_s = config.run.step_timeout_s
        self._loss = config.loss.policy_loss()
        self._reference = factory(settings) if "reference_logprobs" in self._loss.needs else None
        if start.checkpoint is not None:
            self._begin(f"the loading of {start.checkpoint}")
            self._worker.load(start.checkpoint)
        self._publishing: Publishing
        if config.servers.updates == "pull":
            self._publishing = Pull(config.servers, start.run_id, self._worker.rank)
        else:
            self._begin("the connecting to the servers")
            self._publishing = Push(config.servers, start.urls, start.run_id, self._worker.rank)

    def close(self) -> None:
        """Leave the weight group."""
        self._publishing.close()

    def answer(self, request: Request, tensors: Mapping[str, torch.Tensor]) -> Answer:
        """Do what the run asks for. After an error the rank is not to be asked again."""
        version = self._worker.version
        match request:
            case Start():  # loaded already
                return Done(version=version, served=self._publish(Members()))
            case Train():
                return self._train(request, micro_batches_of(request.segment_lengths, tensors))
            case Publish():
                return Done(version=version, served=self._publish(request.members))
            case Save():
                return Done(version=version, saved=self._save(request.path))
            case FinishSave():
                return Done(version=version, saved=self._finish_save(self._save_timeout_s))

    def _publish(self, members: Members) -> Served | None:
        self._begin(f"the publishing of version {self._worker.version}")
        return self._publishing.publish(self._worker, members)

    # --------------------------------------------------------------------------------------------- one optimizer step

    def _train(self, request: Train, batches: Sequence[MicroBatch]) -> Trained:
        """Forward and backward over the micro-batches, one optimizer step, and a publish if asked for."""
        started = time.time()
        number = f"step {self._worker.version + 1}"
        self._begin(f"the counting of {number}")
        batches, plan = planned(self._worker, self._loss, batches, request)
        metrics: Metrics = {}
        for batch in batches:
            metrics = add_metrics(metrics, self._forward_backward(batch, plan, number))
        self._begin(f"the optimizer's {number}")
        result = self._worker.step()
        if result.rounded_away is not None:
            metrics = add_metrics(metrics, {"rounded_away": Metric(result.rounded_away, 1.0)})
        trained = time.time()
        return Trained(
            version=result.version,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            metrics=encode_metrics(metrics),
            span=(started, trained),
            served=None if request.publish is None else self._publish(request.publish),
            saved=None if self._saver is None or self._saver.save_pending else self._finish_save(0.0),
        )

    def _forward_backward(self, batch: MicroBatch, plan: Plan, number: str) -> Metrics:
        self._begin(f"the forward of {number}")
        if self._reference is not None:
            with torch.no_grad():
                batch = replace(batch, reference_logprobs_T=self._reference.forward(batch))
        logprobs_T = self._worker.forward(batch)
        output = self._loss(batch, logprobs_T, plan)
        if not torch.isfinite(output.loss):
            raise NonFiniteError(f"the loss of {number} is {output.loss.item()}; the last checkpoint is whole")
        self._begin(f"the backward of {number}")
        self._worker.backward(output.loss)
        return output.metrics

    # ------------------------------------------------------------------------------------------------------- saving

    def _save(self, path: Path) -> int | None:
        """Write a checkpoint, or begin to once an earlier one stands; returns the version that stands now."""
        if self._saver is None:
            self._begin(f"the saving of version {self._worker.version}")
            self._worker.save(path)
            return self._worker.version
        ended = self._finish_save(self._save_timeout_s)
        self._begin(f"the copying of version {self._worker.version}")
        self._saver.begin_save(path)
        self._saving = self._worker.version
        return ended

    def _finish_save(self, timeout_s: float) -> int | None:
        """Wait until the save that was begun stands; returns its version, if there was one."""
        if self._saver is None or self._saving is None:
            return None
        self._begin(f"the saving of version {self._saving}")
        self._saver.finish_save(timeout_s)
        ended, self._saving = self._saving, None
        return ended


def planned(
    worker: TrainerWorker, loss: PolicyLoss, batches: Sequence[MicroBatch], step: Train
) -> tuple[Sequence[MicroBatch], Plan]:
    """Return the micro-batches with all that the loss needs of them, and what it needs of the whole step."""

    def sum_over_ranks(numbers: torch.Tensor) -> torch.Tensor:
        if worker.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    logprobs = None
    if "first_forward" in loss.needs:
        with torch.no_grad():
            logprobs = [worker.forward(batch) for batch in batches]
        batches = [
            replace(batch, proximal_logprobs_T=logprobs_T) for batch, logprobs_T in zip(batches, logprobs, strict=True)
        ]
    plan = prepare(
        loss,
        batches,
        trainer_logprobs=logprobs,
        current_version=worker.version,
        num_groups=step.num_groups,
        num_sequences=step.num_sequences,
        reduce=sum_over_ranks,
    )
    return batches, plan


def _worker_settings(config: RunConfig) -> dict[str, Any]:
    train = config.train
    return {
        "model_path": str(config.model.path),
        "dtype": config.model.dtype,
        "master_dtype": train.master_dtype,
        "wire_dtype": config.model.dtype,
        "learning_rate": train.learning_rate,
        "weight_decay": train.weight_decay,
        "max_gradient_norm": train.max_gradient_norm,
        "warmup_steps": train.warmup_steps,
        "schedule": train.schedule,
        "total_steps": config.run.num_steps,
        **train.trainer_options,
    }


def _saver(worker: TrainerWorker, name: str) -> BackgroundSaver:
    if not isinstance(worker, BackgroundSaver):
        raise ConfigError(
            f"run.background_saves is true, and worker {name!r} cannot save in the background: it is no "
            "inflight.BackgroundSaver"
        )
    return worker


def answer_requests(channel: WorkerChannel, told: list[str]) -> None:
    """Answer until the run ends, with what was ``told`` since the last answer, which is cleared.

    An error is told to the run and ends this; what is no `InflightError` is raised as well.
    """
    trainer: Trainer | None = None
    try:
        for request, tensors in channel.requests():
            trainer = trainer or Trainer(_first(request), lambda what: channel.send(Doing(what=what)))
            answer = trainer.answer(request, tensors)
            channel.send(answer.model_copy(update={"warnings": tuple(told)}))
            told.clear()
    except InflightError as error:
        channel.send(_failed(error, str(error), error.code))
    except Exception as error:
        channel.send(_failed(error, f"{type(error).__name__}: {error}", None))
        raise
    finally:
        if trainer is not None:
            trainer.close()


def _failed(error: Exception, message: str, code: str | None) -> Failed:
    blames = blames_another_rank(error)
    return Failed(code=code, message=message, traceback=traceback.format_exc(), blames_another_rank=blames)


def _first(request: Request) -> Start:
    assert isinstance(request, Start), "the first request says what to load"
    return request


def _show_warning(
    told: list[str],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write a warning to standard error, and add one of lost precision to what the run is told."""
    print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)
    if issubclass(category, PrecisionWarning):
        told.append(str(message))


def main() -> None:
    """Run one rank; ``argv[1]`` is the file descriptor of the channel. SIGINT is left to the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told: list[str] = []
    warnings.simplefilter("always", PrecisionWarning)
    warnings.showwarning = functools.partial(_show_warning, told)
    answer_requests(WorkerChannel(socket.socket(fileno=int(sys.argv[1]))), told)


if __name__ == "__main__":
    main()
