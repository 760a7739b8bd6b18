"""Updates to store, and what tests of the transports that store them need beside."""

from __future__ import annotations

import gc
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import encode, pack
from inflight.weights.transports import device_memory
from inflight.weights.transports.bucket_files import StoredUpdate
from inflight.weights.transports.device_memory import HostMemory
from inflight.weights.transports.files import DirectoryReceiver
from inflight.weights.transports.installed import IpcTransport
from inflight.wire import (
    BucketSpec,
    DirectorySpec,
    Encoding,
    InFlightPolicy,
    Manifest,
    TensorSpec,
    UpdateRef,
    WeightUpdate,
)
from tests.gates import SOON_S

MIXED = (
    TensorSpec(name="model.norm", dtype="bfloat16", shape=(3,)),
    TensorSpec(name="model.wide", dtype="float32", shape=(5, 7)),
    TensorSpec(name="model.none", dtype="float32", shape=(0, 4)),
    TensorSpec(name="model.scalar", dtype="float64", shape=()),
    TensorSpec(name="model.half", dtype="float16", shape=(2, 2, 3)),
    TensorSpec(name="head.none", dtype="bfloat16", shape=(0,)),
    TensorSpec(name="head.weight", dtype="bfloat16", shape=(1000, 33)),
)
"""Seven tensors of four dtypes, two of them empty, some of them not aligned where they lie."""

CUTS = (0, 2, 5, 6, 7)
"""Four buckets; the third holds nothing."""


def share_host_memory(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let ``ipc`` share the host's memory in this process, and servers on the CPU declare it."""
    replace(device_memory, "CudaMemory", HostMemory)
    replace(IpcTransport, "needs_gpu", False)


def payload(size_bytes: int) -> TensorSpec:
    return TensorSpec(name="payload", dtype="uint8", shape=(size_bytes,))


def make_update(
    version: int = 1,
    *,
    run_id: str = "run",
    session_id: str = "s",
    specs: Sequence[TensorSpec] = MIXED,
    cuts: Sequence[int] = CUTS,
    encodings: tuple[Encoding, ...] = (),
) -> WeightUpdate:
    buckets = tuple(
        BucketSpec(index=i, start=start, stop=stop, size_bytes=sum(s.size_bytes for s in specs[start:stop]))
        for i, (start, stop) in enumerate(pairwise(cuts))
    )
    return WeightUpdate(
        run_id=run_id,
        version=version,
        session_id=session_id,
        manifest=Manifest(tensors=tuple(specs)),
        buckets=buckets,
        in_flight=InFlightPolicy.KEEP,
        encodings=encodings,
        deadline_s=5.0,
        lease_s=5.0,
    )


def plain_update(
    version: int = 1, *, size_bytes: int = 1 << 16, num_buckets: int = 2, session_id: str = "s"
) -> WeightUpdate:
    """Buckets of one uint8 tensor each."""
    specs = [TensorSpec(name=f"w{i}", dtype="uint8", shape=(size_bytes,)) for i in range(num_buckets)]
    return make_update(version, specs=specs, cuts=range(num_buckets + 1), session_id=session_id)


def make_buckets(update: WeightUpdate, seed: int = 0) -> list[WeightBucket]:
    """Random bytes as tensors that lie side by side, bucket by bucket."""
    generator = torch.Generator().manual_seed(seed * 1000 + update.version)
    buckets = []
    for bucket in update.buckets:
        specs = update.manifest.tensors[bucket.start : bucket.stop]
        tensors = []
        for spec in specs:
            raw = torch.randint(0, 256, (spec.size_bytes,), dtype=torch.uint8, generator=generator)
            tensors.append(raw.view(getattr(torch, spec.dtype)).reshape(spec.shape))
        buckets.append(WeightBucket(bucket.index, specs, tuple(tensors)))
    return buckets


def encoded(update: WeightUpdate, bucket: WeightBucket) -> WeightBucket:
    """The same bucket with its wide weights rounded to bfloat16."""
    flat = encode(bucket.tensors, bucket.specs, "bfloat16") if bucket.tensors else torch.empty(0, dtype=torch.uint8)
    return WeightBucket(bucket.index, (payload(flat.numel()),), (flat,), "bfloat16")


def raw_bytes(bucket: WeightBucket) -> torch.Tensor:
    return pack(bucket.tensors)


def publish(sender, update: WeightUpdate, buckets: Sequence[WeightBucket]) -> None:  # type: ignore[no-untyped-def]
    sender.begin(update)
    for bucket in buckets:
        sender.send(bucket, SOON_S)


def receive(receiver, update: WeightUpdate, buckets: Sequence[WeightBucket]) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    receiver.begin(update.ref)
    return [receiver.receive((payload(raw_bytes(bucket).numel()),), SOON_S)[0] for bucket in buckets]


def file_reader(directory: Path, run_id: str) -> DirectoryReceiver:
    spec = DirectorySpec(run_id=run_id, transport="file", directory=str(directory), timeout_s=5.0)
    return DirectoryReceiver(spec)


def latest(directory: Path, run_id: str) -> UpdateRef | None:
    return file_reader(directory, run_id).latest(5.0)


def read_manifest(directory: Path, ref: UpdateRef) -> StoredUpdate:
    return file_reader(directory, ref.run_id).read_manifest(ref, 5.0)


def lease(directory: Path, ref: UpdateRef, name: str) -> None:
    file_reader(directory, ref.run_id).lease(ref, name, 5.0)


def assert_same(received: Sequence[torch.Tensor], buckets: Sequence[WeightBucket]) -> None:
    assert len(received) == len(buckets)
    for flat, bucket in zip(received, buckets, strict=True):
        assert torch.equal(flat, raw_bytes(bucket)), f"bucket {bucket.index}"


def open_handles() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mappings(of: str) -> int:
    gc.collect()
    return sum(of in line for line in Path("/proc/self/maps").read_text().splitlines())


def doomed_sender(transport: str, directory: Path) -> subprocess.Popen[str]:
    """A process that opens a group, stores one bucket of two and then waits to be killed; it prints its directory."""
    code = f"""
import sys, time
from pathlib import Path
from typing import Any
import torch
from inflight.weights.transports import make_sender
from tests.weights.stored import make_buckets, plain_update
sender = make_sender({transport!r}, directory=Path({str(directory)!r}))
spec = sender.specs("run", [1], 10.0)[0]
update = plain_update()
sender.begin(update)
sender.send(make_buckets(update)[0], 10.0)
print(spec.directory, flush=True)
time.sleep(60)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


class CuttingProxy:
    """A TCP proxy that cuts each of the first connections after so many bytes of the answer, then lets all through.

    ``stall`` keeps a connection open in place of cutting it.
    """

    def __init__(self, port: int, cuts: Sequence[int], *, stall: bool = False) -> None:
        self._target = port
        self._cuts = list(cuts)
        self._stall = stall
        self.num_cut = 0
        self.num_bytes = 0
        """Of all answers."""
        self._is_closed = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            readable, _, _ = select.select([self._listener], [], [], 0.05)
            if self._is_closed:
                return
            if not readable:
                continue
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [near, far]
            thread = threading.Thread(target=self._pass_on, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        limit = self._cuts.pop(0) if self._cuts else None
        passed = 0
        try:
            while not self._is_closed:
                readable, _, _ = select.select([near, far], [], [], 0.05)
                for sock in readable:
                    data = sock.recv(65536)
                    if not data:
                        return
                    if sock is near:
                        far.sendall(data)
                        continue
                    self.num_bytes += len(data)
                    if limit is not None and passed + len(data) > limit:
                        near.sendall(data[: limit - passed])
                        self.num_cut += 1
                        while self._stall and not self._is_closed:
                            select.select([], [], [], 0.05)
                        return
                    near.sendall(data)
                    passed += len(data)
        except OSError:
            return
        finally:
            near.close()
            far.close()

    def close(self) -> None:
        self._is_closed = True
        for thread in self._threads:
            thread.join(5.0)
        self._listener.close()
