"""Deltas: the elements of a bucket that differ from a base, in a payload much smaller than the bucket.

A delta records where elements changed and their new values ("overwrite", not XOR), so applying it twice has the same
effect as applying it once. Elements are compared and sent as bits, so NaNs, negative zeros and every dtype are
transferred exactly. The caller must know that both sides hold the same base.

Payload, little-endian, all fixed-size fields before all compressed data:

    header      magic, format version, number of runs, size of the bucket in bytes
    per run     itemsize, number of elements, of changed elements and of gap values; stored size of each plane
    planes      per run: low bytes of the gaps, high bytes of the gaps, then byte 0, byte 1 ... of the changed elements

A gap is the number of unchanged elements before a changed element. A gap of 65535 or more is divided by 65535: it is
written as one value 65535 for each unit of the quotient, then the remainder. A plane is a Zstandard frame, or the raw
bytes if a frame would not be smaller. Bytes with the same meaning are stored together because the exponents of weights
compress well and their mantissas do not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from inflight.errors import TransferError
from inflight.wire import DTYPE_SIZES, TensorSpec, UpdateRef, WeightUpdate

DEFAULT_MAX_SHARE = 0.25
"""Maximum share of a bucket's bytes that may change. If more change, the whole bucket is sent."""

_MAGIC = b"IFDL"
_EDITION = 1
_HEADER = struct.Struct("<4sIIQ")
_RUN = struct.Struct("<QQQQ")
_SIZE = struct.Struct("<Q")

_ESCAPE = 0xFFFF
_GAP_BYTES = 2
_LEVEL = 1  # of Zstandard: higher levels are several times slower here, and compress no better
_BLOCK_BYTES = 1 << 19  # compared at a time: both sides and the results stay in the cache
_BLOCK_CHANGES = 1 << 13  # written at a time: reading the old elements first loads the same cache lines

Bytes = NDArray[np.uint8]
Elements = NDArray[np.unsignedinteger[Any]]


class ElementRun(NamedTuple):
    """Consecutive elements of the same size in a bucket."""

    itemsize: int
    num_elements: int

    @property
    def size_bytes(self) -> int:
        return self.itemsize * self.num_elements


@dataclass(frozen=True, eq=False)
class RunChanges:
    """The changes in one run: element ``indices[i]`` becomes ``values[i]``; the indices ascend."""

    run: ElementRun
    indices: NDArray[np.int64]
    values: Elements


@dataclass(frozen=True, eq=False)
class Patch:
    """The elements to overwrite in a bucket's bytes, one `RunChanges` per run of the bucket."""

    parts: tuple[RunChanges, ...]

    @property
    def size_bytes(self) -> int:
        """Size in bytes of the bucket to which the patch applies."""
        return sum(part.run.size_bytes for part in self.parts)

    @property
    def num_changed(self) -> int:
        return sum(part.indices.size for part in self.parts)

    def write(self, flat: torch.Tensor) -> None:
        """Overwrite the elements in place.

        ``flat`` is uint8 [size of the bucket], contiguous, on the CPU. A different size raises `ValueError`, and
        nothing is written.
        """
        if flat.numel() != self.size_bytes:
            raise ValueError(f"the patch is for a bucket of {self.size_bytes} bytes, but this one has {flat.numel()}")
        offset = 0
        for part in self.parts:
            elements = _elements(flat, part.run, offset)
            for start in range(0, part.indices.size, _BLOCK_CHANGES):
                block = slice(start, start + _BLOCK_CHANGES)
                elements[part.indices[block]] = part.values[block]
            offset += part.run.size_bytes


def element_runs(specs: Sequence[TensorSpec]) -> tuple[ElementRun, ...]:
    """Return the runs of equal itemsize that the concatenated tensors of a bucket form."""
    sized = [ElementRun(DTYPE_SIZES[spec.dtype], spec.num_elements) for spec in specs]
    return tuple(
        ElementRun(itemsize, sum(run.num_elements for run in runs))
        for itemsize, runs in groupby(sized, key=lambda run: run.itemsize)
    )


def find_changes(
    new_flat: torch.Tensor,
    base_flat: torch.Tensor,
    runs: Sequence[ElementRun],
    max_share: float = DEFAULT_MAX_SHARE,
) -> Patch | None:
    """Return the patch that makes ``base_flat`` equal to ``new_flat``, or None if it is too large to be worth sending.

    A patch is too large if more than ``max_share`` of the bytes change; the search stops as soon as this is certain.
    Both tensors are uint8 [size of the runs], contiguous, on the CPU, and neither is modified.
    """
    if new_flat.numel() != sum(run.size_bytes for run in runs):
        raise _wrong_sizes(new_flat.numel(), base_flat, runs)
    parts = torch.split(new_flat, [run.size_bytes for run in runs])
    return find_tensor_changes(parts, base_flat, runs, max_share)


def find_tensor_changes(
    tensors: Sequence[torch.Tensor],
    base_flat: torch.Tensor,
    runs: Sequence[ElementRun],
    max_share: float = DEFAULT_MAX_SHARE,
) -> Patch | None:
    """Return the result of `find_changes` for the concatenated bytes of ``tensors``, without concatenating them.

    Each tensor lies within one run. Tensors that are not contiguous on the CPU are copied.
    """
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    if not size_bytes == base_flat.numel() == sum(run.size_bytes for run in runs):
        raise _wrong_sizes(size_bytes, base_flat, runs)
    pieces = iter([tensor for tensor in tensors if tensor.nbytes])
    parts, offset, left_bytes = [], 0, max_share * size_bytes
    for run in runs:
        indices, values, start = [np.empty(0, np.int64)], [np.empty(0, f"<u{run.itemsize}")], 0
        base = _elements(base_flat, run, offset)
        while start < run.num_elements:
            flat = next(pieces).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            new: Elements = flat.numpy().view(f"<u{run.itemsize}")
            for found, block in _changed_blocks(new, base[start : start + new.size]):
                indices.append(found + start)
                values.append(block)
                left_bytes -= block.nbytes
                if left_bytes < 0:
                    return None
            start += new.size
        parts.append(RunChanges(run, np.concatenate(indices), np.concatenate(values)))
        offset += run.size_bytes
    return Patch(tuple(parts))


def encode_delta(patch: Patch) -> torch.Tensor:
    """Return the payload from which `decode_delta` restores the patch, uint8 [payload bytes]."""
    head = [_HEADER.pack(_MAGIC, _EDITION, len(patch.parts), patch.size_bytes)]
    stored: list[Bytes] = []
    for part in patch.parts:
        gaps = _gaps(part.indices)
        planes = [_compress(plane) for plane in (*_planes(gaps), *_planes(part.values))]
        head.append(_RUN.pack(part.run.itemsize, part.run.num_elements, part.indices.size, gaps.size))
        head.extend(_SIZE.pack(plane.size) for plane in planes)
        stored.extend(planes)
    return torch.from_numpy(np.concatenate([np.frombuffer(b"".join(head), np.uint8), *stored]))


def decode_delta(payload: torch.Tensor, runs: Sequence[ElementRun]) -> Patch:
    """Return the patch in the payload, fully validated: writing it to a bucket of these runs cannot fail.

    Raises `TransferError` for a payload that is damaged or truncated, has a different format version, or is for a
    different layout. Whatever the payload claims, at most 64 bytes are allocated per element of the runs.
    """
    data: Bytes = payload.numpy()
    head_bytes = _HEADER.size + sum(_RUN.size + _SIZE.size * (_GAP_BYTES + run.itemsize) for run in runs)
    if data.size < head_bytes:
        raise _refusal(f"it has {data.size} bytes, but its header alone takes {head_bytes}")
    expected = (_MAGIC, _EDITION, len(runs), sum(run.size_bytes for run in runs))
    announced = _HEADER.unpack_from(data.data)
    if announced != expected:
        raise _refusal(f"its header is {announced}, not {expected}")
    plans, offset = [], _HEADER.size
    for run in runs:
        plan = _run_plan(data, offset, run)
        offset += _RUN.size + _SIZE.size * len(plan.stored_bytes)
        plans.append(plan)
    announced_bytes = head_bytes + sum(sum(plan.stored_bytes) for plan in plans)
    if announced_bytes != data.size:
        raise _refusal(f"it has {data.size} bytes, but its header announces {announced_bytes}")
    parts = []
    for plan in plans:
        parts.append(_decode_run(data, offset, plan))
        offset += sum(plan.stored_bytes)
    return Patch(tuple(parts))


class _RunPlan(NamedTuple):
    """The header's description of one run, checked against the run that the receiver expects."""

    run: ElementRun
    num_changed: int
    num_gaps: int
    stored_bytes: tuple[int, ...]

    @property
    def raw_bytes(self) -> tuple[int, ...]:
        """Size in bytes of each plane before compression."""
        return (self.num_gaps,) * _GAP_BYTES + (self.num_changed,) * self.run.itemsize


def _run_plan(data: Bytes, offset: int, run: ElementRun) -> _RunPlan:
    itemsize, num_elements, num_changed, num_gaps = _RUN.unpack_from(data.data, offset)
    if (itemsize, num_elements) != (run.itemsize, run.num_elements):
        raise _refusal(f"it announces {num_elements} elements of {itemsize} bytes where {run} is expected")
    if num_changed > num_elements or not num_changed <= num_gaps <= num_changed + num_elements // _ESCAPE:
        raise _refusal(f"{num_changed} changes and {num_gaps} gaps do not fit in {num_elements} elements")
    sizes = data[offset + _RUN.size :][: _SIZE.size * (_GAP_BYTES + itemsize)]
    return _RunPlan(run, num_changed, num_gaps, tuple(size for (size,) in _SIZE.iter_unpack(sizes.data)))


def _decode_run(data: Bytes, offset: int, plan: _RunPlan) -> RunChanges:
    planes = []
    for stored, raw in zip(plan.stored_bytes, plan.raw_bytes, strict=True):
        planes.append(_decompress(data[offset : offset + stored], raw))
        offset += stored
    gaps = _join_planes(planes[:_GAP_BYTES], _GAP_BYTES)
    return RunChanges(plan.run, _indices(gaps, plan), _join_planes(planes[_GAP_BYTES:], plan.run.itemsize))


def _changed_blocks(new: Elements, base: Elements) -> Iterator[tuple[NDArray[np.int64], Elements]]:
    """Yield, block by block, the indices of the elements that differ, and their new values."""
    step = _BLOCK_BYTES // new.itemsize
    differs = np.empty(step, np.bool_)
    for start in range(0, new.size, step):
        block = new[start : start + step]
        found = _differing_indices(block, base[start : start + step], differs)
        values = block[found]
        found += start
        yield found, values


def _differing_indices(new: Elements, base: Elements, differs: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the indices of the elements that differ, ascending.

    Overwrites ``differs``, whose length is a multiple of eight.

    The search first finds groups of eight elements, and then the elements within them, because NumPy finds dense
    elements faster than sparse ones.
    """
    np.not_equal(new, base, out=differs[: new.size])
    num_groups = -(-new.size // 8)
    differs[new.size : 8 * num_groups] = False
    groups = differs.view(np.uint64)[:num_groups]
    found_groups = np.flatnonzero(groups != 0)
    found = np.flatnonzero(groups[found_groups].view(np.bool_))
    indices: NDArray[np.int64] = found_groups[found >> 3]
    indices <<= 3
    found &= 7
    indices += found
    return indices


def _elements(flat: torch.Tensor, run: ElementRun, offset: int) -> Elements:
    """Return a view of the run's elements as unsigned integers; it may be misaligned because of a mix of dtypes."""
    view: Elements = flat.numpy()[offset : offset + run.size_bytes].view(f"<u{run.itemsize}")
    return view


def _gaps(indices: NDArray[np.int64]) -> Elements:
    gaps = np.diff(indices, prepend=-1)
    gaps -= 1
    if not gaps.size or gaps.max() < _ESCAPE:
        return gaps.astype("<u2")
    num_escapes, rest = np.divmod(gaps, _ESCAPE)
    ends = np.cumsum(num_escapes + 1)
    escaped = np.full(ends[-1], _ESCAPE, "<u2")
    escaped[ends - 1] = rest
    return escaped


def _indices(gaps: Elements, plan: _RunPlan) -> NDArray[np.int64]:
    """Return the indices of the changed elements, ascending.

    Raises `TransferError` for gaps that lead outside the run.
    """
    is_change = gaps != _ESCAPE
    if np.count_nonzero(is_change) != plan.num_changed or (gaps.size and not is_change[-1]):
        raise _refusal(f"its gaps do not describe {plan.num_changed} changes")
    indices = np.cumsum(gaps + is_change.astype(np.int64))
    indices -= 1
    if indices.size and indices[-1] >= plan.run.num_elements:
        raise _refusal(f"it changes element {indices[-1]} of a run of {plan.run.num_elements}")
    return indices if plan.num_gaps == plan.num_changed else indices[is_change]


def _planes(elements: Elements) -> list[Bytes]:
    """Return byte 0 of every element, then byte 1 of every element, and so on."""
    split = elements.view(np.uint8).reshape(elements.size, elements.itemsize)
    return [np.ascontiguousarray(split[:, i]) for i in range(elements.itemsize)]


def _join_planes(planes: Sequence[Bytes], itemsize: int) -> Elements:
    elements: Elements = np.empty(planes[0].size, f"<u{itemsize}")
    split = elements.view(np.uint8).reshape(elements.size, itemsize)
    for i, plane in enumerate(planes):
        split[:, i] = plane
    return elements


def _compress(plane: Bytes) -> Bytes:
    """Return the plane as a Zstandard frame, or unchanged if a frame would not be smaller."""
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(plane.data)
    return np.frombuffer(frame, np.uint8) if len(frame) < plane.size else plane


def _decompress(stored: Bytes, raw_bytes: int) -> Bytes:
    """Return the plane of ``raw_bytes`` bytes. The frame's size is checked before anything is allocated."""
    if stored.size == raw_bytes:
        return stored
    try:
        content_bytes = zstandard.frame_content_size(stored.data)
        if content_bytes != raw_bytes:
            raise _refusal(f"a plane announces {content_bytes} bytes instead of {raw_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(stored.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _refusal(f"a plane cannot be decompressed: {error}") from error
    return np.frombuffer(raw, np.uint8)


def _wrong_sizes(size_bytes: int, base_flat: torch.Tensor, runs: Sequence[ElementRun]) -> ValueError:
    wanted = sum(run.size_bytes for run in runs)
    return ValueError(f"expected {wanted} bytes, but the bucket has {size_bytes} and its base {base_flat.numel()}")


def _refusal(what: str) -> TransferError:
    return TransferError(f"the delta is invalid: {what}")


class Snapshot:
    """The publisher's base for the next delta: the bytes of every bucket of one update, on the host.

    Encoding the next update advances the snapshot bucket by bucket, so it is unusable if that update fails.
    """

    def __init__(self) -> None:
        self._ref: UpdateRef | None = None
        self._update: WeightUpdate | None = None
        self._flats: dict[int, torch.Tensor] = {}

    @property
    def ref(self) -> UpdateRef | None:
        """The update that every endpoint has applied and whose weights the snapshot holds completely, or None."""
        return self._ref

    def is_cut_as(self, update: WeightUpdate) -> bool:
        """Return whether an update splits the same tensors into the same buckets as the snapshot."""
        mine = self._update
        return mine is not None and (mine.buckets, mine.manifest) == (update.buckets, update.manifest)

    def begin(self, update: WeightUpdate) -> None:
        """Accept the buckets of ``update`` from now on.

        They are encoded as deltas if the snapshot is the update's base.
        """
        if update.base is None:
            self._flats = {}
        self._ref, self._update = None, update

    def encode(self, index: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> torch.Tensor | None:
        """Return the changes in one bucket, or None if the whole bucket has to be sent.

        The snapshot then holds the new bytes.

        The tensors may be the trainer's own, because they are only read.
        """
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        held = self._flats.get(index)
        if held is None or held.numel() != size_bytes:
            held = self._flats[index] = torch.empty(size_bytes, dtype=torch.uint8)
        elif (patch := find_tensor_changes(tensors, held, element_runs(specs))) is not None:
            patch.write(held)
            payload = encode_delta(patch)
            return payload if payload.numel() <= size_bytes else None  # tiny buckets may become larger
        offset = 0
        for tensor, spec in zip(tensors, specs, strict=True):
            part = held[offset : offset + spec.size_bytes]
            part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            offset += spec.size_bytes
        return None

    def flat(self, index: int) -> torch.Tensor:
        """Return the bytes of an encoded bucket, uint8 on the CPU; valid until the next update."""
        return self._flats[index]

    def note_applied(self, ref: UpdateRef) -> None:
        """Record that every endpoint has applied and kept the update that was begun last."""
        self._ref = ref
