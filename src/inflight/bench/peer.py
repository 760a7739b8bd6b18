"""The other end of a raw transfer, in its own process: ``python -m inflight.bench.peer``; it reads JSON on stdin.

It repeatedly receives the same bare bytes, which gives the limit that a transport is compared to.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from inflight.weights.transports.process_group import join_group
from inflight.wire import ProcessGroupSpec

TIMEOUT_S = 60.0


def receive_broadcasts(spec: ProcessGroupSpec, sizes: list[int], num_rounds: int) -> None:
    """Join as rank 1 and receive broadcasts of tensors of these sizes, ``num_rounds`` times."""
    device = device_of(spec, 1)
    group: Any = join_group(spec, 1, spec.master_address).raw
    tensors = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    for _ in range(num_rounds):
        broadcast_all(group, tensors)


def device_of(spec: ProcessGroupSpec, rank: int) -> torch.device:
    """Return the device of a rank: for NCCL a GPU of its own, which becomes this process's current one."""
    if spec.transport != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def broadcast_all(group: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Broadcast tensors from rank 0, and wait until they have arrived everywhere."""
    for tensor in tensors:
        group.broadcast(tensor, 0, timedelta(seconds=TIMEOUT_S)).wait()
    if tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)  # a wait for NCCL only orders the streams
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
    """Do what the first line of the input says."""
    told = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    if told["what"] == "broadcast":
        receive_broadcasts(ProcessGroupSpec.model_validate(told["spec"]), told["sizes"], told["num_rounds"])
    else:
        receive_stream(told["port"], told["size_bytes"], told["num_rounds"])


if __name__ == "__main__":
    main()
