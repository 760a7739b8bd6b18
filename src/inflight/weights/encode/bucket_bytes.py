"""The bytes of a bucket: how tensors are packed, encoded and decoded, and their checksums.

Packed tensors follow one another, row-major, without gaps. An encoding turns these bytes into fewer bytes for the
transfer, and decoding restores tensors from them: ``bfloat16`` and ``float8`` round weights of wider dtypes. Shape and
dtype alone decide which tensors are rounded: ``bfloat16`` rounds float32 and float64, and ``float8`` rounds all tensors
except vectors (norms, biases). All other tensors are sent unchanged. The endpoint loads the rounded values in the
manifest's dtype. ``delta`` needs a base, and is therefore in `inflight.weights.encode.delta`.

The checksum of bytes on the host is their XXH3-128. The checksum of bytes sent from GPU to GPU is computed on the
device, and does not depend on the kind of device. The bytes, padded with zeros, are treated as little-endian 64-bit
words w(0), w(1), ... The device computes sums modulo 2^64: one for each row of 4096 successive words, and one for each
residue modulo 4099, over all words whose index has that residue. The checksum is the XXH3-128 of the number of bytes
and of these sums, which are few enough for the host.

The sums always differ after
- any change within 4096 successive words (32 KiB), such as a flipped bit, because these words have different residues;
- any swap of two unequal words, because words with the same residue are in different rows;
- any swap of two unequal blocks of up to 4096 words, unless the distance between their beginnings is a multiple of 4099
words: because 4099 is prime, the effects of the swap cannot cancel at any other distance.

Other damage is missed only if it leaves every one of these sums unchanged. No checksum of this kind authenticates the
sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
import xxhash

from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.encode import float8
from inflight.weights.encode.transit import record_event
from inflight.wire import DTYPE_SIZES, BucketTransfer, Encoding, SentBytes, TensorSpec, UpdateRef

Rounding = Literal["raw", "bfloat16", "float8"]
_WIDE = ("float32", "float64")
_PREFIX = "sums64:"
_ROW = 4096
_PRIME = 4099
_NUM_ROWS = {"cpu": 64, "cuda": 512}
"""Number of rows that are added up at a time: few enough to fit in a cache, because each byte is read twice, and enough
to occupy a GPU, where each of the two passes is one kernel. The number does not affect the sums.
"""


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the concatenated bytes of the tensors, uint8 [sum of sizes]; not a copy if they are already adjacent."""
    joined = _adjacent_view([tensor for tensor in tensors if tensor.nbytes])
    if joined is not None:
        return joined
    return torch.cat(_flats(tensors)) if tensors else torch.empty(0, dtype=torch.uint8)


def pack_into(target: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write the concatenated bytes of the tensors to the beginning of ``target``, uint8, with a single copy."""
    joined = _adjacent_view([tensor for tensor in tensors if tensor.nbytes])
    start = 0
    for flat in _flats(tensors) if joined is None else [joined]:
        target[start : start + flat.numel()].copy_(flat)
        start += flat.numel()


def unpack(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return the tensors that `pack` joined. They are views, except where a mix of dtypes misaligns a tensor."""
    tensors, offset = [], 0
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        part = flat[offset : offset + spec.size_bytes]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        tensors.append(part.view(dtype).reshape(spec.shape))
        offset += spec.size_bytes
    return tensors


class Packer:
    """Packs buckets before they are sent.

    It alternates between two buffers, so that one is filled while the other is sent.

    The buffers are kept, because allocating fresh pages takes longer than the copy itself.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor | None] = [None, None]

    def pack_bucket(self, bucket: WeightBucket) -> WeightBucket:
        """Return the same bucket with its tensors in one buffer; it is valid until the second call after this one."""
        size_bytes = sum(tensor.nbytes for tensor in bucket.tensors)
        if _adjacent_view(bucket.tensors) is not None or not size_bytes:
            return bucket
        flat = self.reserve(bucket.index, size_bytes, bucket.tensors[0].device)[:size_bytes]
        torch.cat(_flats(bucket.tensors), out=flat)
        return replace(bucket, tensors=tuple(unpack(flat, bucket.specs)))

    def reserve(self, index: int, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for a bucket, uint8 [at least size_bytes]; it is valid until the second call after this one."""
        buffer = self._buffers[index % 2]
        if buffer is None or buffer.numel() < size_bytes or buffer.device != device:
            buffer = self._buffers[index % 2] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return buffer


def _flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]


def _adjacent_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors' bytes as one view, or None if the tensors are not adjacent in one storage."""
    if not tensors:
        return None
    if len(tensors) == 1:
        return _flats(tensors)[0] if tensors[0].is_contiguous() else None
    storage = tensors[0].untyped_storage()
    end = start = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    if any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in tensors):
        return None
    flat = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return flat.set_(storage, start - storage.data_ptr(), (end - start,), (1,))


def encode(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], rounding: Rounding) -> torch.Tensor:
    """Return the bytes to send, uint8 [N]; N is `encoded_size`. Raises `TrainerError` for non-finite weights."""
    if rounding == "raw":
        return pack(tensors)
    parts = [_encode_tensor(tensor, spec, rounding) for tensor, spec in zip(tensors, specs, strict=True)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def decode(encoding: Encoding, payload: torch.Tensor, specs: Sequence[TensorSpec]) -> torch.Tensor:
    """Return the concatenated bytes of the tensors, uint8; this is ``payload`` itself if nothing was encoded.

    Raises `TransferError` if the payload does not have the length that the specs imply.
    """
    wanted = encoded_size(specs, encoding)
    if payload.numel() != wanted:
        raise TransferError(f"a bucket arrived as {payload.numel()} bytes of {encoding}, but its tensors need {wanted}")
    if encoding == "raw":
        return payload
    flat = torch.empty(sum(spec.size_bytes for spec in specs), dtype=torch.uint8, device=payload.device)
    source = target = 0
    for spec in specs:
        size_bytes = _encoded_size(spec, encoding)
        part = payload[source : source + size_bytes]
        flat[target : target + spec.size_bytes] = _decode_tensor(part, spec, encoding)
        source, target = source + size_bytes, target + spec.size_bytes
    return flat


def encoded_size(specs: Sequence[TensorSpec], encoding: Encoding) -> int:
    """Return the encoded size of these tensors in bytes. Sender and receiver both compute it."""
    return sum(_encoded_size(spec, encoding) for spec in specs)


def _applies(spec: TensorSpec, encoding: Encoding) -> bool:
    if spec.num_elements == 0:
        return False
    if encoding == "bfloat16":
        return spec.dtype in _WIDE
    return encoding == "float8" and len(spec.shape) > 1 and DTYPE_SIZES[spec.dtype] > 1


def _encoded_size(spec: TensorSpec, encoding: Encoding) -> int:
    if not _applies(spec, encoding):
        return spec.size_bytes
    return 2 * spec.num_elements if encoding == "bfloat16" else float8.payload_size(spec.shape)


def _encode_tensor(tensor: torch.Tensor, spec: TensorSpec, rounding: Rounding) -> torch.Tensor:
    if not _applies(spec, rounding):
        return pack([tensor])
    if rounding == "bfloat16":
        return pack([tensor.to(torch.bfloat16)])
    return float8.encode_float8(tensor, spec.name)


def _decode_tensor(payload: torch.Tensor, spec: TensorSpec, encoding: Encoding) -> torch.Tensor:
    if not _applies(spec, encoding):
        return payload
    dtype = getattr(torch, spec.dtype)
    if encoding == "bfloat16":
        (values,) = unpack(payload, [spec.model_copy(update={"dtype": "bfloat16"})])
    else:
        values = float8.decode_float8(payload, spec.shape, dtype)
    return pack([values.to(dtype)])


def checksum(flat: torch.Tensor, places: bytes = b"") -> str:
    """Return the XXH3-128 of ``places`` and ``flat`` (uint8 [size], contiguous, any device) in hexadecimal digits.

    The checksum detects corruption in transit; it does not authenticate the sender. Bytes on the host are not copied,
    and other threads can run in the meantime. Raises `TransferError` for a tensor that holds no data, such as one on
    the meta device.
    """
    digest = xxhash.xxh3_128(places)
    digest.update(to_host(flat).numpy().data)
    return digest.hexdigest()


def to_host(flat: torch.Tensor) -> torch.Tensor:
    """Return the bytes on the host, without a copy if they are there already.

    Raises `TransferError` for a tensor that holds no data, such as one on the meta device or from a `FakeTensorMode`.
    """
    host = flat if flat.is_meta else flat.cpu()
    if host.is_meta or type(host) is not torch.Tensor:
        raise _unreadable_error(flat)
    return host


def require_bytes(flat: torch.Tensor) -> None:
    """Raise `TransferError` for a tensor that holds no data, as `to_host` does. Copies nothing."""
    if flat.is_meta or type(flat) is not torch.Tensor:
        raise _unreadable_error(flat)


def _unreadable_error(flat: torch.Tensor) -> TransferError:
    what = f"{type(flat).__name__} on {flat.device}"
    return TransferError(f"a bucket's {flat.numel()} bytes cannot be read: a {what} holds no data; gather real tensors")


def checksum_as(announced: str, flat: torch.Tensor, places: bytes = b"") -> str:
    """Return the checksum of ``places`` and ``flat`` (uint8 [size]), of the same kind as ``announced``.

    Raises the same errors as `sums64`.
    """
    return sums64(flat, places) if announced.startswith(_PREFIX) else checksum(flat, places)


def sums64(flat: torch.Tensor, places: bytes = b"") -> str:
    """Return the checksum of ``places`` and ``flat`` (uint8 [size]): ``sums64:`` and 32 hexadecimal digits.

    The bytes are added up on the tensor's device.

    Waits for the device. Raises `TransferError` for a tensor that holds no data.
    """
    require_bytes(flat)
    sums = to_host(_sums(flat)).numpy()
    return _PREFIX + xxhash.xxh3_128_hexdigest(places + flat.numel().to_bytes(8, "little") + sums.tobytes())


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Return the sums for the rows (the last may be short), then the sums for the residues, as int64."""
    num_words, num_odd_bytes = divmod(flat.numel(), 8)
    last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    last[:num_odd_bytes] = flat[8 * num_words :]
    whole = flat[: 8 * num_words]
    if whole.storage_offset() % 8 or whole.data_ptr() % 8:
        whole = whole.clone()
    words, last_word = whole.view(torch.int64), last.view(torch.int64)
    residues = torch.zeros(_PRIME, dtype=torch.int64, device=flat.device)
    rows = []
    num_rows = _NUM_ROWS.get(flat.device.type, 1)
    for start in range(0, num_words // _ROW, num_rows):
        rows.append(_whole_rows(words, _ROW, start, num_rows).sum(1))
        residues += _whole_rows(words, _PRIME, start, num_rows).sum(0)
    rows.append(torch.cat([words[num_words - num_words % _ROW :], last_word]).sum().reshape(1))
    rest = torch.cat([words[num_words - num_words % _PRIME :], last_word])
    residues[: rest.numel()] += rest
    return torch.cat([*rows, residues])


def _whole_rows(words: torch.Tensor, width: int, start: int, num_rows: int) -> torch.Tensor:
    part = words[start * width : (start + num_rows) * width]
    return part[: part.numel() - part.numel() % width].view(-1, width)


def encode_bucket(
    bucket: WeightBucket,
    ref: UpdateRef,
    *,
    encoding: Encoding = "raw",
    payload: torch.Tensor | None = None,
    on_device: bool = False,
    places: bytes = b"",
) -> WeightBucket:
    """Return a bucket that is ready to send: packed, encoded, and with the checksum of its bytes.

    ``payload`` (uint8 [size]) contains bytes that are already encoded, such as those of a delta. The bytes are moved to
    the host. With ``on_device``, they stay where they are, and their checksum is computed there. ``places`` specifies
    where a part of a bucket belongs. Raises `TransferError` for tensors that hold no data.
    """
    if payload is None:
        assert encoding != "delta"  # only the publisher knows a delta's base
        payload = encode(bucket.tensors, bucket.specs, encoding)
    flat = payload if on_device else to_host(payload)  # one copy serves the checksum and the transport
    found = sums64(flat, places) if on_device else checksum(flat, places)
    is_raw = encoding == "raw"
    specs = bucket.specs if is_raw else (payload_spec(flat.numel()),)
    tensors: Sequence[torch.Tensor] = unpack(flat, specs) if is_raw else (flat,)
    ready = record_event(flat.device)
    return WeightBucket(bucket.index, specs, tuple(tensors), encoding, found, ref, ready, bucket.others)


def sent_bytes(bucket: WeightBucket) -> SentBytes:
    """Return the encoding, size and checksum of the bytes of an encoded bucket that this rank sends."""
    size_bytes = sum(spec.size_bytes for spec in bucket.specs)
    return SentBytes(encoding=bucket.encoding, size_bytes=size_bytes, checksum=bucket.checksum)


def bucket_transfer(bucket: WeightBucket, ref: UpdateRef, timeout_s: float) -> BucketTransfer:
    """Return the message that asks an endpoint to receive an encoded bucket, or its parts from all ranks."""
    own = sent_bytes(bucket)
    sent = {"parts": (own, *bucket.others)} if bucket.others else own.model_dump()
    return BucketTransfer(**ref.model_dump(), bucket_index=bucket.index, timeout_s=timeout_s, **sent)


def payload_spec(size_bytes: int) -> TensorSpec:
    """Return the spec of a whole bucket's bytes."""
    return TensorSpec(name="payload", dtype="uint8", shape=(size_bytes,))
