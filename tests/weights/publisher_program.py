"""A publisher in a process of its own, for tests that kill it: ``python -m tests.weights.publisher_program URL MODEL WAY``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from inflight.weights.buckets import plan_buckets
from inflight.weights.publish import WeightPublisher, publish_weights
from inflight.wire import InFlightPolicy, Manifest, WeightUpdate
from tests.servers import TOKEN
from tests.weights.workers import PlainWorker, checkpoint, silenced

LEASE_S = 1.5


def main(url: str, model: Path, way: str) -> None:
    tensors = checkpoint(model)
    publisher = WeightPublisher.connect([url], run_id=f"doomed {way}", token=TOKEN, connect_timeout_s=30)
    publish_weights(PlainWorker(tensors), publisher)
    worker = PlainWorker(silenced(tensors), version=2)
    if way == "held":
        specs = worker.parameter_specs()
        update = WeightUpdate(
            run_id=publisher.run_id,
            version=2,
            manifest=Manifest(tensors=tuple(specs)),
            buckets=plan_buckets(specs),
            in_flight=InFlightPolicy.KEEP,
            deadline_s=1,
            lease_s=LEASE_S,
        )
        publisher.run(publisher.members[0].request_weight_update, update)
        print("held", flush=True)
        time.sleep(60)
    else:  # the second bucket is asked for while the first one travels

        def on_bucket(index: int) -> None:
            if index == 1:
                time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)

        worker.on_bucket = on_bucket
        publish_weights(worker, publisher, bucket_bytes=21_000_000)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
