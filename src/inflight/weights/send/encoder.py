"""A rank's encoder: it turns gathered tensors, or the rank's own parts of them, into bytes to send."""

from __future__ import annotations

from dataclasses import replace

from inflight.contracts import ReservesMemory, SendsFromDevice, WeightSender
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Packer, Rounding, encode_bucket, pack_into, unpack
from inflight.weights.encode.delta import Snapshot
from inflight.weights.encode.parts import part_specs, places_of
from inflight.wire import Encoding, UpdateRef, WeightUpdate


class BucketEncoder:
    """Encodes the buckets that ``rank`` sends with ``sender``; with ``delta``, only their changes (see `Snapshot`)."""

    def __init__(self, sender: WeightSender, *, encoding: Rounding, delta: bool, rank: int = 0) -> None:
        self.encoding: Rounding = encoding
        self._sender = sender
        self._rank = rank
        self._packer = Packer()
        self._snapshot = Snapshot() if delta else None

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """The encodings that buckets may have in transit. Every endpoint has to support them."""
        return (self.encoding,) if self._snapshot is None else ("delta",)

    def base_of(self, update: WeightUpdate) -> UpdateRef | None:
        """Return the earlier update that can be the base if this one is sent as a delta, or None if there is none."""
        if self._snapshot is None or not self._snapshot.is_cut_as(update):
            return None
        return self._snapshot.ref

    @property
    def is_delta(self) -> bool:
        return self._snapshot is not None

    def begin(self, update: WeightUpdate) -> None:
        """Accept the buckets of an update from now on."""
        if self._snapshot is not None:
            self._snapshot.begin(update)

    def note_applied(self, ref: UpdateRef) -> None:
        """Record that every endpoint has applied the update."""
        if self._snapshot is not None:
            self._snapshot.note_applied(ref)

    def forget(self) -> None:
        """Forget which weights the endpoints hold.

        The buffers are replaced, because an abandoned send may still be reading them.
        """
        self._packer = Packer()
        if self._snapshot is not None:
            self._snapshot = Snapshot()

    def encode(self, bucket: WeightBucket, update: WeightUpdate) -> WeightBucket:
        """Return the bucket in a form that is ready to send, valid until the second call after this one."""
        manifest, ref, snapshot = update.manifest, update.ref, self._snapshot
        places = b""
        if manifest.shardings:
            announced = update.buckets[bucket.index]
            places = places_of(manifest, announced, self._rank)
            bucket = replace(bucket, specs=part_specs(manifest, announced, self._rank))
        if snapshot is None:
            on_device = isinstance(self._sender, SendsFromDevice) and self._sender.sends_from_device
            packed = self._packed(bucket)
            return encode_bucket(packed, ref, encoding=self.encoding, on_device=on_device, places=places)
        delta = snapshot.encode(bucket.index, bucket.tensors, bucket.specs)
        if delta is None or update.base is None:
            return encode_bucket(bucket, ref, payload=snapshot.flat(bucket.index), places=places)
        return encode_bucket(bucket, ref, encoding="delta", payload=delta, places=places)

    def _packed(self, bucket: WeightBucket) -> WeightBucket:
        """Return a bucket with its tensors packed without gaps, in the sender's memory if the sender provides some."""
        size_bytes = sum(tensor.nbytes for tensor in bucket.tensors)
        if (
            isinstance(self._sender, ReservesMemory)
            and (target := self._sender.reserve(bucket.index, size_bytes)) is not None
        ):
            pack_into(target, bucket.tensors)
            return replace(bucket, tensors=tuple(unpack(target, bucket.specs)))
        return self._packer.pack_bucket(bucket)
