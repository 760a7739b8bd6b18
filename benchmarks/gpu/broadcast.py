"""A bare broadcast between two processes with torch alone: ``python -m benchmarks.gpu.broadcast BACKEND RANK ...``."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

Backend = Literal["gloo", "nccl"]
_TIMEOUT_S = 60


def broadcast_s(backend: Backend, size_bytes: int, num_rounds: int) -> list[float]:
    """Return the seconds of each round; over NCCL from the first GPU to the second.

    Raises `RuntimeError` with the last words of a process that failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.gpu.broadcast", backend]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port), str(size_bytes), str(num_rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank, process in enumerate(ranks):
            output, errors = process.communicate(timeout=2 * _TIMEOUT_S)
            if process.returncode != 0:
                raise RuntimeError(f"rank {rank} of a {backend} broadcast failed: {' '.join(errors.split()[-40:])}")
            if rank == 0:
                seconds: list[float] = json.loads(output.splitlines()[-1])
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return seconds


def run_rank(backend: Backend, rank: int, port: int, size_bytes: int, num_rounds: int) -> list[float]:
    """Take part in the broadcasts; return the seconds of each round but the first."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", timedelta(seconds=_TIMEOUT_S), world_size=2, rank=rank)
    tensor = torch.full((size_bytes,), rank, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(num_rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(tensor, 0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()  # rank 0 may be done when its bytes have left
        seconds.append(time.perf_counter() - started)
    assert not tensor.any(), "rank 0 sent zeros"
    dist.destroy_process_group()
    return seconds[1:]


if __name__ == "__main__":
    print(json.dumps(run_rank(sys.argv[1], *map(int, sys.argv[2:]))))  # type: ignore[arg-type]
