"""Weights through one broadcast per bucket over a private gloo or NCCL group. torch's default group is never used.

The sender is rank 0 and hosts the store through which the ranks meet (`inflight.weights.transports.membership`). Sender
and receiver are the same for both backends; `inflight.weights.transports.groups` contains the differences.
"""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Literal

import torch

from inflight.base.threads import result_unless_abandoned, run_unless_abandoned, start_in_thread
from inflight.contracts import ReceivesAhead, SendsFromDevice, WeightReceiver, WeightSender
from inflight.errors import ConfigError, TransferError, transfer_error
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import pack, unpack
from inflight.weights.encode.buckets import refuse_stray
from inflight.weights.encode.transit import ReusedMemory, on_weight_stream
from inflight.weights.transports.groups import GLOO, GRACE_S, NCCL, CollectiveGroup, GroupKind, local_address_for
from inflight.weights.transports.key_store import HostedKeys
from inflight.weights.transports.membership import JOINING, announce_send, join_group
from inflight.weights.transports.store import ABANDONED, abandon
from inflight.wire import ProcessGroupSpec, TensorSpec, UpdateRef, WeightUpdate

GroupTransport = Literal["gloo", "nccl"]
_KINDS: Mapping[GroupTransport, GroupKind] = {"gloo": GLOO, "nccl": NCCL}


class ProcessGroupSender(WeightSender, SendsFromDevice):
    """The sender of trainer rank 0. Endpoints connect to ``address``. ``kind`` replaces the transport's kind of group.

    Raises `ConfigError` if the transport needs a GPU and torch sees none.
    """

    def __init__(
        self, transport: GroupTransport = "gloo", address: str = "127.0.0.1", kind: GroupKind | None = None
    ) -> None:
        self._transport: GroupTransport = transport
        self._address = address
        self._kind = kind or _KINDS[transport]
        self._device = torch.device("cpu")
        if self._kind.device_type == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError(f"{transport} sends from a GPU, and torch sees none here; use the gloo transport")
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._lock = threading.Lock()
        self._hosted: HostedKeys | None = None
        self._opened: ProcessGroupSpec | None = None
        self._abandoned: Future[str] = Future()
        self._group: CollectiveGroup | None = None
        self._ref: UpdateRef | None = None
        self._num_sent = 0

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[ProcessGroupSpec]:
        """Return one spec per endpoint. Raises `TransferError` if the address cannot be bound."""
        self.abort()
        secret, world_size = secrets.token_hex(32), 1 + sum(num_ranks)
        hosted = HostedKeys(self._address, secret.encode(), world_size)
        group_name = f"inflight-{uuid.uuid4().hex[:12]}"
        specs = [
            ProcessGroupSpec(
                run_id=run_id,
                transport=self._transport,
                group_name=group_name,
                master_address=self._address,
                master_port=hosted.port,
                secret=secret,
                rank=1 + sum(num_ranks[:i]),
                world_size=world_size,
                timeout_s=timeout_s,
            )
            for i in range(len(num_ranks))
        ]
        with self._lock:
            self._hosted, self._opened, self._abandoned, self._num_sent = hosted, specs[0], Future(), 0
        return specs

    @property
    def is_collective(self) -> bool:
        return True

    @property
    def sends_from_device(self) -> bool:
        return self._kind.sends_from_device

    def begin(self, update: WeightUpdate) -> None:
        """Begin an update. Nothing is sent, because receivers tell buckets apart by their order."""
        with self._lock:
            self._ref = update.ref

    def end(self, *, is_done: bool) -> None:
        """Do nothing, because nothing is stored."""

    def join(self) -> None:
        with self._lock:
            opened, abandoned = self._opened, self._abandoned
        if opened is None:
            raise TransferError("no weight group is open")
        run_unless_abandoned(abandoned, lambda: self._form(opened), JOINING, opened.timeout_s + GRACE_S)

    def _form(self, opened: ProcessGroupSpec) -> None:
        group = join_group(opened, 0, self._address, self._kind)
        with self._lock:
            if self._opened is opened:
                self._group = group
                return
        group.abort()
        raise TransferError(ABANDONED)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """Send a bucket. On return, its bytes have been sent; only the receivers know whether they arrived."""
        with self._lock:
            refuse_stray(bucket, self._ref)
            group, abandoned = self._group, self._abandoned
            index, self._num_sent = self._num_sent, self._num_sent + 1
        if group is None:
            raise TransferError("no weight group is formed")
        what = f"sending bucket {bucket.index}"
        with on_weight_stream(self._device, after=bucket.ready):
            flat = pack(bucket.tensors).to(self._device)
        try:
            announce_send(group, index)
        except RuntimeError as error:
            raise transfer_error(error, what) from error
        _broadcast(group, flat, timeout_s, abandoned, what)

    def abort(self) -> None:
        with self._lock:
            group, hosted = self._group, self._hosted
            self._group = self._hosted = self._opened = self._ref = None
            abandon(self._abandoned)
        if group is not None:
            group.abort()
        if hosted is not None:
            hosted.close()


class ProcessGroupReceiver(WeightReceiver, ReceivesAhead):
    """The receiver of one endpoint rank.

    Tensors arrive on the CPU (gloo) or on ``device`` (NCCL). ``kind`` has the same meaning as for the sender.
    """

    def __init__(
        self, spec: ProcessGroupSpec, device: torch.device | None = None, kind: GroupKind | None = None
    ) -> None:
        self._spec = spec
        self._kind = kind or _KINDS[spec.transport]
        is_cpu = self._kind.device_type == "cpu"
        self._device = torch.device("cpu") if is_cpu else device or torch.device("cuda", torch.cuda.current_device())
        self._lock = threading.Lock()
        self._abandoned: Future[str] = Future()
        self._group: CollectiveGroup | None = None
        self._memory = ReusedMemory(device)
        self._ahead: tuple[torch.Tensor, Future[None]] | None = None

    def join(self) -> None:
        spec = self._spec
        what = f"{JOINING} through its store at {spec.master_address}:{spec.master_port}"
        run_unless_abandoned(self._abandoned, self._form, what, spec.timeout_s + GRACE_S)

    def _form(self) -> None:
        spec = self._spec
        try:
            local_address = local_address_for(spec.master_address, spec.master_port)
        except OSError as error:
            raise transfer_error(error, f"finding a route to {spec.master_address}") from error
        group = join_group(spec, spec.rank, local_address, self._kind)
        with self._lock:
            if not self._abandoned.done():
                self._group = group
                return
        group.abort()
        raise TransferError(ABANDONED)

    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        group = self._group
        ahead, self._ahead = self._ahead, None
        if group is None:
            raise TransferError("no weight group is formed")
        try:
            return self._receive(group, ahead, specs, timeout_s)
        except TransferError:
            self.abort()  # the next receive would be taken for this one
            raise

    def _receive(
        self,
        group: CollectiveGroup,
        ahead: tuple[torch.Tensor, Future[None]] | None,
        specs: Sequence[TensorSpec],
        timeout_s: float,
    ) -> list[torch.Tensor]:
        what = "receiving a bucket"
        size_bytes = sum(spec.size_bytes for spec in specs)
        if ahead is None:
            flat = self._buffer(size_bytes)
            _broadcast(group, flat, timeout_s, self._abandoned, what)
            return unpack(flat, specs)
        flat, arriving = ahead
        if flat.numel() != size_bytes:
            raise TransferError(f"{what} failed: expected a bucket of {flat.numel()} bytes, not {size_bytes}")
        try:
            result_unless_abandoned(self._abandoned, arriving, what, timeout_s)
        except RuntimeError as error:
            raise transfer_error(error, what) from error
        finally:
            del ahead, arriving  # the error's traceback holds this frame, and with it the group
        return unpack(flat, specs)

    def receive_ahead(self, specs: Sequence[TensorSpec], timeout_s: float) -> None:
        """Start to receive a bucket early over gloo. Over NCCL, do nothing: a waiting kernel would slow sampling."""
        group = self._group
        if group is None or self._kind.sends_from_device:
            return
        flat = self._buffer(sum(spec.size_bytes for spec in specs))
        self._ahead = flat, start_in_thread(group.make_broadcast(flat, timeout_s), "receiving a bucket ahead")

    def begin(self, ref: UpdateRef) -> None:
        self._memory.begin()
        self._ahead = None

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        if self._device.type == "cuda":  # torch caches its memory already
            try:
                with on_weight_stream(self._device):
                    return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError as error:
                raise transfer_error(error, f"staging a bucket of {size_bytes} bytes next to the model") from error
        return self._memory.take(size_bytes)

    def abort(self) -> None:
        with self._lock:
            group, self._group, self._ahead = self._group, None, None
            abandon(self._abandoned)
        if group is not None:
            group.abort()


def _broadcast(group: CollectiveGroup, flat: torch.Tensor, timeout_s: float, abandoned: Future[str], what: str) -> None:
    try:
        run_unless_abandoned(abandoned, group.make_broadcast(flat, timeout_s), what, timeout_s + GRACE_S)
    except RuntimeError as error:
        raise transfer_error(error, what) from error
