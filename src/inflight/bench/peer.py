"""The other end of a raw transfer, in its own process: ``python -m inflight.bench.peer``, with a job as JSON on stdin.

It repeatedly receives the same raw bytes, to measure the limit with which a transport is compared.
"""

from __future__ import annotations

import json
import socket
import sys
from datetime import timedelta
from typing import Any

import torch

from inflight.weights.transports.membership import join_group
from inflight.wire import ProcessGroupSpec

TIMEOUT_S = 60.0


def receive_broadcasts(spec: ProcessGroupSpec, sizes: list[int], num_rounds: int) -> None:
    """Join as rank 1 and receive broadcasts of tensors of these sizes, ``num_rounds`` times."""
    group: Any = join_group(spec, 1, spec.master_address).raw
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for _ in range(num_rounds):
        for tensor in tensors:
            group.broadcast(tensor, 0, timedelta(seconds=TIMEOUT_S)).wait()
        group.barrier().wait()


def receive_stream(port: int, size_bytes: int, num_rounds: int) -> None:
    """Read ``size_bytes`` from a socket on this host ``num_rounds`` times, and answer each time with one byte."""
    content = memoryview(bytearray(size_bytes))
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        for _ in range(num_rounds):
            start = 0
            while start < size_bytes:
                num_read = connection.recv_into(content[start:])
                if num_read == 0:
                    return
                start += num_read
            connection.sendall(b".")


def main() -> None:
    """Run the job that the first line of the input specifies."""
    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    if job["what"] == "broadcast":
        receive_broadcasts(ProcessGroupSpec.model_validate(job["spec"]), job["sizes"], job["num_rounds"])
    else:
        receive_stream(job["port"], job["size_bytes"], job["num_rounds"])


if __name__ == "__main__":
    main()
