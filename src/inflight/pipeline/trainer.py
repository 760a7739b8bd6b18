"""One trainer rank as a process of its own: ``python -m inflight.pipeline.trainer FD``.

It takes batches from the run over a socket pair, drives a `TrainerWorker` through them, and publishes. Every rank gets
the same messages, makes the same calls and answers; only rank 0 holds a publisher. It ends when the run does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from importlib.metadata import entry_points
from pathlib import Path

import torch
import torch.distributed as dist

from inflight.contracts import BackgroundSaver, TrainerWorker
from inflight.errors import ConfigError, InflightError, NonFiniteError, PublishError, UnsupportedError
from inflight.losses import Metrics, Plan, PolicyLoss, add_metrics, encode_metrics, prepare
from inflight.pipeline.channel import Message, WorkerChannel
from inflight.pipeline.messages import micro_batches_of
from inflight.types import MicroBatch, Outcome, PublishReport
from inflight.weights.publish import WeightPublisher, publish_weights

_PUBLISH_ATTEMPTS = 3
"""A fleet that lost a member, or was left torn by it, is brought to the present version by publishing again."""
_ASK_S = 1.0
"""How long a removed endpoint may take to answer."""
_MAX_PAUSE_S = 60.0
"""Longest pause before a removed endpoint is asked again; the first is `_ASK_S`, each is twice the one before."""


@dataclass(slots=True)
class _Absence:
    """A removed endpoint: when it is asked again, and the pause after that."""

    ask_at: float
    pause_s: float = _ASK_S


class _Verdict(IntEnum):
    """How one attempt to publish ended, as all ranks agree."""

    DONE = 0
    AGAIN = 1
    NOBODY = 2


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
        self._publisher: WeightPublisher | None = None
        self._absences: dict[str, _Absence] = {}
        self._restored: set[str] = set()
        self._loss: PolicyLoss | None = None
        self._settings: Message = {}

    def run(self) -> None:
        """Answer messages until the run ends or says so."""
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
                self._channel.send({"type": "error", "code": error.code, "message": str(error)})
                return
            self._channel.send({"type": "done", **answer})

    def close(self) -> None:
        """Leave the weight group."""
        if self._publisher is not None:
            self._publisher.close()

    def _start(self, message: Message, _: dict[str, torch.Tensor]) -> Message:
        """Load the model, connect to the endpoints and bring them to the present weights."""
        self._settings = message
        torch.set_num_threads(message["threads"])
        if int(os.environ["WORLD_SIZE"]) > 1:
            # Counts and verdicts travel between ranks in host memory.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if message["backend"] == "nccl" else message["backend"],
                init_method=f"file://{os.environ['INFLIGHT_RENDEZVOUS']}",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
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
            self._worker.load(Path(message["checkpoint"]))
        if self._worker.rank == 0:
            self._publisher = WeightPublisher.connect(
                message["urls"],
                run_id=message["run_id"],
                token=os.environ.get("INFLIGHT_TOKEN"),
                backend=message["backend"],
                connect_timeout_s=message["publish_deadline_s"],
            )
        return {"version": self._worker.version, **self._publish()}

    def _train(self, message: Message, tensors: dict[str, torch.Tensor]) -> Message:
        """Forward and backward over the micro-batches, one optimizer step, and a publish if asked for."""
        assert self._worker is not None
        started = time.time()
        batches, plan = self._plan(micro_batches_of(message["layouts"], tensors), message["num_groups"])
        metrics: Metrics = {}
        for batch in batches:
            metrics = add_metrics(metrics, self._forward_backward(batch, plan))
        result = self._worker.step()
        trained = time.time()
        answer: Message = {
            "version": result.version,
            "gradient_norm": result.gradient_norm,
            "learning_rate": result.learning_rate,
            "metrics": encode_metrics(metrics),
            "train_span": [started, trained],
        }
        if message["publish"]:
            answer |= self._publish()
        return answer | self._ended_save()

    def _plan(self, batches: list[MicroBatch], num_groups: int) -> tuple[list[MicroBatch], Plan]:
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
            num_groups=num_groups,
            reduce=self._sum_over_ranks,
        )
        return batches, plan

    def _sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        assert self._worker is not None
        if self._worker.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    def _forward_backward(self, batch: MicroBatch, plan: Plan) -> Metrics:
        assert self._worker is not None and self._loss is not None
        if self._reference is not None:
            with torch.no_grad():
                batch = replace(batch, reference_logprobs_T=self._reference.forward(batch))
        logprobs_T = self._worker.forward(batch)
        output = self._loss(batch, logprobs_T, plan)
        if not torch.isfinite(output.loss):
            raise NonFiniteError(
                f"the loss of step {self._worker.version + 1} is {output.loss.item()}; the last checkpoint is whole"
            )
        self._worker.backward(output.loss)
        return output.metrics

    def _save(self, message: Message, _: dict[str, torch.Tensor]) -> Message:
        assert self._worker is not None
        self._worker.save(Path(message["path"]))
        return {"version": self._worker.version}

    def _begin_save(self, message: Message, tensors: dict[str, torch.Tensor]) -> Message:
        assert self._worker is not None and self._saver is not None
        ended = self._finish_save(message, tensors)
        self._saver.begin_save(Path(message["path"]))
        self._saving = self._worker.version
        return ended

    def _finish_save(self, message: Message, _: dict[str, torch.Tensor]) -> Message:
        """Wait until the save that was begun stands at its path; says which one, if there was one."""
        if self._saver is None or self._saving is None:
            return {}
        self._saver.finish_save(message["timeout_s"])
        ended, self._saving = self._saving, None
        return {"saved": ended}

    def _ended_save(self) -> Message:
        """Say which save has ended by now. Raises `CheckpointError` if it failed."""
        if self._saver is None or self._saver.save_pending:
            return {}
        return self._finish_save({"timeout_s": 0.0}, {})

    def _publish_again(self, _: Message, __: dict[str, torch.Tensor]) -> Message:
        """Publish the present version to whoever answers; every removed endpoint is asked, whatever its pause."""
        for absence in self._absences.values():
            absence.ask_at = 0.0
        return self._publish()

    def _publish(self) -> Message:
        """Publish to whoever can be reached: who is gone is left out, who is back comes in, all at the new version."""
        assert self._worker is not None
        started = time.time()
        unfit = self._restore()
        report: PublishReport | None = None
        lost: list[str] = []
        verdict = self._agreed(self._anybody())
        while verdict is _Verdict.AGAIN:
            report, verdict = self._publish_once(may_fail=len(lost) < _PUBLISH_ATTEMPTS - 1)
            if verdict is not _Verdict.DONE:
                lost.append("" if report is None else report.summary())
        if self._publisher is None:
            return {}
        endpoints = self._publisher.endpoints if verdict is _Verdict.DONE else ()
        answer: Message = {
            "publish_span": [started, time.time()],
            "endpoints": list(endpoints),
            "lost": [*unfit, *lost],
            "restored": sorted(self._restored.intersection(endpoints)),
            "removed": list(self._publisher.removed),
        }
        for name in endpoints:
            self._absences.pop(name, None)
        return answer if report is None or not endpoints else answer | {"publish": _facts(report)}

    def _publish_once(self, *, may_fail: bool) -> tuple[PublishReport | None, _Verdict]:
        """Return the report (rank 0 only), and on every rank how it ended."""
        assert self._worker is not None
        report, verdict = None, _Verdict.DONE
        had_group = self._publisher is not None and self._publisher.has_group
        try:
            report = publish_weights(
                self._worker,
                self._publisher,
                in_flight=self._settings["in_flight"],
                deadline_s=self._settings["publish_deadline_s"],
            )
        except PublishError as error:
            report = error.report
            if not self._can_go_on(report, had_group=had_group, may_fail=may_fail):
                raise
            verdict = self._anybody()
        return report, self._agreed(verdict)

    def _agreed(self, verdict: _Verdict) -> _Verdict:
        """Return rank 0's verdict on every rank."""
        assert self._worker is not None
        if self._worker.world_size == 1:
            return verdict
        agreed = torch.tensor(int(verdict))
        dist.broadcast(agreed, 0)
        return _Verdict(int(agreed))

    def _anybody(self) -> _Verdict:
        return _Verdict.NOBODY if self._publisher is not None and not self._publisher.endpoints else _Verdict.AGAIN

    def _can_go_on(self, report: PublishReport, *, had_group: bool, may_fail: bool) -> bool:
        """Remove the endpoints that are gone; true if publishing again to those that are left may succeed.

        A server that was restarted refuses what is sent to the group that it was a member of. So a refusal counts
        once the group was formed for it. An endpoint that was just restored has one attempt.
        """
        assert self._publisher is not None
        gone, refused = set[str](), set[str]()
        for endpoint in report.endpoints:
            if endpoint.outcome in (Outcome.UNREACHABLE, Outcome.TIMED_OUT):
                gone.add(endpoint.endpoint)
            elif endpoint.outcome is Outcome.REFUSED:
                refused.add(endpoint.endpoint)
            if endpoint.outcome is not Outcome.APPLIED and endpoint.endpoint in self._restored:
                gone.add(endpoint.endpoint)
        for name in gone:
            self._remove(name)
        if refused - gone and not had_group:
            return False
        return may_fail or bool(gone)

    def _remove(self, name: str) -> None:
        """Leave an endpoint out until it answers again."""
        assert self._publisher is not None
        self._publisher.remove(name)
        self._restored.discard(name)
        self._pause(name)

    def _pause(self, name: str) -> None:
        """Ask an endpoint again later, and each time later than the time before."""
        absence = self._absences.setdefault(name, _Absence(0.0))
        absence.ask_at = time.monotonic() + absence.pause_s
        absence.pause_s = min(2 * absence.pause_s, _MAX_PAUSE_S)

    def _restore(self) -> list[str]:
        """Ask the removed endpoints whose pause is over; those that answer take part in the publish that comes.

        Returns what a user should know of the others: what came back where a server was is another one.
        """
        self._restored = set()
        if self._publisher is None:
            return []
        due = [name for name, absence in self._absences.items() if absence.ask_at <= time.monotonic()]
        silent = self._publisher.restore(*due, timeout_s=_ASK_S)
        for name in silent:
            self._pause(name)
        self._restored = set(due) - set(silent)
        return [str(error) for error in silent.values() if isinstance(error, UnsupportedError)]


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
    }


def main() -> None:
    """Run one rank; ``argv[1]`` is the file descriptor of the channel. SIGINT is left to the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = WorkerChannel(socket.socket(fileno=int(sys.argv[1])))
    trainer = Trainer(channel)
    try:
        trainer.run()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
