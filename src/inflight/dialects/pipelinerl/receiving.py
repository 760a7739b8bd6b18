"""Publishes, to inflight's endpoints, the weights that PipelineRL's trainer broadcasts.

Each update is one publish: the endpoints accept or refuse the manifest, every tensor is received completely and
verified in transit, and the endpoints commit together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from inflight.contracts import WeightSource
from inflight.dialects.broadcast_group import BroadcastGroup
from inflight.dialects.pipelinerl.messages import WeightUpdateRequest
from inflight.errors import InvalidRequestError, TransferError
from inflight.types import PublishReport, WeightBucket
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.wire import BucketSpec, InFlightPolicy, TensorSpec


class ArrivingWeights(WeightSource):
    """The tensors of one update, in the order in which the trainer broadcasts them."""

    rank = 0
    world_size = 1

    def __init__(self, group: BroadcastGroup, version: int, specs: Sequence[TensorSpec], timeout_s: float) -> None:
        self._group = group
        self._version = version
        self._specs = specs
        self._timeout_s = timeout_s

    @property
    def version(self) -> int:
        return self._version

    def parameter_specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def gather_weights(self, buckets: Sequence[BucketSpec]) -> Iterator[WeightBucket]:
        """Receive the weights even if no endpoint accepts them, because the trainer sends them anyway.

        Raises `TransferError`; the group is then abandoned.
        """
        for bucket in buckets:
            specs = tuple(self._specs[bucket.start : bucket.stop])
            yield WeightBucket(bucket.index, specs, tuple(self._received(spec) for spec in specs))

    def _received(self, spec: TensorSpec) -> torch.Tensor:
        what = f"receiving {spec.name}"
        try:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        except RuntimeError as error:
            self._group.abort()
            raise TransferError(f"{what} failed: no memory for {spec.size_bytes} bytes") from error
        self._group.broadcast(tensor, self._timeout_s, what)
        return tensor


class ArrivingUpdates:
    """Publishes the updates of one trainer through ``publisher``, one at a time.

    ``timeout_s`` limits the time from one tensor to the next, and the time that endpoints may take to apply an update.
    """

    def __init__(
        self, group: BroadcastGroup, publisher: WeightPublisher, in_flight: InFlightPolicy, timeout_s: float
    ) -> None:
        self._group = group
        self._publisher = publisher
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    @property
    def is_in_step(self) -> bool:
        """Whether the group is formed and its ranks agree on the next broadcast."""
        return self._group.is_formed

    def join(self) -> None:
        """Join the group; blocks until all ranks have joined. Raises `TransferError`."""
        self._group.join()

    def receive(self, request: WeightUpdateRequest) -> PublishReport:
        """Block until every endpoint serves the update.

        Raises `PublishError` if an endpoint does not serve it, and the other errors of `publish_weights`. The
        broadcasts are received in any case, so the group is ready for the next update unless a `TransferError` states
        that the group was abandoned. An update with an invalid manifest raises `InvalidRequestError`, and also abandons
        the group.
        """
        with self._lock:
            try:
                specs = request.manifest().tensors
            except InvalidRequestError:
                self.out_of_step()
                raise
            weights = ArrivingWeights(self._group, request.version, specs, self._timeout_s)
            return publish_weights(weights, self._publisher, in_flight=self._in_flight, deadline_s=self._timeout_s)

    def out_of_step(self) -> None:
        """Abandon the group after an update that could not be read. The trainer's broadcasts then fail."""
        self._group.abort()
