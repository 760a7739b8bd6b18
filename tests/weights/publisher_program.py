"""A publisher in a process of its own, for tests that kill it: ``python -m`` with a URL, a model and a way to die."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.wire import BucketTransfer, EndpointState
from tests.gates import wait_until
from tests.servers import TOKEN
from tests.weights.workers import PlainWorker, announcement_of, checkpoint, silenced

LEASE_S = 5.0
"""Long enough for a test to look at the server twice, on a machine that does other work too."""


def main(url: str, model: Path, way: str) -> None:
    tensors = checkpoint(model)
    publisher = WeightPublisher.connect([url], run_id=f"doomed {way}", token=TOKEN, connect_timeout_s=30)
    publish_weights(PlainWorker(tensors), publisher)
    worker = PlainWorker(silenced(tensors), version=2)
    update = announcement_of(worker, publisher.run_id, lease_s=LEASE_S if way == "paused" else 60)
    (endpoint,) = publisher.endpoints
    publisher.run(endpoint.request_weight_update, update)
    if way == "sending":  # the server waits in the collective for a bucket that never comes
        transfer = BucketTransfer(run_id=update.run_id, version=2, bucket_index=0, timeout_s=60)
        publisher.start(endpoint.receive_weights, transfer)
        wait_until(
            lambda: publisher.run(endpoint.weight_version).state is EndpointState.UPDATING,
            "the server does not receive",
        )
    print(way, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
