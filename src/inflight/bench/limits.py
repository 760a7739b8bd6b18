"""Measures how fast this machine moves raw bytes by copy, broadcast, socket and file, which limits the transports.

Each function returns the duration of every round in seconds, except for a first round that only warms up.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from inflight.bench.peer import TIMEOUT_S
from inflight.errors import TransferError
from inflight.weights.transports.membership import join_group
from inflight.weights.transports.process_group import ProcessGroupSender


def copy_s(size_bytes: int, num_rounds: int) -> list[float]:
    """Return how long, in seconds, each round took to copy the bytes in memory."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    return _timed(lambda: target.copy_(source), num_rounds)


def broadcast_s(sizes: Sequence[int], num_rounds: int) -> list[float]:
    """Return how long, in seconds, each round took to broadcast tensors of these sizes over gloo to one process.

    A round ends with a barrier.
    """
    sender = ProcessGroupSender()
    (spec,) = sender.specs("limit", [1], TIMEOUT_S)
    job = {"what": "broadcast", "spec": spec.model_dump(), "sizes": list(sizes), "num_rounds": num_rounds + 1}
    with _peer(job):
        group: Any = join_group(spec, 0, spec.master_address).raw
        tensors = [torch.ones(size, dtype=torch.uint8) for size in sizes]

        def once() -> None:
            for tensor in tensors:
                group.broadcast(tensor, 0, timedelta(seconds=TIMEOUT_S)).wait()
            group.barrier().wait()

        seconds = _timed(once, num_rounds)
    sender.abort()
    return seconds


def socket_s(size_bytes: int, num_rounds: int) -> list[float]:
    """Return how long, in seconds, each round took to send the bytes over a socket to another process on this host."""
    content = memoryview(bytearray(size_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        port = listener.getsockname()[1]
        job = {"what": "stream", "port": port, "size_bytes": size_bytes, "num_rounds": num_rounds + 1}
        with _peer(job):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(TIMEOUT_S)

                def once() -> None:
                    connection.sendall(content)
                    if not connection.recv(1):
                        raise TransferError("the other end of the socket was closed")

                return _timed(once, num_rounds)


def file_s(size_bytes: int, num_rounds: int, directory: Path | None = None) -> list[float]:
    """Return how long, in seconds, each round took to write the bytes to a file, sync it to disk, and read it again."""
    content = bytearray(size_bytes)
    with tempfile.TemporaryDirectory(dir=directory) as parent:
        path = Path(parent) / "limit"

        def once() -> None:
            with path.open("wb", buffering=0) as file:
                file.write(content)
                os.fsync(file.fileno())
            with path.open("rb", buffering=0) as file:
                file.readinto(content)

        return _timed(once, num_rounds)


def _timed(call: Callable[[], object], num_rounds: int) -> list[float]:
    seconds = []
    for _ in range(num_rounds + 1):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


@contextlib.contextmanager
def _peer(job: dict[str, Any]) -> Iterator[None]:
    """Run the other end while the context is open; kill it if it does not end soon afterwards."""
    command = [sys.executable, "-m", "inflight.bench.peer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.close()
            yield
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT_S)
        finally:
            process.kill()
