"""One trainer rank as a process of its own: ``python -m inflight.pipeline.trainer FD``.

It takes batches from the run over a socket pair, drives a `TrainerWorker` through them, and publishes. Every rank gets
the same messages, makes the same calls and answers; only rank 0 holds a publisher. It says what it begins to do, so
that the run can tell what a rank was doing when it died. It ends when the run does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from inflight.contracts import BackgroundSaver, TrainerWorker
from inflight.errors import (
    ConfigError,
    FencedError,
    InflightError,
    NonFiniteError,
    PrecisionWarning,
    UnsupportedError,
)
from inflight.losses import Metric, Metrics, Plan, PolicyLoss, add_metrics, encode_metrics, prepare
from inflight.pipeline.channel import Message, WorkerChannel
from inflight.pipeline.messages import micro_batches_of
from inflight.types import MicroBatch, PublishReport
from inflight.weights.fleet import Fleet, MemberState
from inflight.weights.publisher import WeightPublisher
from inflight.weights.storing import newest_epoch, store_weights
from inflight.weights.transports.files import FileSender
from inflight.wire import InFlightPolicy

_LEFT_OUT = (MemberState.SUSPECT, MemberState.DEAD)


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
    """Answers the run's messages on one rank."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._worker: TrainerWorker | None = None
        self._reference: TrainerWorker | None = None
        self._saver: BackgroundSaver | None = None
        self._saving: int | None = None
        """Version whose save was begun, until the run was told that it has ended."""
        self._fleet: Fleet | None = None
        self._store: FileSender | None = None
        """What rank 0 stores versions with, for servers that pull."""
        self._epoch = 1
        self._served: set[str] = set()
        """Names of the endpoints that were there from the start, or have held a version since."""
        self._loss: PolicyLoss | None = None
        self._settings: Message = {}
        self._warnings: list[str] = []
        """Not told to the run yet."""

    def run(self) -> None:
        """Answer messages until the run ends or says so. What is no `InflightError` is raised, once the run is told."""
        handlers = {
            "start": self._start,
            "train": self._train,
            "save": self._save,
            "begin_save": self._begin_save,
            "finish_save": self._finish_save,
            "publish": self._publish_again,
        }
        while True:
            try:
                message, tensors = self._channel.receive()
            except EOFError:
                return
            if message["type"] == "stop":
                return
            try:
                answer = handlers[message["type"]](message, tensors)
            except InflightError as error:
                told = {"code": error.code, "message": str(error)}
                self._channel.send({"type": "error", **told, "blames_another_rank": blames_another_rank(error)})
                return
            except Exception as error:
                told = {"message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
                self._channel.send({"type": "failed", **told, "blames_another_rank": blames_another_rank(error)})
                raise
            self._channel.send({"type": "done", **answer, "warnings": self._warnings})
            self._warnings = []

    def warn(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Write a warning to standard error; tell the run of lost precision with the next answer."""
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)
        if issubclass(category, PrecisionWarning):
            self._warnings.append(str(message))

    def _begin(self, what: str) -> None:
        """Say what this rank does next."""
        self._channel.send({"type": "doing", "what": what})

    def close(self) -> None:
        """Leave the weight group."""
        if self._fleet is not None:
            self._fleet.close()

    def _start(self, message: Message, _: dict[str, torch.Tensor]) -> Message:
        """Load the model, connect to the endpoints and bring them to the present weights."""
        self._settings = message
        torch.set_num_threads(message["threads"])
        if int(os.environ["WORLD_SIZE"]) > 1:
            self._begin("the forming of the trainer's group")
            device = message["worker_settings"].get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
            dist.init_process_group(
                collectives_backend(device),
                init_method=f"file://{os.environ['INFLIGHT_RENDEZVOUS']}",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
        self._begin("the loading of the model")
        factory = load_worker_factory(message["worker"])
        self._worker = factory(message["worker_settings"])
        if message["background_saves"]:
            if not isinstance(self._worker, BackgroundSaver):
                raise ConfigError(
                    f"run.background_saves is true, and worker {message['worker']!r} cannot save in the background: it "
                    "is no inflight.BackgroundSaver"
                )
            self._saver = self._worker
        self._loss = PolicyLoss.model_validate(message["loss"])
        if "reference_logprobs" in self._loss.needs:
            self._reference = factory(message["worker_settings"])
        if message["checkpoint"] is not None:
            self._begin(f"the loading of {message['checkpoint']}")
            self._worker.load(Path(message["checkpoint"]))
        if message["updates"] == "pull":
            if self._worker.rank == 0:
                directory = Path(message["directory"])
                self._store = FileSender(directory)
                self._epoch = newest_epoch(directory, message["run_id"]) + 1
            return {"version": self._worker.version, **self._publish(message)}
        self._begin("the connecting to the servers")
        self._fleet = self._connected(message) if self._worker.rank == 0 else Fleet(None)
        self._served = set(self._fleet.states)
        return {"version": self._worker.version, **self._publish(message)}

    def _connected(self, message: Message) -> Fleet:
        token = os.environ.get("INFLIGHT_TOKEN")
        publisher = WeightPublisher.connect(
            message["urls"],
            run_id=message["run_id"],
            token=token,
            backend=message["backend"],
            directory=None if message["directory"] is None else Path(message["directory"]),
            encoding=message["encoding"],
            delta=message["delta"],
            staged=message["staged"],
            connect_timeout_s=message["publish_deadline_s"],
        )
        return Fleet(publisher, quorum=message["quorum"], token=token)

    def _train(self, message: Message, tensors: dict[str, torch.Tensor]) -> Message:
        """Forward and backward over the micro-batches, one optimizer step, and a publish if asked for."""
        assert self._worker is not None
        started = time.time()
        number = f"step {self._worker.version + 1}"
        self._begin(f"the counting of {number}")
        batches, plan = self._plan(micro_batches_of(message["layouts"], tensors), message)
        metrics: Metrics = {}
        for batch in batches:
            metrics = add_metrics(metrics, self._forward_backward(batch, plan, number))
        self._begin(f"the optimizer's {number}")
        result = self._worker.step()
        if result.rounded_away is not None:
            metrics = add_metrics(metrics, {"rounded_away": Metric(result.rounded_away, 1.0)})
        trained = time.time()
        answer: Message = {
            "version": result.version,
            "gradient_norm": result.gradient_norm,
            "learning_rate": result.learning_rate,
            "metrics": encode_metrics(metrics),
            "train_span": [started, trained],
        }
        if message["publish"]:
            answer |= self._publish(message)
        return answer | self._ended_save()

    def _plan(self, batches: list[MicroBatch], message: Message) -> tuple[list[MicroBatch], Plan]:
        """Return the micro-batches with all that the loss needs of them, and what it needs of the whole step."""
        assert self._worker is not None and self._loss is not None
        logprobs = None
        if "first_forward" in self._loss.needs:
            with torch.no_grad():
                logprobs = [self._worker.forward(batch) for batch in batches]
            batches = [
                replace(batch, proximal_logprobs_T=logprobs_T)
                for batch, logprobs_T in zip(batches, logprobs, strict=True)
            ]
        plan = prepare(
            self._loss,
            batches,
            trainer_logprobs=logprobs,
            current_version=self._worker.version,
            num_groups=message["num_groups"],
            num_sequences=message["num_sequences"],
            reduce=self._sum_over_ranks,
        )
        return batches, plan

    def _sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        assert self._worker is not None
        if self._worker.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    def _forward_backward(self, batch: MicroBatch, plan: Plan, number: str) -> Metrics:
        assert self._worker is not None and self._loss is not None
        self._begin(f"the forward of {number}")
        if self._reference is not None:
            with torch.no_grad():
                batch = replace(batch, reference_logprobs_T=self._reference.forward(batch))
        logprobs_T = self._worker.forward(batch)
        output = self._loss(batch, logprobs_T, plan)
        if not torch.isfinite(output.loss):
            raise NonFiniteError(
                f"the loss of step {self._worker.version + 1} is {output.loss.item()}; the last checkpoint is whole"
            )
        self._begin(f"the backward of {number}")
        self._worker.backward(output.loss)
        return output.metrics

    def _save(self, message: Message, _: dict[str, torch.Tensor]) -> Message:
        assert self._worker is not None
        self._begin(f"the saving of version {self._worker.version}")
        self._worker.save(Path(message["path"]))
        return {"version": self._worker.version}

    def _begin_save(self, message: Message, tensors: dict[str, torch.Tensor]) -> Message:
        assert self._worker is not None and self._saver is not None
        ended = self._finish_save(message, tensors)
        self._begin(f"the copying of version {self._worker.version}")
        self._saver.begin_save(Path(message["path"]))
        self._saving = self._worker.version
        return ended

    def _finish_save(self, message: Message, _: dict[str, torch.Tensor]) -> Message:
        """Wait until the save that was begun stands at its path; says which one, if there was one."""
        if self._saver is None or self._saving is None:
            return {}
        self._begin(f"the saving of version {self._saving}")
        self._saver.finish_save(message["timeout_s"])
        ended, self._saving = self._saving, None
        return {"saved": ended}

    def _ended_save(self) -> Message:
        """Say which save has ended by now. Raises `CheckpointError` if it failed."""
        if self._saver is None or self._saver.save_pending:
            return {}
        return self._finish_save({"timeout_s": 0.0}, {})

    def _publish_again(self, message: Message, _: dict[str, torch.Tensor]) -> Message:
        """Publish the present version to whoever answers; every removed endpoint is asked, whatever its pause."""
        assert self._fleet is not None
        self._fleet.ask_all()
        return self._publish(message)

    def _publish(self, message: Message) -> Message:
        """Publish to whoever can be reached; what the run is told of it comes from rank 0."""
        assert self._worker is not None
        started = time.time()
        self._begin(f"the publishing of version {self._worker.version}")
        if self._settings["updates"] == "pull":
            return self._store_version(started)
        assert self._fleet is not None
        unfit = self._change_members(message) if self._worker.rank == 0 else []
        report = self._fleet.publish(
            self._worker,
            in_flight=InFlightPolicy(self._settings["in_flight"]),
            deadline_s=self._settings["publish_deadline_s"],
        )
        if report is None:
            return {}
        healthy = self._fleet.healthy
        came = [change for change in self._fleet.changes if change.after is MemberState.HEALTHY]
        answer: Message = {
            "publish_span": [started, time.time()],
            "endpoints": list(healthy),
            "lost": [*unfit, *self._fleet.notes],
            "restored": sorted(c.endpoint for c in came if c.endpoint in self._served and c.before in _LEFT_OUT),
            "joined": sorted(c.endpoint for c in came if c.endpoint not in self._served),
            "removed": [name for name in self._fleet.states if name not in healthy],
            "states": dict(self._fleet.states),
            "changes": [[c.endpoint, c.before, c.after] for c in self._fleet.changes],
        }
        self._served |= {*healthy}
        return answer | {"publish": _facts(report)} if healthy else answer

    def _store_version(self, started: float) -> Message:
        """Store the present version for servers that come for it; nobody is waited for.

        Raises `FencedError` after a later incarnation has stored one: servers refuse what comes from this one.
        """
        assert self._worker is not None
        newest = 0 if self._store is None else newest_epoch(Path(self._settings["directory"]), self._settings["run_id"])
        report = store_weights(
            self._worker,
            self._store,
            run_id=self._settings["run_id"],
            epoch=self._epoch,
            encoding=self._settings["encoding"],
            deadline_s=self._settings["publish_deadline_s"],
        )
        if newest > self._epoch:  # told only now, when every rank has gathered
            raise FencedError(
                f"the trainer of run {self._settings['run_id']!r} was replaced: this is its epoch {self._epoch}, epoch "
                f"{newest} has taken over. Stop this trainer"
            )
        if report is None:
            return {}
        return {
            "publish_span": [started, time.time()],
            "publish": {
                "version": report.ref.version,
                "size_bytes": report.size_bytes,
                "held_s": {},
                "gather_s": report.gather_s,
                "wire_s": report.store_s,
                "total_s": time.time() - started,
                "sent_bytes": report.stored_bytes,
                "gb_per_s": report.stored_bytes / 1e9 / report.store_s if report.store_s > 0 else None,
            },
        }

    def _change_members(self, message: Message) -> list[str]:
        """Let servers join and leave as the run says; returns why some cannot."""
        assert self._fleet is not None
        if message.get("restarted"):
            self._fleet.ask_all()
        unfit = []
        for name in message.get("leave", ()):
            self._fleet.leave(name)
        for url in message.get("join", ()):
            try:
                self._fleet.join(url)
            except UnsupportedError as error:
                unfit.append(str(error))
        return unfit


def _facts(report: PublishReport) -> Message:
    """What the run notes of a publish."""
    spans = report.spans
    return {
        "version": report.version,
        "size_bytes": report.size_bytes,
        "held_s": {e.endpoint: e.timings.held_s for e in report.endpoints if e.timings is not None},
        "gather_s": spans.gather_s,
        "hold_s": spans.hold_s,
        "wire_s": spans.wire_s,
        "load_s": spans.load_s,
        "first_token_s": spans.first_token_s,
        "total_s": spans.total_s,
        "sent_bytes": report.sent_bytes,
        "gb_per_s": report.sent_bytes / 1e9 / spans.wire_s if spans.wire_s > 0 else None,
        "outcomes": {e.endpoint: str(e.outcome) for e in report.endpoints},
    }


def main() -> None:
    """Run one rank; ``argv[1]`` is the file descriptor of the channel. SIGINT is left to the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = WorkerChannel(socket.socket(fileno=int(sys.argv[1])))
    trainer = Trainer(channel)
    warnings.simplefilter("always", PrecisionWarning)
    warnings.showwarning = trainer.warn
    try:
        trainer.run()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
