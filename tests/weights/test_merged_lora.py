"""LoRAs on endpoints that take none: the publisher sends the weights that they change, merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inflight.contracts import MergingLoraSource, PartialWeightSource
from inflight.errors import UnsupportedError
from inflight.weights.receive.base_weights import BaseWeights
from inflight.weights.send.merged_lora import MergedLora
from tests.weights.lora import lora_of, merged_with
from tests.weights.test_partial_updates import OneServer
from tests.weights.workers import LORA, LoraWorker


class MergingWorker(LoraWorker):
    """Sends a LoRA, or merges it into the checkpoint of a directory."""

    path: Path
    names: list[str]

    def merged(self, bucket_bytes: int) -> PartialWeightSource:
        base = BaseWeights(str(self.path), torch.float32)
        return MergedLora(self, base, self.names, "float32", bucket_bytes)


@pytest.fixture
def fleet(model_dir: Path) -> Iterator[OneServer]:
    made = OneServer(model_dir)
    with made.publisher:
        yield made


def worker_of(fleet: OneServer, version: int) -> MergingWorker:
    worker = MergingWorker(lora_of(fleet.tensors, ["q_proj", "down_proj"], 4, seed=version), version)
    worker.path, worker.names = fleet.path, list(fleet.tensors)
    assert isinstance(worker, MergingLoraSource)
    return worker


def test_an_endpoint_without_loras_gets_the_weights_under_one_from_then_on(fleet: OneServer) -> None:
    """Whatever the buckets: merged weights travel in other ones than the halves that they are made of."""
    without = {e: can.model_copy(update={"lora": False}) for e, can in fleet.publisher.endpoints.items()}
    for version, bucket_bytes in ((1, 10_000), (2, 1)):
        worker = worker_of(fleet, version)
        report = fleet.publish(worker, endpoints=without, bucket_bytes=bucket_bytes)
        under = [name for name in fleet.tensors if name.endswith(("q_proj.weight", "down_proj.weight"))]
        assert report.sent_bytes == sum(fleet.tensors[name].nbytes for name in under)
        fleet.assert_serves(merged_with(fleet.tensors, worker.tensors, LORA))
    # An endpoint would add a LoRA to what is merged already.
    worker = worker_of(fleet, 3)
    fleet.publish(worker)
    fleet.assert_serves(merged_with(fleet.tensors, worker.tensors, LORA))


def test_a_lora_travels_alone_where_it_is_declared(fleet: OneServer) -> None:
    worker = worker_of(fleet, 1)
    assert fleet.publish(worker).sent_bytes == sum(tensor.nbytes for tensor in worker.tensors.values())
    fleet.assert_serves(merged_with(fleet.tensors, worker.tensors, LORA))


def test_an_endpoint_that_takes_neither_is_not_asked(fleet: OneServer) -> None:
    neither = {"lora": False, "partial_updates": False}
    less = {e: can.model_copy(update=neither) for e, can in fleet.publisher.endpoints.items()}
    with pytest.raises(UnsupportedError, match="local does not support lora"):
        fleet.publish(worker_of(fleet, 1), endpoints=less)
