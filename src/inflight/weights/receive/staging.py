"""The staged buckets of one update, held in memory next to the model: received, verified, decoded and ready to load.

Staged memory is never written to again. An engine may serve from it, and weights that are kept after the commit are the
base of the next delta, which patches a copy of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inflight.contracts import ReceivesAhead, WeightReceiver
from inflight.errors import TransferError, UpdateRefusedError
from inflight.weights.encode.bucket_bytes import checksum_as, decode, payload_spec, unpack
from inflight.weights.encode.delta import decode_delta, element_runs
from inflight.weights.encode.parts import part_specs, places_of, read_part, views_of, write_part
from inflight.weights.encode.transit import ReusedMemory, finished_on_weight_stream
from inflight.weights.transports.several import SeveralReceivers
from inflight.wire import BucketSpec, BucketTransfer, SentBytes, TensorSpec, UpdateRef, WeightUpdate


@dataclass(slots=True)
class KeptWeights:
    """The bytes of every bucket of a committed update; ``flats[i]`` holds bucket i of its plan."""

    ref: UpdateRef
    buckets: tuple[BucketSpec, ...]
    tensors: tuple[TensorSpec, ...]
    flats: list[torch.Tensor]
    memory: ReusedMemory


class Staging:
    """An update that is arriving.

    ``kept`` comes from an earlier update and provides a possible base and memory to reuse.
    """

    def __init__(self, update: WeightUpdate, kept: KeptWeights | None) -> None:
        self.update = update
        is_base = kept is not None and update.base == kept.ref
        same_plan = kept is not None and (update.buckets, update.manifest.tensors) == (kept.buckets, kept.tensors)
        if is_base and not same_plan:
            raise UpdateRefusedError(
                f"version {update.version} is split into buckets differently from its base; send all weights"
            )
        self._base = kept if is_base else None
        self._memory = ReusedMemory() if kept is None else kept.memory
        self._memory.begin()
        self._flats: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._is_dropped = False

    def receive(
        self, receiver: WeightReceiver, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec]
    ) -> None:
        """Receive, verify and decode one bucket. Blocks.

        If this raises `TransferError`, no part of the bucket is staged.
        """
        if transfer.parts:
            flat = self._receive_parts(receiver, transfer, bucket)
        else:
            payload = self._receive_checked(receiver, transfer, bucket.index, bucket.size_bytes, transfer.timeout_s)
            with finished_on_weight_stream(payload.device):
                flat = self._decode(transfer, bucket, tensors, payload)
        with self._lock:
            if self._is_dropped:
                raise TransferError("the update has ended")
            self._flats.append(flat)

    def _receive_checked(
        self,
        receiver: WeightReceiver,
        sent: SentBytes,
        index: int,
        raw_bytes: int,
        timeout_s: float,
        next_bytes: int | None = None,
        places: bytes = b"",
    ) -> torch.Tensor:
        """Return one sender's part of a bucket, which has ``raw_bytes`` when decoded, after verifying its checksum."""
        size_bytes = raw_bytes if sent.size_bytes is None else sent.size_bytes
        if sent.encoding == "raw" and size_bytes != raw_bytes:
            raise TransferError(f"bucket {index} has {raw_bytes} bytes, but {size_bytes} were announced")
        if size_bytes > raw_bytes:
            raise TransferError(
                f"bucket {index} would be sent as {size_bytes} bytes, more than its {raw_bytes} decoded bytes"
            )
        (payload,) = receiver.receive((payload_spec(size_bytes),), timeout_s)
        self._receive_ahead(receiver, index + 1, timeout_s, next_bytes)
        with finished_on_weight_stream(payload.device):
            announced = sent.checksum
            if announced is not None and (found := checksum_as(announced, payload, places)) != announced:
                raise TransferError(
                    f"bucket {index} was damaged in transit: its checksum is {found}, but {announced} "
                    "was announced; none of it was loaded"
                )
        return payload

    def _receive_ahead(
        self, receiver: WeightReceiver, index: int, timeout_s: float, size_bytes: int | None = None
    ) -> None:
        """Start to receive the next bucket while this one is verified, if the next one's size is already known."""
        update = self.update
        if not isinstance(receiver, ReceivesAhead) or update.encodings or index == len(update.buckets):
            return
        if size_bytes is None:
            size_bytes = update.buckets[index].size_bytes
        # The publisher may pause until the lease ends.
        receiver.receive_ahead((payload_spec(size_bytes),), update.lease_s + timeout_s)

    def _receive_parts(self, receiver: WeightReceiver, transfer: BucketTransfer, bucket: BucketSpec) -> torch.Tensor:
        """Receive the parts of a bucket from all senders at the same time, and return the bucket's bytes."""
        manifest = self.update.manifest
        assert isinstance(receiver, SeveralReceivers)  # an update from more or fewer senders is refused
        later = self.update.buckets[bucket.index + 1 : bucket.index + 2]
        flat = receiver.take(bucket.size_bytes)
        if self._base is not None:
            flat.copy_(self._base.flats[bucket.index])

        def receive(sender: int, receiver: WeightReceiver) -> None:
            sent, specs = transfer.parts[sender], part_specs(manifest, bucket, sender)
            next_bytes = sum(spec.size_bytes for it in later for spec in part_specs(manifest, it, sender))
            places = places_of(manifest, bucket, sender)
            raw_bytes = sum(spec.size_bytes for spec in specs)
            try:
                payload = self._receive_checked(
                    receiver, sent, bucket.index, raw_bytes, transfer.timeout_s, next_bytes, places
                )
                views = views_of(flat, manifest, bucket, sender)
                if sent.encoding == "delta":
                    part = read_part(views)
                    decode_delta(payload.cpu(), element_runs(specs)).write(part)
                else:
                    part = decode(sent.encoding, payload, specs)
                write_part(part, views)
            except TransferError as error:
                raise TransferError(f"from rank {sender} of the trainer: {error}") from error

        receiver.of_each(receive)
        return flat

    def _decode(
        self, transfer: BucketTransfer, bucket: BucketSpec, tensors: Sequence[TensorSpec], payload: torch.Tensor
    ) -> torch.Tensor:
        if transfer.encoding == "delta":
            assert self._base is not None  # the session refuses unannounced encodings
            patch = decode_delta(payload.cpu(), element_runs(tensors))
            flat = self._memory.take(bucket.size_bytes).copy_(self._base.flats[bucket.index])
            patch.write(flat)
            return flat
        flat = decode(transfer.encoding, payload, tensors)
        if self.update.keep and flat.is_cuda:
            return flat.cpu()  # deltas are patched in on the CPU
        return flat

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that have arrived, in manifest order, as views of the staged memory."""
        named = []
        for bucket, flat in zip(self.update.buckets, self._flats, strict=False):
            specs = self.update.manifest.tensors[bucket.start : bucket.stop]
            named += [(spec.name, tensor) for spec, tensor in zip(specs, unpack(flat, specs), strict=True)]
        return named

    def flat(self, index: int) -> torch.Tensor:
        """Return the decoded bytes of a bucket that has arrived. Raises `TransferError`."""
        with self._lock:
            if self._is_dropped:
                raise TransferError("the update has ended")
            return self._flats[index]

    def keep(self) -> KeptWeights | None:
        """Return the loaded weights as the base of a later delta, if the update asked to keep them."""
        if not self.update.keep:
            return None
        return KeptWeights(
            self.update.ref, self.update.buckets, self.update.manifest.tensors, self._flats, self._memory
        )

    def drop(self) -> None:
        """Discard the received buckets."""
        with self._lock:
            self._is_dropped = True
            self._flats = []
