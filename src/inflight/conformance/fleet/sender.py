"""A trainer rank's end of a transport, with faults injected into buckets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from inflight.conformance.fleet.plan import Fault, Kind
from inflight.contracts import WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.wire import TransportSpec, WeightUpdate

Due = Callable[[str, int], Fault | None]
"""Returns the fault, if any, to inject into a step (``open``, ``join``, ``begin``, ``send``, ``end``) of a bucket."""


class FaultySender(WeightSender):
    """Sends buckets with ``inner``, which may store them in ``directory``, and injects the faults that are ``due``."""

    def __init__(self, inner: WeightSender, directory: Path, due: Due, is_dead: threading.Event) -> None:
        self._inner = inner
        self._directory = directory
        self._due = due
        self._is_dead = is_dead
        self._update: WeightUpdate | None = None

    @property
    def is_collective(self) -> bool:
        return self._inner.is_collective

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> Sequence[TransportSpec]:
        self._require_alive()
        self._delay(self._due("open", 0))
        return self._inner.specs(run_id, num_ranks, timeout_s)

    def join(self) -> None:
        self._require_alive()
        self._delay(self._due("join", 0))
        self._inner.join()

    def begin(self, update: WeightUpdate) -> None:
        self._require_alive()
        self._delay(self._due("begin", 0))
        self._update = update
        self._inner.begin(update)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        self._require_alive()
        fault = self._due("send", bucket.index)
        kind = None if fault is None else fault.kind
        self._delay(fault)
        if kind is Kind.KILL_TRAINER:
            self._is_dead.set()
            self.abort()
            raise TransferError("this trainer is dead")
        if self.is_collective:
            if kind is Kind.CORRUPT:
                bucket = _damaged(bucket)
            elif fault is not None and kind is Kind.CUT:
                threading.Timer(fault.seconds / 4, self._inner.abort).start()
            self._inner.send(bucket, timeout_s)
            return
        self._inner.send(bucket, timeout_s)
        if fault is not None and kind in (Kind.CUT, Kind.CORRUPT):
            self._spoil(bucket.index, fault)

    def end(self, *, is_done: bool) -> None:
        if not self._is_dead.is_set():
            self._delay(self._due("end", 0))
            self._inner.end(is_done=is_done)

    def abort(self) -> None:
        """Abort the transfer. If the trainer is dead, the buckets that it has stored remain."""
        if self._inner.is_collective or not self._is_dead.is_set():
            self._inner.abort()

    def _require_alive(self) -> None:
        if self._is_dead.is_set():
            raise TransferError("this trainer is dead")

    def _delay(self, fault: Fault | None) -> None:
        if fault is not None and fault.kind in (Kind.DELAY, Kind.TAKE_OVER):
            time.sleep(fault.seconds)

    def _spoil(self, index: int, fault: Fault) -> None:
        """Damage a stored bucket: change a byte, or truncate or remove the file."""
        assert self._update is not None
        session = f"{self._update.version}-{self._update.session_id}"
        record = next(iter(self._directory.rglob(f"{session}.{index:05d}.json")), None)
        if record is not None:  # shared memory: the record specifies where in the arena the bucket is
            if fault.kind is Kind.CUT:
                record.unlink()
                return
            said = json.loads(record.read_text())
            _flip(record.with_name(said["arena"]), said["offset"] + said["size_bytes"] // 2)
            return
        file = next(path for path in self._directory.rglob(f"{index:05d}.safetensors") if path.parent.name == session)
        if fault.kind is Kind.CORRUPT:
            _flip(file, file.stat().st_size - 5)
        elif fault.num_calls % 2:
            file.unlink()
        else:
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x15]))


def _damaged(bucket: WeightBucket) -> WeightBucket:
    """Return a copy with one byte changed."""
    tensors = [tensor.clone() for tensor in bucket.tensors]
    tensors[-1].view(-1).view(torch.uint8)[-1] ^= 0x15
    return replace(bucket, tensors=tuple(tensors))
