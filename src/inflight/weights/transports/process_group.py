"""Weights by one broadcast per bucket over a private gloo or NCCL group; torch's default group is never touched.

The sender is rank 0 and hosts the store, which binds to the given address only; taking the store down ends every join
that is still pending, on either side. Gloo cannot interrupt a pending operation: when a group is given up, its callers
leave the operation behind (see `inflight.weights.threads`), and it ends by its own timeout. NCCL operations end when
the group is aborted.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch
import torch.distributed

from inflight.contracts import ReceivesAhead, WeightReceiver, WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.packing import pack, unpack
from inflight.weights.session import refuse_stray, transfer_failed
from inflight.weights.threads import result_unless, run_unless, started
from inflight.weights.transports.joining import GRACE_S, address_towards, host_store, join_group, meet, timeout_of
from inflight.wire import ProcessGroupSpec, TensorSpec, UpdateRef, WeightUpdate

dist: Any = torch.distributed  # its stubs leave out the stores and Gloo's options
Backend = Literal["gloo", "nccl"]
_GIVEN_UP = "the weight group was given up"
_JOINING = "joining the weight group"


class ProcessGroupSender(WeightSender):
    """Trainer rank 0's end. ``address`` is what endpoints connect to."""

    def __init__(self, backend: Backend = "gloo", address: str = "127.0.0.1") -> None:
        self._backend: Backend = backend
        self._address = address
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._lock = threading.Lock()
        self._hosted: Any = None
        self._opened: ProcessGroupSpec | None = None
        self._given_up: Future[str] = Future()
        self._group: Any = None
        self._ref: UpdateRef | None = None
        self._num_sent = 0

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[ProcessGroupSpec]:
        """Raises `TransferError` if the address cannot be bound."""
        self.abort()
        hosted, port = host_store(self._address, timeout_s)
        ranks = [1 + sum(num_ranks[:i]) for i in range(len(num_ranks))]
        specs = [
            ProcessGroupSpec(
                run_id=run_id,
                backend=self._backend,
                group_name=f"inflight-{uuid.uuid4().hex[:12]}",
                master_address=self._address,
                master_port=port,
                rank=rank,
                world_size=1 + sum(num_ranks),
                timeout_s=timeout_s,
            )
            for rank in ranks
        ]
        name = specs[0].group_name
        specs = [spec.model_copy(update={"group_name": name}) for spec in specs]
        with self._lock:
            self._hosted, self._opened, self._given_up, self._num_sent = hosted, specs[0], Future(), 0
        return specs

    @property
    def is_collective(self) -> bool:
        return True

    def begin(self, update: WeightUpdate) -> None:
        """Receivers tell buckets apart by their order."""
        with self._lock:
            self._ref = update.ref

    def end(self, *, is_done: bool) -> None:
        """Nothing is stored."""

    def join(self) -> None:
        with self._lock:
            opened, given_up = self._opened, self._given_up
        if opened is None:
            raise TransferError("no weight group is open")
        run_unless(given_up, lambda: self._form(opened), _JOINING, opened.timeout_s + GRACE_S)

    def _form(self, opened: ProcessGroupSpec) -> None:
        group = join_group(opened, 0, self._address)
        with self._lock:
            if self._opened is opened:
                self._group = group
                return
        group.abort()
        raise TransferError(_GIVEN_UP)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """A return means that the bytes left; that they arrived, only the receiver knows."""
        with self._lock:
            refuse_stray(bucket, self._ref)
            group, given_up, hosted, opened = self._group, self._given_up, self._hosted, self._opened
            index, self._num_sent = self._num_sent, self._num_sent + 1
        if group is None or opened is None:
            raise TransferError("no weight group is formed")
        flat = pack(bucket.tensors).to(self._device)
        what = f"sending bucket {bucket.index}"
        try:
            dist.PrefixStore(opened.group_name, hosted).set(_sending(index), "")
        except RuntimeError as error:
            raise transfer_failed(error, what) from error
        _broadcast(group, flat, timeout_s, given_up, what)

    def abort(self) -> None:
        with self._lock:
            group, self._group, self._hosted, self._opened, self._ref = self._group, None, None, None, None
            _give_up(self._given_up)
        if group is not None:
            group.abort()


class ProcessGroupReceiver(WeightReceiver, ReceivesAhead):
    """One endpoint rank's end.

    Tensors arrive on the CPU (gloo) or on ``device`` (NCCL).

    Memory on the CPU is kept from one update to the next, see `begin`: pages that the system hands out anew would
    lengthen the hold by more than half.
    """

    def __init__(self, spec: ProcessGroupSpec, device: torch.device | None = None) -> None:
        self._spec = spec
        self._device = torch.device("cpu") if spec.backend == "gloo" else (device or torch.device("cuda"))
        self._lock = threading.Lock()
        self._given_up: Future[str] = Future()
        self._group: Any = None
        self._free: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._ahead: tuple[torch.Tensor, Future[None]] | None = None

    def join(self) -> None:
        spec = self._spec
        what = f"{_JOINING} through its store at {spec.master_address}:{spec.master_port}"
        run_unless(self._given_up, self._form, what, spec.timeout_s + GRACE_S)

    def _form(self) -> None:
        spec = self._spec
        try:
            local_address = address_towards(spec.master_address, spec.master_port)
        except OSError as error:
            raise transfer_failed(error, f"finding the way to {spec.master_address}") from error
        group = join_group(spec, spec.rank, local_address)
        with self._lock:
            if not self._given_up.done():
                self._group = group
                return
        group.abort()
        raise TransferError(_GIVEN_UP)

    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        group, what = self._group, "receiving a bucket"
        ahead, self._ahead = self._ahead, None
        if group is None:
            raise TransferError("no weight group is formed")
        size_bytes = sum(spec.size_bytes for spec in specs)
        if ahead is None:
            flat = self._buffer(size_bytes)
            _broadcast(group, flat, timeout_s, self._given_up, what)
            return unpack(flat, specs)
        flat, arriving = ahead
        if flat.numel() != size_bytes:
            raise TransferError(f"{what} failed: one of {flat.numel()} bytes was due, not of {size_bytes}")
        try:
            result_unless(self._given_up, arriving, what, timeout_s)
        except RuntimeError as error:
            raise transfer_failed(error, what) from error
        finally:
            del ahead, arriving  # the error's traceback holds this frame, and so the group
        return unpack(flat, specs)

    def receive_ahead(self, specs: Sequence[TensorSpec], timeout_s: float) -> None:
        """Does nothing over NCCL."""
        group = self._group
        if group is None or self._spec.backend != "gloo":
            return
        flat = self._buffer(sum(spec.size_bytes for spec in specs))
        self._ahead = flat, started(_broadcasting(group, flat, timeout_s), "receiving a bucket ahead")

    def begin(self, ref: UpdateRef) -> None:
        self._free, self._lent, self._ahead = self._lent, [], None

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        fitting = [i for i, buffer in enumerate(self._free) if buffer.numel() == size_bytes]
        if fitting:
            flat = self._free.pop(fitting[0])
        else:
            flat = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        if not flat.is_cuda:  # CUDA memory is cached by torch already
            self._lent.append(flat)
        return flat

    def abort(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            _give_up(self._given_up)
        if group is not None:
            group.abort()


class AnnouncedRanks:
    """Ranks of an engine that joins and receives by itself, whose own waiting has no deadline and cannot be ended.

    ``spec.rank`` and the ranks after it are announced for it: once `meet` returned every other rank is there and
    joining, and once `await_send` returned the sender is sending. Both end early, with `TransferError`, when `give_up`
    is called from another thread.
    """

    def __init__(self, spec: ProcessGroupSpec, num_ranks: int) -> None:
        self._spec = spec
        self._ranks = range(spec.rank, spec.rank + num_ranks)
        self._given_up: Future[str] = Future()
        self._store: Any = None

    def meet(self) -> None:
        """Block until all ranks came. Raises `TransferError` after ``spec.timeout_s``."""
        spec = self._spec
        what = f"{_JOINING} through its store at {spec.master_address}:{spec.master_port}"
        self._store = run_unless(self._given_up, lambda: meet(spec, self._ranks), what, spec.timeout_s + GRACE_S)

    def await_send(self, index: int, timeout_s: float) -> None:
        """Block until the sender sends the bucket that is number ``index`` in this group, counted from 0."""
        store, what = self._store, "waiting for the sender"
        if store is None:
            raise TransferError("no weight group is formed")
        try:
            run_unless(
                self._given_up, lambda: store.wait([_sending(index)], timeout_of(timeout_s)), what, timeout_s + GRACE_S
            )
        except RuntimeError as error:
            raise transfer_failed(error, what) from error

    def give_up(self) -> None:
        """End what is pending. Returns at once. Idempotent."""
        _give_up(self._given_up)


def _sending(index: int) -> str:
    """Return the key that says that a bucket is being sent."""
    return f"sending/{index}"


def _broadcast(group: Any, flat: torch.Tensor, timeout_s: float, given_up: Future[str], what: str) -> None:
    try:
        if flat.is_cuda:
            group.broadcast(flat, 0, timeout_of(timeout_s)).wait()
            torch.cuda.current_stream(flat.device).synchronize()
        else:
            run_unless(given_up, _broadcasting(group, flat, timeout_s), what)
    except RuntimeError as error:
        raise transfer_failed(error, what) from error


def _broadcasting(group: Any, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
    """Return a call that broadcasts. It holds the group: dropping that would wait for the operation."""

    def broadcast() -> None:
        group.broadcast(flat, 0, timeout_of(timeout_s)).wait()

    return broadcast


def _give_up(given_up: Future[str]) -> None:
    if not given_up.done():
        given_up.set_result(_GIVEN_UP)
