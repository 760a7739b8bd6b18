"""Publish from two trainer ranks that each send the weights that they hold.

inflight tiny-model models/tiny
INFLIGHT_TOKEN=secret inflight serve models/tiny
INFLIGHT_TOKEN=secret torchrun --nproc-per-node 2 examples/every_rank_sends.py models/tiny http://127.0.0.1:8000
"""

import os
import sys
from datetime import timedelta

import torch.distributed as dist

from inflight import PartSender, WeightPublisher, publish_weights
from inflight.weights.transports import make_sender
from inflight_fsdp import create_worker

ADDRESS = "127.0.0.1"  # of this rank's host, as the servers reach it


def main(model: str, url: str, num_publishes: int = 3) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    worker = create_worker({"model_path": model, "device": "cpu"})
    if worker.rank == 0:
        token = os.environ["INFLIGHT_TOKEN"]
        with WeightPublisher.connect(
            [url], run_id="every-rank", token=token, transport="http", address=ADDRESS, sharded=worker
        ) as publisher:
            for version in range(num_publishes):
                report = publish_weights(worker, publisher, version=version)
                print(
                    f"version {report.version}: {report.sent_bytes:,} bytes from {worker.world_size} ranks", flush=True
                )
    else:
        with PartSender(worker, make_sender("http", address=ADDRESS)) as sender:
            for _ in range(num_publishes):
                sender.send()
    worker.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
