"""A publisher in a process of its own: ``python -m`` with URL, run and token; reads what to publish, a line each.

A line is JSON: ``file`` (safetensors), ``version`` and ``in_flight``. Each is answered by the line ``published``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from inflight.http.kinds import connect_endpoint
from inflight.weights.send.publisher import WeightPublisher
from inflight.weights.transports.process_group import ProcessGroupSender
from tests.real_engines.servers import publish


def main(url: str, run_id: str, token: str) -> None:
    """Publish until the input ends."""
    endpoint = connect_endpoint(url, token=token or None)
    with WeightPublisher([endpoint], ProcessGroupSender(), run_id=run_id) as publisher:
        for line in sys.stdin:
            order = json.loads(line)
            tensors = load_file(Path(order["file"]))
            publish(publisher, tensors, order["version"], in_flight=order["in_flight"])
            print("published", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
