"""Weights by one broadcast per bucket over a private gloo or NCCL group; torch's default group is never touched.

The sender is rank 0 and hosts the store, which binds to the given address only. Gloo cannot interrupt a pending
operation, so each carries its own timeout and its caller must be able to leave it behind (see
`inflight.weights.threads`); NCCL operations end when the group is aborted.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.session import transfer_failed
from inflight.wire import ProcessGroupSpec, TensorSpec

Backend = Literal["gloo", "nccl"]


class ProcessGroupSender:
    """Trainer rank 0's end; satisfies `WeightSender`. ``address`` is what endpoints connect to."""

    def __init__(self, backend: Backend = "gloo", address: str = "127.0.0.1") -> None:
        self._backend: Backend = backend
        self._address = address
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._store: Any = None
        self._group: Any = None
        self._group_name = ""
        self._world_size = 0
        self._timeout_s = 0.0

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> list[ProcessGroupSpec]:
        """See `WeightSender.specs`. Raises `TransferError` if the address cannot be bound."""
        self.abort()
        self._group_name = f"inflight-{uuid.uuid4().hex[:12]}"
        self._world_size = 1 + sum(num_ranks)
        self._timeout_s = timeout_s
        try:
            listener = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
            listener.bind((self._address, 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                self._address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise transfer_failed(error, f"hosting the weight group's store on {self._address}") from error
        ranks = [1 + sum(num_ranks[:i]) for i in range(len(num_ranks))]
        return [
            ProcessGroupSpec(
                run_id=run_id,
                backend=self._backend,
                group_name=self._group_name,
                master_address=self._address,
                master_port=port,
                rank=rank,
                world_size=self._world_size,
                timeout_s=timeout_s,
            )
            for rank in ranks
        ]

    def join(self) -> None:
        """See `WeightSender.join`."""
        self._group = _form_group(
            self._backend, self._store, self._group_name, 0, self._world_size, self._address, self._timeout_s
        )

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        """See `WeightSender.send`. A return means that the bytes left; that they arrived, only the receiver knows."""
        if self._group is None:
            raise TransferError("no weight group is formed")
        flat = pack(bucket.tensors).to(self._device)
        _broadcast(self._group, flat, timeout_s, f"sending bucket {bucket.index}")

    def abort(self) -> None:
        """See `WeightSender.abort`."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()


class ProcessGroupReceiver:
    """One endpoint rank's end; satisfies `WeightReceiver`. Tensors arrive on the CPU (gloo) or on ``device`` (NCCL)."""

    def __init__(self, spec: ProcessGroupSpec, device: torch.device | None = None) -> None:
        self._spec = spec
        self._device = torch.device("cpu") if spec.backend == "gloo" else (device or torch.device("cuda"))
        self._group: Any = None

    def join(self) -> None:
        """See `WeightReceiver.join`."""
        spec = self._spec
        try:
            local_address = _address_towards(spec.master_address, spec.master_port)
            store = dist.TCPStore(
                spec.master_address, spec.master_port, is_master=False, timeout=timedelta(seconds=spec.timeout_s)
            )
        except (OSError, RuntimeError) as error:
            where = f"{spec.master_address}:{spec.master_port}"
            raise transfer_failed(error, f"reaching the weight group's store at {where}") from error
        self._group = _form_group(
            spec.backend, store, spec.group_name, spec.rank, spec.world_size, local_address, spec.timeout_s
        )

    def receive(self, specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        """See `WeightReceiver.receive`."""
        if self._group is None:
            raise TransferError("no weight group is formed")
        flat = torch.empty(sum(spec.size_bytes for spec in specs), dtype=torch.uint8, device=self._device)
        _broadcast(self._group, flat, timeout_s, "receiving a bucket")
        return unpack(flat, specs)

    def abort(self) -> None:
        """See `WeightReceiver.abort`."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of the tensors one after another, uint8 [sum of sizes]; no copy if there is only one."""
    flats = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def unpack(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return the tensors that `pack` joined: views, except where a mix of dtypes left one misaligned."""
    tensors, offset = [], 0
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        part = flat[offset : offset + spec.size_bytes]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        tensors.append(part.view(dtype).reshape(spec.shape))
        offset += spec.size_bytes
    return tensors


def _form_group(
    backend: Backend, store: Any, name: str, rank: int, world_size: int, address: str, timeout_s: float
) -> Any:
    timeout = timedelta(seconds=timeout_s)
    prefixed = dist.PrefixStore(name, store)
    try:
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
        gloo_options = dist.ProcessGroupGloo._Options()
        gloo_options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo_options._timeout = timeout
        return dist.ProcessGroupGloo(prefixed, rank, world_size, gloo_options)
    except RuntimeError as error:
        raise transfer_failed(error, f"rank {rank} joining the weight group of {world_size} ranks") from error


def _broadcast(group: Any, flat: torch.Tensor, timeout_s: float, what: str) -> None:
    try:
        group.broadcast(flat, 0, timedelta(seconds=timeout_s)).wait()
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
    except RuntimeError as error:
        raise transfer_failed(error, what) from error


def _address_towards(address: str, port: int) -> str:
    """Return the local address that packets to ``address`` leave from, so that nothing wider is bound."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
