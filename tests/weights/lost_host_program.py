"""One rank of a trainer that publishes once, on a host of its own: ``python -m tests.weights.lost_host_program ...``.

Rank 0 writes ``RUN.json`` with how the publish ended; rank 1 makes ``RUN.sent`` once it has sent some parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from inflight.errors import InflightError
from inflight.http.kinds import connect_endpoint
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.send.ranks import PartSender
from inflight.weights.transports import make_sender
from inflight_fsdp import create_worker
from tests.servers import TOKEN
from tests.worker.worker_cases import settings

NUM_PARTS = 3
"""How many parts rank 1 sends before it is noticed."""


def main(folder: Path, run: str, rank: int, address: str, server: str, transport: str, deadline_s: float) -> None:
    routes = json.loads(subprocess.check_output(["ip", "-j", "route", "show", "default"]))
    os.environ["GLOO_SOCKET_IFNAME"] = routes[0]["dev"]
    store = dist.FileStore(str(folder / f"{run}-store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    worker = create_worker(settings(folder / "model", dtype="float32", wire_dtype="float32"))
    own: Any = make_sender(transport, address=address)
    if rank:
        send, num_sent = own.send, 0

        def counted(*arguments: Any) -> None:
            nonlocal num_sent
            send(*arguments)
            num_sent += 1
            if num_sent == NUM_PARTS:
                (folder / f"{run}.sent").touch()

        own.send = counted
        PartSender(worker, own).send(deadline_s)
        return
    with WeightPublisher([connect_endpoint(server, token=TOKEN)], own, run_id="hosts", sharded=worker) as publisher:
        started = time.monotonic()
        try:
            publish_weights(worker, publisher, bucket_bytes=50_000, deadline_s=deadline_s, version=7)
            seen: dict[str, Any] = {"error": None}
        except InflightError as error:
            seen = {"error": f"{type(error).__name__}: {error}"}
        seen["took_s"] = time.monotonic() - started
        (endpoint,) = publisher.endpoints
        version = publisher.run(endpoint.weight_version)
        seen |= {"state": version.state, "version": version.version}
    (folder / f"{run}.tmp").write_text(json.dumps(seen))
    (folder / f"{run}.tmp").rename(folder / f"{run}.json")
    os._exit(0)  # the other rank may be unreachable


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:7], float(sys.argv[7]))
