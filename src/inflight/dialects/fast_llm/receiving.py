"""Publishes, to inflight's endpoints, the weights that Fast-LLM's trainer broadcasts.

The trainer does not announce all tensors of an update in advance, so each update is received completely into host
memory, checked against the served model, and only then published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inflight.contracts import WeightSource
from inflight.dialects.broadcast_group import BroadcastGroup
from inflight.dialects.fast_llm.events import EventReader, TrainingFinished
from inflight.dialects.fast_llm.framing import WEIGHTS, receive_header
from inflight.errors import PublishError, TransferError
from inflight.types import PublishReport, WeightBucket
from inflight.weights.encode.buckets import manifest_difference
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.wire import BucketSpec, InFlightPolicy, Manifest, TensorSpec

_MAX_TENSORS = 1_000_000
"""Maximum number of tensors in one update, so that every update ends."""
_MAX_DROPPED_SHARE = 4
"""Limit for the size of a tensor, as a multiple of the model's size: even a tensor that is dropped needs memory."""


class ReceivedWeights(WeightSource):
    """The tensors of one update in host memory."""

    rank = 0
    world_size = 1

    def __init__(self, version: int, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        self._version = version
        self._specs = specs
        self._tensors = tensors

    @property
    def version(self) -> int:
        return self._version

    def parameter_specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        for bucket in buckets:
            part = slice(bucket.start, bucket.stop)
            yield WeightBucket(bucket.index, tuple(self._specs[part]), tuple(self._tensors[part]))


class FollowedTrainer:
    """Publishes the updates of one trainer through ``publisher``, to servers of a model with the tensors ``expected``.

    ``timeout_s`` limits the time from one tensor to the next, and the time that endpoints may take to apply an update.
    ``step_timeout_s`` limits the time from one event of the trainer to the next. All methods block.
    """

    def __init__(
        self,
        group: BroadcastGroup,
        events: EventReader,
        publisher: WeightPublisher,
        expected: Sequence[TensorSpec],
        in_flight: InFlightPolicy,
        *,
        timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self._group = group
        self._events = events
        self._publisher = publisher
        self._expected = {spec.name: spec for spec in expected}
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._step_timeout_s = step_timeout_s

    def updates(self) -> Iterator[tuple[int, PublishReport | str]]:
        """Yield the version of each update with its report, or with the reason why not every endpoint serves it.

        Ends, after leaving the group, when training has finished. An update that does not fit the model, or that an
        endpoint refuses, is received completely and yielded with the reason. Raises `TransferError` if the trainer,
        another rank or Redis is lost, and the errors of `publish_weights` except `PublishError`. The group is then
        abandoned, and the endpoints keep serving their weights.
        """
        try:
            while not isinstance(event := self._events.next_event(self._step_timeout_s), TrainingFinished):
                specs, tensors = self._receive()
                if (problem := self._problem_with(specs)) is not None:
                    yield event.version, f"the update was dropped: {problem}"
                    continue
                weights = ReceivedWeights(event.version, specs, [tensors[spec.name] for spec in specs])
                try:
                    report = publish_weights(
                        weights, self._publisher, in_flight=self._in_flight, deadline_s=self._timeout_s
                    )
                except PublishError as error:
                    yield event.version, str(error)
                else:
                    yield event.version, report
        finally:
            self._group.abort()

    def _receive(self) -> tuple[list[TensorSpec], dict[str, torch.Tensor]]:
        """Receive one complete update; return its weights' specifications, and the tensors that fit the model."""
        specs: list[TensorSpec] = []
        tensors: dict[str, torch.Tensor] = {}
        for _ in range(_MAX_TENSORS):
            header = receive_header(self._group, self._timeout_s)
            if header is None:
                return specs, tensors
            tensor = self._memory_for(header.spec)
            self._group.broadcast(tensor, self._timeout_s, f"receiving {header.spec.name}")
            if header.shard != WEIGHTS:
                continue
            specs.append(header.spec)
            if self._expected.get(header.spec.name) == header.spec:
                tensors[header.spec.name] = tensor
        self._group.abort()
        raise TransferError(f"an update of more than {_MAX_TENSORS} tensors was refused")

    def _memory_for(self, spec: TensorSpec) -> torch.Tensor:
        """Return memory for a tensor. If there is not enough, abandon the group and raise `TransferError`."""
        limit_bytes = _MAX_DROPPED_SHARE * sum(it.size_bytes for it in self._expected.values())
        try:
            if spec.size_bytes > limit_bytes:
                raise RuntimeError(f"more than {_MAX_DROPPED_SHARE} times the size of the model")
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        except RuntimeError as error:
            self._group.abort()
            raise TransferError(
                f"receiving {spec.name} failed: no memory for {spec.size_bytes} bytes: {error}"
            ) from error

    def _problem_with(self, specs: Sequence[TensorSpec]) -> str | None:
        """Return why the tensors do not match those of the model, or None if they do."""
        if not specs:
            return "the update has no weights"
        if len({spec.name for spec in specs}) < len(specs):
            return "the update contains a tensor twice"
        return manifest_difference(tuple(self._expected.values()), Manifest(tensors=tuple(specs)))
