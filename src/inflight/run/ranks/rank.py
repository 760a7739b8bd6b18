"""One trainer rank in its own process: ``python -m inflight.run.ranks.rank``, configured by environment variables.

A rank connects to the run, executes the run's requests on a `TrainerWorker`, and answers them. Every rank receives the
same requests and makes the same calls. A rank reports each activity at its start, so that the run knows what the rank
was doing if it dies. A rank ends when the run ends.
"""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inflight.base.addresses import host_and_port
from inflight.base.clock import unix_time
from inflight.base.progress import report_log_records
from inflight.base.threads import start_in_thread
from inflight.base.worker_kinds import load_worker_kind
from inflight.contracts import (
    AdjustableWorker,
    BackgroundSaver,
    ImageWorker,
    LoraSource,
    PrefixSharingWorker,
    ReplayingWorker,
    TargetScoringWorker,
    TrainerWorker,
)
from inflight.contracts.trainer import data_ranks_of
from inflight.errors import ConfigError, InflightError, NonFiniteError, PrecisionWarning, UnsupportedError
from inflight.http.tokens import TOKEN_VARIABLE
from inflight.launchers.launcher import ADDRESS_VARIABLE
from inflight.losses import LossOutput, LossPlan, Metric, Metrics, PolicyLoss, add_metrics, encode_metrics, prepare
from inflight.run.machines.time_limits import time_limits
from inflight.run.ranks.channel import WorkerChannel
from inflight.run.ranks.handshake import RUN_VARIABLE, meet_run, set_collective_interface
from inflight.run.ranks.hosted import HostedRank
from inflight.run.ranks.messages import (
    Accumulate,
    Done,
    Failed,
    FinishSave,
    Here,
    Load,
    Members,
    OptimizerStep,
    PublishAs,
    PublishPresent,
    PublishResult,
    RankAnswer,
    Ready,
    Request,
    Save,
    Start,
    StatusMessage,
    Train,
    Trained,
    micro_batches_of,
)
from inflight.run.ranks.publishing import Publishing, publishing_of
from inflight.run.ranks.workers import teacher_settings, worker_settings
from inflight.types import MicroBatch
from inflight.weights.transports.membership import host_store

_MEET_S = 300.0
"""How long rank 0's store waits for entries of the other ranks."""
Dist: Any = dist  # torch's type stubs lack the stores
_SAID_OF_OTHERS = ("gloo/transport", "NCCL")
"""Fragments of error messages from collectives, which fail on every rank when one rank ends."""


def collectives_backend(device: str) -> str:
    """Return the torch backend for collectives of ranks on ``cpu`` or ``cuda``.

    It does not depend on the transport of weights. Ranks exchange counts in host memory even when they compute on GPUs.
    """
    return "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"


def blames_another_rank(error: Exception) -> bool:
    """Return whether an error merely reports that another rank has failed."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _SAID_OF_OTHERS)


class TrainerRank:
    """One rank with its model loaded and its servers connected. It calls ``begin`` with each new activity."""

    def __init__(self, start: Start, begin: Callable[[str], None], hosted: Any) -> None:
        config = start.config
        self._report = begin
        self._overlaps = config.updates.overlap
        self._overlapped: Future[PublishResult | None] | None = None
        """The publish of the current version that runs in a thread, until an answer carries its result."""
        torch.set_num_threads(config.train.threads)
        settings = worker_settings(config)
        limits = time_limits(config)
        if int(os.environ["WORLD_SIZE"]) > 1:
            self._begin("forming the trainer's process group")
            device = settings.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
            timeout = timedelta(seconds=limits.collective_s)
            host, _, port = start.rendezvous.rpartition(":")
            dist.init_process_group(
                collectives_backend(device),
                store=hosted or Dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout),
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=timeout,
            )
        self._begin("loading the model")
        name = config.train.trainer
        kind = load_worker_kind(name)
        self._worker = kind.create(settings)
        if config.train.lora is not None and not isinstance(self._worker, LoraSource):
            raise ConfigError(f"train.lora is set, but worker {name!r} cannot train a LoRA: it is not a LoraSource")
        if config.train.router_replay and not (
            isinstance(self._worker, ReplayingWorker) and self._worker.replays_routing
        ):
            raise ConfigError(
                f"train.router_replay is true, but worker {name!r} does not replay the experts of this model: the "
                "model must be a mixture of experts, trained with the trainer 'fsdp' without compile"
            )
        self._saver: BackgroundSaver | None = None
        if config.run.background_saves:
            if not isinstance(self._worker, BackgroundSaver):
                raise ConfigError(
                    f"run.background_saves is true, but worker {name!r} cannot save in the background: it is not "
                    "an inflight.BackgroundSaver"
                )
            self._saver = self._worker
        self._saving: int | None = None
        """The version that is being saved, until the run has been notified of its completion."""
        self._save_timeout_s = limits.save_s
        self._loss = config.loss.policy_loss()
        self._reference = kind.create(settings) if "reference_logprobs" in self._loss.needs else None
        self._teachers = [None if it is None else kind.create(it) for it in teacher_settings(config)]
        worker = self._worker
        if "teacher_top" in self._loss.needs and not (
            isinstance(worker, TargetScoringWorker) and worker.scores_target_ids
        ):
            raise ConfigError(
                f"the loss needs the teachers' most likely tokens, but worker {name!r} can score only the tokens of "
                "the batch: choose a loss such as 'opd'"
            )
        if start.checkpoint is not None:
            self._begin(f"loading {start.checkpoint}")
            self._worker.load(start.checkpoint)
        self._publish_s = limits.publish_s
        self._hosted = HostedRank(self._worker, start, limits.publish_s, begin)
        self._shares_memory = config.servers.release_memory
        self._publishing: Publishing | None = None
        """None if versions are not published to servers of the run."""
        if start.members is not None:
            self._begin("connecting to the servers")
            self._publishing = publishing_of(self._worker, start, limits.publish_s)

    def close(self) -> None:
        """Disconnect from the servers once a publish that runs in a thread has ended or its deadline has passed."""
        if self._overlapped is not None:
            wait([self._overlapped], self._publish_s)
        self._hosted.close()
        if self._publishing is not None:
            self._publishing.close()

    def _begin(self, what: str) -> None:
        is_publishing = self._overlapped is not None and not self._overlapped.done()
        self._report(f"{what} and publishing version {self._worker.version}" if is_publishing else what)

    def answer(self, request: Request, tensors: Mapping[str, torch.Tensor]) -> RankAnswer:
        """Execute a request of the run. After an error, the rank must not receive further requests."""
        answer = self._answer(request, tensors)
        if self._shares_memory:
            torch.cuda.empty_cache()  # otherwise torch keeps freed memory that the servers now need
        return answer

    def _answer(self, request: Request, tensors: Mapping[str, torch.Tensor]) -> RankAnswer:
        version = self._worker.version
        match request:
            case Start():  # the model is loaded already
                data_rank = data_ranks_of(self._worker).rank
                published = None if request.members is None else self._publish(request.members)
                worker = self._worker
                return Ready(
                    version=version,
                    published=published,
                    data_rank=data_rank,
                    shares_prefixes=isinstance(worker, PrefixSharingWorker) and worker.shares_prefixes,
                    takes_step_settings=isinstance(worker, AdjustableWorker) and worker.takes_step_settings,
                    scores_target_ids=isinstance(worker, TargetScoringWorker) and worker.scores_target_ids,
                )
            case Accumulate() | OptimizerStep() | Load() | PublishAs():
                return self._hosted.answer(request, tensors)
            case PublishPresent():
                is_pending = self._overlapped is not None
                published = self._take_published() if is_pending else self._publish(request.members)
                return Done(version=version, published=published)
            case Train():
                return self._train(request, micro_batches_of(request.segment_lengths, tensors))
            case Save():
                return Done(version=version, saved=self._save(request.path))
            case FinishSave():
                return Done(version=version, saved=self._finish_save(self._save_timeout_s))

    def _publish(self, members: Members) -> PublishResult | None:
        assert self._publishing is not None
        self._begin(f"publishing version {self._worker.version}")
        return self._publishing.publish(self._worker, members)

    def _start_publish(self, members: Members) -> None:
        """Publish in a thread. The weights must not change until `_wait_for_publish` has returned."""
        assert self._publishing is not None
        publish = partial(self._publishing.publish, self._worker, members)
        self._overlapped = start_in_thread(publish, f"inflight-publish-{self._worker.version}")

    def _wait_for_publish(self) -> PublishResult | None:
        """Return the result of the publish that runs in a thread, if any, once it has ended. Raises its error."""
        if self._overlapped is None:
            return None
        if not self._overlapped.done():
            self._report(f"publishing version {self._worker.version}")
        return self._overlapped.result()  # it ends at its deadline

    def _take_published(self) -> PublishResult | None:
        """Return what `_wait_for_publish` returns, and forget it."""
        published, self._overlapped = self._wait_for_publish(), None
        return published

    # --------------------------------------------------------------------------------------------- one optimizer step

    def _train(self, request: Train, batches: Sequence[MicroBatch]) -> Trained:
        """Run forward and backward passes over the micro-batches, take one optimizer step, and publish if requested.

        If publishes overlap training, the new version is published in a thread, and the answer contains the result of
        the previous version's publish, which ends before the optimizer changes the weights.
        """
        started = unix_time()
        number = f"step {self._worker.version + 1}"
        self._begin(f"counting the targets of {number}")
        if any(batch.image_rows_M is not None for batch in batches):
            self._refuse_unless_images()
        batches = [self._with_untrained(batch) for batch in batches]
        batches, plan = prepare_step(self._worker, self._loss, batches, request)
        metrics: Metrics = {}
        logprobs: list[torch.Tensor] = []
        for batch in batches:
            output, logprobs_T = self._forward_backward(batch, plan, number)
            metrics = add_metrics(metrics, output.metrics)
            if request.returns_logprobs:
                logprobs.append(logprobs_T.detach())
        published = self._take_published()
        self._begin(f"running the optimizer for {number}")
        result = self._worker.step()
        if result.rounded_away is not None:
            metrics = add_metrics(metrics, {"rounded_away": Metric(result.rounded_away, 1.0)})
        trained = unix_time()
        if request.publish is not None and self._overlaps:
            self._start_publish(request.publish)
        elif request.publish is not None:
            published = self._publish(request.publish)
        return Trained(
            version=result.version,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            metrics=encode_metrics(metrics),
            span=(started, trained),
            logprobs=tuple(logprobs_T.float().cpu().numpy() for logprobs_T in logprobs),
            published=published,
            saved=None if self._saver is None or self._saver.save_pending else self._finish_save(0.0),
        )

    def _refuse_unless_images(self) -> None:
        if not (isinstance(self._worker, ImageWorker) and self._worker.takes_images):
            raise UnsupportedError(
                f"the rollouts have images, but {type(self._worker).__name__} does not support images: use the "
                "trainer 'fsdp' with a model that accepts images"
            )

    def _forward_backward(self, batch: MicroBatch, plan: LossPlan, number: str) -> tuple[LossOutput, torch.Tensor]:
        """Return the loss and the trainer logprobs of a micro-batch, once its gradient is accumulated."""
        self._begin(f"running the forward pass of {number}")
        logprobs_T, student_top_TK = self._logprobs(batch)
        output = self._loss(batch, logprobs_T, plan, student_top_TK=student_top_TK)
        if not torch.isfinite(output.loss):
            raise NonFiniteError(f"the loss of {number} is {output.loss.item()}; the last checkpoint is intact")
        self._begin(f"running the backward pass of {number}")
        self._worker.backward(output.loss)
        return output, logprobs_T

    @torch.no_grad()
    def _with_untrained(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with the logprobs of the reference model and of the teachers on this rank."""
        if self._reference is not None:
            batch = replace(batch, reference_logprobs_T=self._reference.forward(batch))
        for index, teacher in enumerate(self._teachers):
            if teacher is not None and batch.teacher_ids_S is not None and batch.teacher_logprobs_T is not None:
                logprobs_T = teacher.forward(replace(batch, routed_experts_TLK=None))  # on every rank, in any case
                is_mine_T = batch.teacher_ids_S[batch.segment_ids_T] == index
                logprobs_T = torch.where(is_mine_T, logprobs_T, batch.teacher_logprobs_T)
                batch = replace(batch, teacher_logprobs_T=logprobs_T)
        return batch

    def _logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the trainer logprobs of the tokens, and of the teachers' likeliest tokens if the loss needs them."""
        if "teacher_top" not in self._loss.needs or batch.teacher_top_ids_TK is None:
            return self._worker.forward(batch), None
        scored_TK = torch.cat([batch.token_ids_T[:, None], batch.teacher_top_ids_TK], dim=1)
        logprobs_TK = self._worker.forward(replace(batch, target_ids_TK=scored_TK))
        return logprobs_TK[:, 0], logprobs_TK[:, 1:]

    # ------------------------------------------------------------------------------------------------------- saving

    def _save(self, path: Path) -> int | None:
        """Write a checkpoint, or start writing it once the previous one is complete; return the completed version."""
        self._wait_for_publish()
        if self._saver is None:
            self._begin(f"saving version {self._worker.version}")
            self._worker.save(path)
            return self._worker.version
        ended = self._finish_save(self._save_timeout_s)
        self._begin(f"copying version {self._worker.version}")
        self._saver.begin_save(path)
        self._saving = self._worker.version
        return ended

    def _finish_save(self, timeout_s: float) -> int | None:
        """Wait until the pending save is complete; return its version, or None if no save is pending."""
        if self._saver is None or self._saving is None:
            return None
        self._begin(f"saving version {self._saving}")
        self._saver.finish_save(timeout_s)
        ended, self._saving = self._saving, None
        return ended


def prepare_step(
    worker: TrainerWorker, loss: PolicyLoss, batches: Sequence[MicroBatch], step: Train
) -> tuple[Sequence[MicroBatch], LossPlan]:
    """Return the micro-batches with all inputs of the loss, and the plan of the whole step."""

    def sum_over_ranks(numbers: torch.Tensor) -> torch.Tensor:
        if worker.world_size > 1:
            dist.all_reduce(numbers)
            # Ranks that compute the same data all count it; dividing last keeps whole numbers exact.
            numbers = numbers * data_ranks_of(worker).size / worker.world_size
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


def answer_requests(channel: WorkerChannel, notes: list[str], hosted: Any) -> None:
    """Answer requests until the run ends. Each answer carries ``notes``, which is then cleared.

    ``hosted`` is the store that rank 0 hosts for the other ranks; on those, it is None.

    An error is reported to the run and ends the loop; errors other than `InflightError` are also raised.
    """
    trainer: TrainerRank | None = None
    try:
        for request, tensors in channel.requests():
            if trainer is None:
                assert isinstance(request, Start), "the first request must be Start"
                trainer = TrainerRank(request, lambda what: channel.send(StatusMessage(what=what)), hosted)
            answer = trainer.answer(request, tensors)
            sent = tuple(notes)
            channel.send(answer.model_copy(update={"notes": sent}))
            del notes[: len(sent)]  # a publish in a thread may have added some
    except Exception as error:
        code = error.code if isinstance(error, InflightError) else None
        message = f"{type(error).__name__}: {error}" if code is None else str(error)
        blames = blames_another_rank(error)
        channel.send(Failed(code=code, message=message, traceback=traceback.format_exc(), blames_another_rank=blames))
        if code is None:
            raise
    finally:
        if trainer is not None:
            trainer.close()


def main() -> None:
    """Run one rank, configured by environment variables. It ignores SIGINT, which the run handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    notes: list[str] = []
    warnings.simplefilter("always", PrecisionWarning)
    show = warnings.showwarning

    def show_and_note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        show(message, category, *where, **more)
        if issubclass(category, PrecisionWarning):
            notes.append(str(message))

    warnings.showwarning = show_and_note
    report_log_records(notes.append)
    rank, address = int(os.environ["RANK"]), os.environ[ADDRESS_VARIABLE]
    set_collective_interface(address)
    channel = WorkerChannel(meet_run(os.environ[RUN_VARIABLE], os.environ[TOKEN_VARIABLE], rank))
    hosted, here = None, Here()
    if rank == 0 and int(os.environ["WORLD_SIZE"]) > 1:
        hosted, port = host_store(address, _MEET_S)
        here = Here(rendezvous=host_and_port(address, port))
    channel.send(here)
    answer_requests(channel, notes, hosted)


if __name__ == "__main__":
    main()
