"""A trainer rank that another program controls: gradients, steps, loads and publishes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from inflight.contracts import TrainerWorker
from inflight.dialects.tinker.losses import loss_named
from inflight.dialects.tinker.packing import PackedData, loss_of
from inflight.errors import CheckpointError, InflightError, NonFiniteError, PublishError, TrainerError
from inflight.run.ranks.messages import (
    Accumulate,
    Accumulated,
    Done,
    Load,
    OptimizerStep,
    PublishAs,
    RankAnswer,
    Start,
    Stepped,
    micro_batches_of,
)
from inflight.types import AdamSettings
from inflight.weights.send.gathering import gather_only
from inflight.weights.send.publisher import WeightPublisher, publish_weights

if TYPE_CHECKING:
    from inflight.run.updates_config import UpdatesSection

_INPUTS = "inputs."
_HARMLESS = (CheckpointError, NonFiniteError, PublishError, TrainerError)
"""Worker errors that all ranks raise and that leave the state of training unchanged."""


class HostedRank:
    """One rank that another program controls.

    Every rank receives the same requests; only rank 0 publishes, to servers of the caller's choice.
    """

    def __init__(self, worker: TrainerWorker, start: Start, publish_s: float, begin: Callable[[str], None]) -> None:
        self._worker = worker
        self._run_id = start.run_id
        self._updates: UpdatesSection = start.config.updates
        self._publish_s = publish_s
        self._begin = begin
        self._publishers: dict[tuple[str, ...], WeightPublisher] = {}

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()

    def answer(
        self, request: Accumulate | OptimizerStep | Load | PublishAs, tensors: Mapping[str, torch.Tensor]
    ) -> RankAnswer:
        """Execute a request; an error that changed nothing is returned as a refusal in the answer."""
        version = self._worker.version
        match request:
            case Accumulate():
                return self._accumulate(request, tensors)
            case OptimizerStep():
                self._begin("running the optimizer")
                try:
                    result = self._worker.step(AdamSettings(**request.settings))
                except _HARMLESS as error:
                    return Stepped(version=version, refusal=_refusal(error))
                return Stepped(
                    version=result.version, gradient_norm=result.gradient_norm, learning_rate=result.learning_rate
                )
            case Load():
                self._begin(f"loading {request.path}")
                try:
                    self._worker.load(request.path, optimizer=request.optimizer)
                except _HARMLESS as error:
                    return Done(version=version, refusal=_refusal(error))
                return Done(version=self._worker.version)
            case PublishAs():
                self._begin(f"publishing version {request.version}")
                try:
                    self._publish(request)
                except InflightError as error:
                    return Done(version=version, refusal=_refusal(error))
                return Done(version=version)

    def _accumulate(self, request: Accumulate, tensors: Mapping[str, torch.Tensor]) -> Accumulated:
        self._begin("running forward and backward")
        loss, settings = loss_named(request.loss_fn, request.settings)
        total, found = 0.0, []
        for packed in _packed_of(request, tensors):
            with torch.set_grad_enabled(not request.forward_only):
                logprobs_TK = self._worker.forward(packed.batch)
                value = loss_of(packed, logprobs_TK, loss, settings)
            if not request.forward_only:
                self._worker.backward(value)
            total += float(value.detach())
            found.append(logprobs_TK.detach().float().cpu().reshape(-1).numpy())
        return Accumulated(version=self._worker.version, loss=total, logprobs=tuple(found))

    def _publish(self, request: PublishAs) -> None:
        if self._worker.rank:
            gather_only(self._worker)
            return
        try:
            publisher = self._publisher(request.urls)
        except InflightError:
            gather_only(self._worker)  # the other ranks take part in any case
            raise
        if request.regroup:
            publisher.group.lose()
        publish_weights(self._worker, publisher, deadline_s=self._publish_s, version=request.version)

    def _publisher(self, urls: tuple[str, ...]) -> WeightPublisher:
        if urls not in self._publishers:
            updates = self._updates
            self._publishers[urls] = WeightPublisher.connect(
                urls,
                run_id=self._run_id,
                token=os.environ.get("INFLIGHT_TOKEN"),
                transport=updates.transport,
                address=updates.own_address,
                directory=updates.directory,
                encoding=updates.encoding,
                connect_timeout_s=self._publish_s,
            )
        return self._publishers[urls]


def _packed_of(request: Accumulate, tensors: Mapping[str, torch.Tensor]) -> Iterator[PackedData]:
    """Yield the micro-batches of a request with their loss inputs."""
    inputs: list[dict[str, torch.Tensor]] = [{} for _ in request.segment_lengths]
    for key, tensor in tensors.items():
        if key.startswith(_INPUTS):
            index, _, name = key.removeprefix(_INPUTS).partition(".")
            inputs[int(index)][name] = tensor
    rest = {key: tensor for key, tensor in tensors.items() if not key.startswith(_INPUTS)}
    for batch, of_batch in zip(micro_batches_of(request.segment_lengths, rest), inputs, strict=True):
        yield PackedData(batch, of_batch)


def _refusal(error: InflightError) -> tuple[str, str]:
    return error.code, str(error)
