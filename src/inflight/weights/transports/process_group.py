"""Weights by one broadcast per bucket over a private gloo or NCCL group; torch's default group is never touched.

The sender is rank 0 and hosts the store, which binds to the given address only. Taking the store down ends every
pending join, on either side. Gloo cannot interrupt a pending operation: callers that give up a group abandon the
operation (see `inflight.weights.threads`), and it ends by its own timeout. Aborting the group ends NCCL operations.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed

from inflight.contracts import ReceivesAhead, WeightReceiver, WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.memory import ReusedMemory
from inflight.weights.packing import pack, unpack
from inflight.weights.session import refuse_stray, transfer_failed
from inflight.weights.threads import result_unless, run_unless, started
from inflight.weights.transports.store import GIVEN_UP, give_up
from inflight.wire import ProcessGroupSpec, TensorSpec, UpdateRef, WeightUpdate

dist: Any = torch.distributed  # its stubs leave out the stores and Gloo's options
GroupTransport = Literal["gloo", "nccl"]
_JOINING = "joining the weight group"
_GRACE_S = 0.5
"""How much longer a call may take than its timeout. torch's store may retry for twice the timeout, and is cut off; else
its own error says more."""


class ProcessGroupSender(WeightSender):
    """Trainer rank 0's end. Endpoints connect to ``address``."""

    def __init__(self, transport: GroupTransport = "gloo", address: str = "127.0.0.1") -> None:
        self._transport: GroupTransport = transport
        self._address = address
        self._device = torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else torch.device("cpu")
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
        hosted, port = _host_store(self._address, timeout_s)
        group_name = f"inflight-{uuid.uuid4().hex[:12]}"
        specs = [
            ProcessGroupSpec(
                run_id=run_id,
                transport=self._transport,
                group_name=group_name,
                master_address=self._address,
                master_port=port,
                rank=1 + sum(num_ranks[:i]),
                world_size=1 + sum(num_ranks),
                timeout_s=timeout_s,
            )
            for i in range(len(num_ranks))
        ]
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
        run_unless(given_up, lambda: self._form(opened), _JOINING, opened.timeout_s + _GRACE_S)

    def _form(self, opened: ProcessGroupSpec) -> None:
        group = join_group(opened, 0, self._address)
        with self._lock:
            if self._opened is opened:
                self._group = group
                return
        group.abort()
        raise TransferError(GIVEN_UP)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """On return the bytes have left; only the receiver knows that they arrived."""
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
            give_up(self._given_up)
        if group is not None:
            group.abort()


class ProcessGroupReceiver(WeightReceiver, ReceivesAhead):
    """One endpoint rank's end. Tensors arrive on the CPU (gloo) or on ``device`` (NCCL)."""

    def __init__(self, spec: ProcessGroupSpec, device: torch.device | None = None) -> None:
        self._spec = spec
        self._device = torch.device("cpu") if spec.transport == "gloo" else (device or torch.device("cuda"))
        self._lock = threading.Lock()
        self._given_up: Future[str] = Future()
        self._group: Any = None
        self._memory = ReusedMemory()
        self._ahead: tuple[torch.Tensor, Future[None]] | None = None

    def join(self) -> None:
        spec = self._spec
        what = f"{_JOINING} through its store at {spec.master_address}:{spec.master_port}"
        run_unless(self._given_up, self._form, what, spec.timeout_s + _GRACE_S)

    def _form(self) -> None:
        spec = self._spec
        try:
            local_address = _address_towards(spec.master_address, spec.master_port)
        except OSError as error:
            raise transfer_failed(error, f"finding a route to {spec.master_address}") from error
        group = join_group(spec, spec.rank, local_address)
        with self._lock:
            if not self._given_up.done():
                self._group = group
                return
        group.abort()
        raise TransferError(GIVEN_UP)

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
            raise TransferError(f"{what} failed: a bucket of {flat.numel()} bytes was due, not one of {size_bytes}")
        try:
            result_unless(self._given_up, arriving, what, timeout_s)
        except RuntimeError as error:
            raise transfer_failed(error, what) from error
        finally:
            del ahead, arriving  # the error's traceback holds this frame, and with it the group
        return unpack(flat, specs)

    def receive_ahead(self, specs: Sequence[TensorSpec], timeout_s: float) -> None:
        """Does nothing over NCCL."""
        group = self._group
        if group is None or self._spec.transport != "gloo":
            return
        flat = self._buffer(sum(spec.size_bytes for spec in specs))
        self._ahead = flat, started(_broadcasting(group, flat, timeout_s), "receiving a bucket ahead")

    def begin(self, ref: UpdateRef) -> None:
        self._memory.begin()
        self._ahead = None

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        if self._device.type == "cuda":  # torch caches its memory already
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        return self._memory.take(size_bytes)

    def abort(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            give_up(self._given_up)
        if group is not None:
            group.abort()


class AnnouncedRanks:
    """Ranks of an engine that joins and receives by itself, whose own waits have no deadline and cannot be ended.

    Announces ``spec.rank`` and the ranks after it on the engine's behalf. Once `meet` returns, every other rank is
    there and joining; once `await_send` returns, the sender is sending. Calling `give_up` from another thread ends both
    early, with `TransferError`.
    """

    def __init__(self, spec: ProcessGroupSpec, num_ranks: int) -> None:
        self._spec = spec
        self._ranks = range(spec.rank, spec.rank + num_ranks)
        self._given_up: Future[str] = Future()
        self._store: Any = None

    def meet(self) -> None:
        """Block until all ranks have come. Raises `TransferError` after ``spec.timeout_s``."""
        spec = self._spec
        what = f"{_JOINING} through its store at {spec.master_address}:{spec.master_port}"
        self._store = run_unless(self._given_up, lambda: _meet(spec, self._ranks), what, spec.timeout_s + _GRACE_S)

    def await_send(self, index: int, timeout_s: float) -> None:
        """Block until the sender sends bucket ``index`` of this group, counted from 0."""
        store, what = self._store, "waiting for the sender"
        if store is None:
            raise TransferError("no weight group is formed")
        try:
            run_unless(
                self._given_up,
                lambda: store.wait([_sending(index)], _timeout_of(timeout_s)),
                what,
                timeout_s + _GRACE_S,
            )
        except RuntimeError as error:
            raise transfer_failed(error, what) from error

    def give_up(self) -> None:
        """End what is pending. Returns at once. Idempotent."""
        give_up(self._given_up)


def _sending(index: int) -> str:
    return f"sending/{index}"


def _broadcast(group: Any, flat: torch.Tensor, timeout_s: float, given_up: Future[str], what: str) -> None:
    try:
        if flat.is_cuda:
            group.broadcast(flat, 0, _timeout_of(timeout_s)).wait()
            torch.cuda.current_stream(flat.device).synchronize()
        else:
            run_unless(given_up, _broadcasting(group, flat, timeout_s), what)
    except RuntimeError as error:
        raise transfer_failed(error, what) from error


def _broadcasting(group: Any, flat: torch.Tensor, timeout_s: float) -> Callable[[], None]:
    """Return a call that broadcasts. It holds the group, because dropping the group would wait for the operation."""
    return lambda: group.broadcast(flat, 0, _timeout_of(timeout_s)).wait()


def _host_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """Return a store that listens on ``address``, and its port. Raises `TransferError` if it cannot be bound."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((address, 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            hosted = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=os.dup(listener.fileno()),
            )
    except (OSError, RuntimeError) as error:
        raise transfer_failed(error, f"hosting the weight group's store on {address}") from error
    return hosted, port


def _meet(spec: ProcessGroupSpec, ranks: Sequence[int]) -> Any:
    """Announce ``ranks`` in the group's store, and return the store once all ranks are announced."""
    deadline = time.monotonic() + spec.timeout_s
    timeout = _timeout_of(spec.timeout_s)
    where = f"{spec.master_address}:{spec.master_port}"
    try:
        store = dist.TCPStore(spec.master_address, spec.master_port, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise transfer_failed(error, f"reaching the weight group's store at {where}") from error
    prefixed = dist.PrefixStore(spec.group_name, store)
    try:
        for rank in ranks:
            prefixed.set(f"here/{rank}", "")  # NCCL waits for no rank before its first operation
        here = [f"here/{other}" for other in range(spec.world_size)]
        prefixed.wait(here, _timeout_of(deadline - time.monotonic()))
    except RuntimeError as error:
        raise transfer_failed(error, f"rank {ranks[0]} joining the weight group of {spec.world_size} ranks") from error
    return prefixed


def join_group(spec: ProcessGroupSpec, rank: int, address: str) -> Any:
    """Return the group that ``spec`` describes, joined as ``rank`` from local ``address`` once all ranks have come."""
    prefixed = _meet(spec, [rank])
    timeout = _timeout_of(spec.timeout_s)
    # The prefix that torch's own groups use, so that ranks that torch joins (SGLang's) meet ours.
    device = "cuda" if spec.transport == "nccl" else "cpu"
    keys = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{spec.group_name}/", prefixed))
    try:
        if spec.transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(keys, rank, spec.world_size, options)
        gloo_options = dist.ProcessGroupGloo._Options()
        gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo_options._timeout = timeout
        return dist.ProcessGroupGloo(keys, rank, spec.world_size, gloo_options)
    except RuntimeError as error:
        raise transfer_failed(error, f"rank {rank} joining the weight group of {spec.world_size} ranks") from error


def _timeout_of(timeout_s: float) -> timedelta:
    """Return a timeout of at least a millisecond: Gloo counts whole milliseconds, and takes 0 for no timeout."""
    return timedelta(seconds=max(timeout_s, 0.001))


def _address_towards(address: str, port: int) -> str:
    """Return the local address from which packets to ``address`` leave, so that nothing wider is bound."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
