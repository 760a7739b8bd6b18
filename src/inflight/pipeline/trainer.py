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
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import torch
import torch.distributed as dist

from inflight.contracts import TrainerWorker
from inflight.errors import ConfigError, InflightError, NonFiniteError, PublishError
from inflight.losses import PRESETS, LossPreset, Metrics, add_metrics, encode_metrics
from inflight.pipeline.channel import Message, WorkerChannel
from inflight.pipeline.messages import micro_batches_of
from inflight.types import GlobalCounts, MicroBatch, Outcome, PublishReport
from inflight.weights.publish import WeightPublisher, publish_weights

_PUBLISH_ATTEMPTS = 3
"""A fleet that lost a member, or was left torn by it, is brought to the present version by publishing again."""


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
        self._publisher: WeightPublisher | None = None
        self._preset: LossPreset | None = None
        self._settings: Message = {}

    def run(self) -> None:
        """Answer messages until the run ends or says so."""
        handlers = {"start": self._start, "train": self._train, "save": self._save}
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
            dist.init_process_group(
                message["backend"],
                init_method=f"file://{os.environ['INFLIGHT_RENDEZVOUS']}",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
        factory = load_worker_factory(message["worker"])
        self._worker = factory(message["worker_settings"])
        if message["reference_kl"] > 0:
            self._reference = factory(message["worker_settings"])
        self._preset = PRESETS[message["preset"]]
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
        counts = GlobalCounts(**message["counts"])
        metrics: Metrics = {}
        for batch in micro_batches_of(message["layouts"], tensors):
            metrics = add_metrics(metrics, self._forward_backward(batch, counts))
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
        return answer

    def _forward_backward(self, batch: MicroBatch, counts: GlobalCounts) -> Metrics:
        assert self._worker is not None and self._preset is not None
        if self._reference is not None:
            with torch.no_grad():
                batch = replace(batch, reference_logprobs_T=self._reference.forward(batch))
        logprobs_T = self._worker.forward(batch)
        output = self._preset.loss(
            batch,
            logprobs_T,
            counts,
            current_version=self._worker.version,
            reference_kl_coef=self._settings["reference_kl"],
        )
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

    def _publish(self) -> Message:
        """Publish; an endpoint that is gone is left out and the others are brought to the new version."""
        assert self._worker is not None
        started = time.time()
        lost: list[str] = []
        while True:
            report, failed = self._publish_once(may_fail=len(lost) < _PUBLISH_ATTEMPTS - 1)
            if not failed:
                break
            lost.append("" if report is None else report.summary())
        if report is None:
            return {}
        held = {e.endpoint: e.timings.held_s for e in report.endpoints if e.timings is not None}
        spans = report.spans
        return {
            "publish_span": [started, time.time()],
            "publish": {
                "version": report.version,
                "size_bytes": report.size_bytes,
                "held_s": held,
                "gather_s": spans.gather_s,
                "hold_s": spans.hold_s,
                "wire_s": spans.wire_s,
                "load_s": spans.load_s,
                "first_token_s": spans.first_token_s,
                "total_s": spans.total_s,
            },
            "endpoints": [e.endpoint for e in report.endpoints],
            "lost": lost,
        }

    def _publish_once(self, *, may_fail: bool) -> tuple[PublishReport | None, bool]:
        """Return the report (rank 0 only), and on every rank whether it failed and is to be tried again."""
        assert self._worker is not None
        report, failed = None, False
        try:
            report = publish_weights(
                self._worker,
                self._publisher,
                in_flight=self._settings["in_flight"],
                deadline_s=self._settings["publish_deadline_s"],
            )
        except PublishError as error:
            if not (may_fail and self._can_go_on(error.report)):
                raise
            report, failed = error.report, True
        if self._worker.world_size > 1:
            agreed = torch.tensor(int(failed))
            dist.broadcast(agreed, 0)
            failed = bool(agreed)
        return report, failed

    def _can_go_on(self, report: PublishReport) -> bool:
        """Remove the endpoints that are gone; true if others are left and none of them refused."""
        assert self._publisher is not None
        for endpoint in report.endpoints:
            if endpoint.outcome in (Outcome.UNREACHABLE, Outcome.TIMED_OUT):
                self._publisher.remove(endpoint.endpoint)
        refused = any(endpoint.outcome is Outcome.REFUSED for endpoint in report.endpoints)
        return bool(self._publisher.endpoints) and not refused


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
