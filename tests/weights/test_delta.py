"""Deltas: bits travel exactly, and damage is refused before anything is written."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import TransferError
from inflight.weights.encode.bucket_bytes import pack
from inflight.weights.encode.delta import (
    ElementRun,
    Patch,
    Snapshot,
    decode_delta,
    element_runs,
    encode_delta,
    find_changes,
    find_tensor_changes,
)
from inflight.wire import TensorSpec
from tests.weights.stored import make_buckets, make_update

torch.set_num_threads(1)

RUNS = st.lists(
    st.builds(ElementRun, st.sampled_from([1, 2, 4, 8]), st.one_of(st.integers(0, 40), st.integers(0, 3000))),
    max_size=4,
).map(tuple)
SHARES = st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0])


def buckets(runs: tuple[ElementRun, ...], share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and the same with about ``share`` of the elements replaced by others (some by chance equal)."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, sum(run.size_bytes for run in runs), dtype=np.uint8)
    new, offset = base.copy(), 0
    for run in runs:
        part = new[offset : offset + run.size_bytes].reshape(run.num_elements, run.itemsize)
        chosen = rng.random(run.num_elements) < share
        part[chosen] = rng.integers(0, 256, (chosen.sum(), run.itemsize), dtype=np.uint8)
        offset += run.size_bytes
    return torch.from_numpy(new), torch.from_numpy(base)


def changed(new: torch.Tensor, base: torch.Tensor, runs: tuple[ElementRun, ...]) -> list[list[int]]:
    """The elements that differ, per run, one after another."""
    new_bytes, base_bytes = bytes(new.tolist()), bytes(base.tolist())
    found, offset = [], 0
    for run in runs:
        places = [slice(offset + i * run.itemsize, offset + (i + 1) * run.itemsize) for i in range(run.num_elements)]
        found.append([i for i, place in enumerate(places) if new_bytes[place] != base_bytes[place]])
        offset += run.size_bytes
    return found


def whole_patch(new: torch.Tensor, base: torch.Tensor, runs: tuple[ElementRun, ...]) -> Patch:
    patch = find_changes(new, base, runs, max_share=1.0)
    assert patch is not None
    return patch


@given(runs=RUNS, share=SHARES, seed=st.integers(0, 2**32))
def test_the_elements_found_are_those_whose_bits_differ(runs: tuple[ElementRun, ...], share: float, seed: int) -> None:
    new, base = buckets(runs, share, seed)
    patch = whole_patch(new, base, runs)
    assert [part.indices.tolist() for part in patch.parts] == changed(new, base, runs)
    assert patch.num_changed == sum(map(len, changed(new, base, runs)))


@given(runs=RUNS, share=SHARES, seed=st.integers(0, 2**32))
def test_a_delta_makes_the_base_new(runs: tuple[ElementRun, ...], share: float, seed: int) -> None:
    new, base = buckets(runs, share, seed)
    old = base.clone()
    payload = encode_delta(whole_patch(new, base, runs))
    assert torch.equal(base, old), "neither finding nor encoding writes"
    patch = decode_delta(payload, runs)
    patch.write(base)
    assert torch.equal(base, new)
    patch.write(base)
    assert torch.equal(base, new), "twice is once"


@given(
    seed=st.integers(0, 2**32), num_changed=st.integers(0, 20), num_elements=st.sampled_from([65535, 65536, 400_000])
)
@settings(max_examples=30)
def test_elements_far_apart_are_found_again(seed: int, num_changed: int, num_elements: int) -> None:
    runs = (ElementRun(2, num_elements),)
    base = torch.zeros(2 * num_elements, dtype=torch.uint8)
    new = base.clone()
    new[2 * np.random.default_rng(seed).integers(0, num_elements, num_changed)] = 1
    decode_delta(encode_delta(whole_patch(new, base, runs)), runs).write(base)
    assert torch.equal(base, new)


@pytest.mark.parametrize("index", [0, 65534, 65535, 65536, 131069, 131070, 131071, 262139])
def test_gaps_at_the_edge_of_an_escape_are_exact(index: int) -> None:
    runs = (ElementRun(1, 262140),)
    base = torch.zeros(262140, dtype=torch.uint8)
    new = base.clone()
    new[index] = 1
    (part,) = decode_delta(encode_delta(whole_patch(new, base, runs)), runs).parts
    assert part.indices.tolist() == [index] and part.values.tolist() == [1]


def test_changes_in_every_block_of_a_large_bucket_are_found() -> None:
    num_elements = 3_000_003  # three blocks, the last one no multiple of eight
    base = torch.zeros(num_elements, dtype=torch.bfloat16)
    places = torch.tensor([0, 7, 8, 2**20 - 1, 2**20, 2**21 - 1, 2**21, num_elements - 1])
    new = base.clone()
    new[places] = -0.0
    runs = (ElementRun(2, num_elements),)
    patch = whole_patch(new.view(torch.uint8), base.view(torch.uint8), runs)
    assert patch.parts[0].indices.tolist() == places.tolist()


def test_nans_and_negative_zeros_travel_by_their_bits() -> None:
    base = torch.tensor([0x0000, 0x7FC0, 0x7FC0, 0x3F80], dtype=torch.int16).view(torch.uint8)
    new = torch.tensor([-0x8000, 0x7FC1, 0x7FC0, 0x3F80], dtype=torch.int16).view(torch.uint8)
    patch = whole_patch(new, base, (ElementRun(2, 4),))
    assert patch.parts[0].indices.tolist() == [0, 1], "a NaN that stayed the same is no change"
    patch.write(base)
    assert torch.equal(base, new)


def test_the_runs_of_tensors_join_those_of_one_itemsize() -> None:
    def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
        return TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape})

    specs = [spec("a", "bfloat16", 3, 5), spec("b", "float16"), spec("c", "float32", 2), spec("d", "bfloat16", 7)]
    assert element_runs(specs) == (ElementRun(2, 16), ElementRun(4, 2), ElementRun(2, 7))
    tensors = [torch.randn(s.shape).to(getattr(torch, s.dtype)) for s in specs]
    assert sum(run.size_bytes for run in element_runs(specs)) == pack(tensors).numel()


def test_two_percent_of_bfloat16_takes_less_than_a_thirtieth() -> None:
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(1 << 20, generator=generator) * 0.02).bfloat16()
    new = base.clone()
    chosen = torch.rand(base.shape, generator=generator) < 0.02
    new[chosen] = (torch.randn(base.shape, generator=generator) * 0.02).bfloat16()[chosen]
    payload = encode_delta(whole_patch(new.view(torch.uint8), base.view(torch.uint8), (ElementRun(2, base.numel()),)))
    assert payload.numel() < base.nbytes / 30


@given(runs=RUNS, share=SHARES, seed=st.integers(0, 2**32), num_cuts=st.integers(0, 4))
def test_changes_of_tensors_are_those_of_their_bytes_joined(
    runs: tuple[ElementRun, ...], share: float, seed: int, num_cuts: int
) -> None:
    new, base = buckets(runs, share, seed)
    rng = np.random.default_rng(seed)
    tensors, offset = [], 0
    for run in runs:
        cuts = sorted(rng.integers(0, run.num_elements + 1, num_cuts).tolist())
        for start, stop in pairwise([0, *cuts, run.num_elements]):
            tensors.append(new[offset + run.itemsize * start : offset + run.itemsize * stop].clone())
        offset += run.size_bytes
    patch, wanted = find_tensor_changes(tensors, base, runs, max_share=1.0), whole_patch(new, base, runs)
    assert patch is not None
    assert [part.indices.tolist() for part in patch.parts] == [part.indices.tolist() for part in wanted.parts]
    assert [part.values.tolist() for part in patch.parts] == [part.values.tolist() for part in wanted.parts]


def test_a_snapshot_moves_from_update_to_update_by_deltas_of_the_trainers_own_tensors() -> None:
    (first, second), update = (make_buckets(make_update(version, cuts=(0, 7)))[0] for version in (1, 2)), make_update()
    before = pack(first.tensors).clone()
    mixed = [a.clone() if i % 2 else b for i, (a, b) in enumerate(zip(first.tensors, second.tensors, strict=True))]
    mixed[-1] = first.tensors[-1].clone()
    mixed[-1][::50] = second.tensors[-1][::50]
    snapshot = Snapshot()
    snapshot.begin(update)
    assert snapshot.encode(0, first.tensors, first.specs) is None
    snapshot.begin(update.model_copy(update={"base": update.ref}))
    kept = snapshot.flat(0).clone()
    payload = snapshot.encode(0, mixed, first.specs)
    assert payload is not None
    decode_delta(payload, element_runs(first.specs)).write(kept)
    assert torch.equal(kept, pack(mixed))
    assert torch.equal(snapshot.flat(0), pack(mixed))
    assert torch.equal(pack(first.tensors), before)
    other = [torch.zeros_like(tensor) for tensor in mixed]
    assert snapshot.encode(0, other, first.specs) is None  # too much has changed
    assert torch.equal(snapshot.flat(0), pack(other))


@pytest.mark.parametrize("num_elements", [0, 1])
def test_what_is_smaller_than_a_delta_is_sent_whole(num_elements: int) -> None:
    """A rank may hold nothing of a bucket, or a part that is smaller than the header of a delta."""
    specs = (TensorSpec(name="part", dtype="float32", shape=(num_elements,)),)
    snapshot, update = Snapshot(), make_update()
    snapshot.begin(update)
    snapshot.encode(0, [torch.zeros(num_elements)], specs)
    snapshot.begin(update.model_copy(update={"base": update.ref}))
    assert snapshot.encode(0, [torch.zeros(num_elements)], specs) is None
    assert snapshot.flat(0).numel() == 4 * num_elements


def test_more_changes_than_are_worth_sending_give_no_patch() -> None:
    runs = (ElementRun(2, 100), ElementRun(4, 50))
    base = torch.zeros(400, dtype=torch.uint8)
    new = base.clone()
    new[:80] = 1
    new[200:280] = 1  # 160 of 400 bytes
    assert find_changes(new, base, runs, max_share=0.39) is None
    assert find_changes(new, base, runs, max_share=0.4) is not None
    assert find_changes(base, base, runs, max_share=0.0) is not None


def test_buckets_of_another_size_are_refused_and_not_written() -> None:
    runs = (ElementRun(2, 4), ElementRun(4, 1))
    new, base = torch.ones(12, dtype=torch.uint8), torch.zeros(12, dtype=torch.uint8)
    patch = whole_patch(new, base, runs)
    for size in (0, 8, 11, 13):
        flat = torch.zeros(size, dtype=torch.uint8)
        with pytest.raises(ValueError, match="12 bytes"):
            patch.write(flat)
        assert not flat.any()
        with pytest.raises(ValueError, match="12 bytes"):
            find_changes(new, flat, runs)


# ---------------------------------------------------------------------------------------------------------------
# What a network may hand in


@dataclass(frozen=True)
class RunWritten:
    """One run of a payload, field by field as the module describes it."""

    itemsize: int
    num_elements: int
    num_changed: int
    num_gaps: int
    planes: tuple[bytes, ...]
    sizes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, itemsize: int, num_elements: int, gaps: list[int], values: list[int]) -> RunWritten:
        planes = [bytes(gap & 255 for gap in gaps), bytes(gap >> 8 for gap in gaps)]
        planes += [bytes(value >> 8 * i & 255 for value in values) for i in range(itemsize)]
        return cls(itemsize, num_elements, len(values), len(gaps), tuple(planes))


@dataclass(frozen=True)
class PayloadWritten:
    """A payload, field by field."""

    runs: tuple[RunWritten, ...]
    magic: bytes = b"IFDL"
    edition: int = 1
    num_runs: int | None = None
    size_bytes: int | None = None

    def tensor(self) -> torch.Tensor:
        num_runs = len(self.runs) if self.num_runs is None else self.num_runs
        size_bytes = sum(run.itemsize * run.num_elements for run in self.runs)
        size_bytes = size_bytes if self.size_bytes is None else self.size_bytes
        data = struct.pack("<4sIIQ", self.magic, self.edition, num_runs, size_bytes)
        for run in self.runs:
            sizes = tuple(map(len, run.planes)) if run.sizes is None else run.sizes
            data += struct.pack("<QQQQ", run.itemsize, run.num_elements, run.num_changed, run.num_gaps)
            data += struct.pack(f"<{len(sizes)}Q", *sizes)
        data += b"".join(plane for run in self.runs for plane in run.planes)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


RUN = RunWritten.of(2, 10, gaps=[1, 0, 4], values=[0x0102, 0x0304, 0xFFFE])
PAYLOAD = PayloadWritten((RUN,))
EXPECTED = (ElementRun(2, 10),)


def test_a_payload_written_by_hand_is_what_the_encoder_writes() -> None:
    base = torch.zeros(20, dtype=torch.uint8)
    new = base.clone()
    new.view(torch.int16)[torch.tensor([1, 2, 7])] = torch.tensor([0x0102, 0x0304, -2], dtype=torch.int16)
    assert torch.equal(encode_delta(whole_patch(new, base, EXPECTED)), PAYLOAD.tensor())
    decode_delta(PAYLOAD.tensor(), EXPECTED).write(base)
    assert torch.equal(base, new)


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def with_first_plane(plane: bytes, num_changed: int = 100) -> tuple[PayloadWritten, tuple[ElementRun, ...]]:
    """A payload of changes side by side, whose first plane, the low bytes of the gaps, is stored as ``plane``."""
    run = RunWritten.of(2, num_changed, gaps=[0] * num_changed, values=[7] * num_changed)
    return PayloadWritten((replace(run, planes=(plane, *run.planes[1:])),)), (ElementRun(2, num_changed),)


def test_a_frame_as_announced_is_accepted() -> None:
    written, runs = with_first_plane(frame(bytes(100)))
    assert decode_delta(written.tensor(), runs).num_changed == 100


DAMAGED = {
    "magic": replace(PAYLOAD, magic=b"IFDX"),
    "edition": replace(PAYLOAD, edition=2),
    "fewer runs": replace(PAYLOAD, num_runs=0),
    "more runs": replace(PAYLOAD, num_runs=65535),
    "size of the bucket": replace(PAYLOAD, size_bytes=2**64 - 1),
    "itemsize": PayloadWritten((replace(RUN, itemsize=4),), size_bytes=20),
    "elements": PayloadWritten((replace(RUN, num_elements=11),), size_bytes=20),
    "huge elements": PayloadWritten((replace(RUN, num_elements=2**63),), size_bytes=20),
    "more changes": PayloadWritten((replace(RUN, num_changed=4),)),
    "fewer changes": PayloadWritten((replace(RUN, num_changed=2),)),
    "more changes than elements": PayloadWritten((RunWritten.of(2, 10, [0] * 11, [1] * 11),)),
    "huge changes": PayloadWritten((replace(RUN, num_changed=2**64 - 1),)),
    "more gaps": PayloadWritten((replace(RUN, num_gaps=4),)),
    "fewer gaps": PayloadWritten((replace(RUN, num_gaps=2),)),
    "huge gaps": PayloadWritten((replace(RUN, num_gaps=2**64 - 1),)),
    "larger plane": PayloadWritten((replace(RUN, sizes=(4, 3, 3, 3)),)),
    "smaller plane": PayloadWritten((replace(RUN, sizes=(2, 3, 3, 3)),)),
    "huge plane": PayloadWritten((replace(RUN, sizes=(3, 3, 3, 2**64 - 1)),)),
    "planes that sum up": PayloadWritten((replace(RUN, sizes=(2, 4, 3, 3)),)),
    "a frame where none is": PayloadWritten((replace(RUN, planes=(b"\0\0", *RUN.planes[1:])),)),
    "index past the end": PayloadWritten((RunWritten.of(2, 10, [1, 0, 7], [1, 2, 3]),)),
    "first index past the end": PayloadWritten((RunWritten.of(2, 10, [10], [1]),)),
    "far past the end": PayloadWritten((RunWritten.of(2, 10, [65534, 65534, 65534], [1, 2, 3]),)),
    "an escape for a change": PayloadWritten((RunWritten.of(2, 10, [1, 0, 65535], [1, 2, 3]),)),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_payload_is_refused(what: str) -> None:
    with pytest.raises(TransferError, match="delta is invalid"):
        decode_delta(DAMAGED[what].tensor(), EXPECTED)


@pytest.mark.parametrize("num_changed", [11, 1 << 26])
def test_more_changes_than_elements_are_refused_before_a_plane_is_read(num_changed: int) -> None:
    planes = (frame(bytes(num_changed)),) * 4
    written = PayloadWritten((RunWritten(2, 10, num_changed, num_changed, planes),))
    with pytest.raises(TransferError, match="do not fit in 10 elements"):
        decode_delta(written.tensor(), EXPECTED)


def test_an_escape_that_leads_nowhere_is_refused() -> None:
    runs = (ElementRun(1, 70_000),)
    good = PayloadWritten((RunWritten.of(1, 70_000, [65535, 3], [1]),))
    assert decode_delta(good.tensor(), runs).parts[0].indices.tolist() == [65538]
    for gaps in ([3, 65535], [65535, 65535], [65535, 65534]):
        with pytest.raises(TransferError, match="delta is invalid"):
            decode_delta(PayloadWritten((RunWritten.of(1, 70_000, gaps, [1]),)).tensor(), runs)


def test_a_payload_for_other_runs_is_refused() -> None:
    for runs in ((), (ElementRun(4, 5),), (ElementRun(2, 9),), (ElementRun(2, 5), ElementRun(2, 5)), (*EXPECTED,) * 2):
        with pytest.raises(TransferError, match="delta is invalid"):
            decode_delta(PAYLOAD.tensor(), runs)


def test_a_payload_cut_or_extended_anywhere_is_refused() -> None:
    payload = PAYLOAD.tensor()
    for size in range(payload.numel()):
        with pytest.raises(TransferError, match="delta is invalid"):
            decode_delta(payload[:size], EXPECTED)
    with pytest.raises(TransferError, match="delta is invalid"):
        decode_delta(torch.cat([payload, payload[-1:]]), EXPECTED)


@given(runs=RUNS.filter(lambda runs: any(run.num_elements for run in runs)), seed=st.integers(0, 2**32), data=st.data())
def test_random_damage_is_refused_or_gives_a_patch_that_fits_and_comes_off(
    runs: tuple[ElementRun, ...], seed: int, data: st.DataObject
) -> None:
    new, base = buckets(runs, 0.3, seed)
    payload = encode_delta(whole_patch(new, base, runs))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.integers(0, 255))
    old = base.clone()
    try:
        patch = decode_delta(payload, runs)
    except TransferError:
        assert torch.equal(base, old)
        return
    assert torch.equal(base, old)
    assert patch.size_bytes == base.numel()
    patch.write(base)


BOMB = frame(bytes(1 << 26))
BOMBS = {
    "a frame that states that it is large": BOMB,
    "a frame that does not say how large it is": zstandard.ZstdCompressor(write_content_size=False).compress(
        bytes(1 << 26)
    ),
    "a frame that is large after one as announced": frame(bytes(1 << 16)) + BOMB,
    "a frame of too few bytes": frame(bytes((1 << 16) - 1)),
    "a frame that is cut": frame(bytes(1 << 16))[:-1],
    "no frame": bytes(100),
}


@pytest.mark.parametrize("what", BOMBS)
def test_frames_of_another_size_are_refused_before_they_take_memory(what: str) -> None:
    num_changed = 1 << 16
    written, runs = with_first_plane(BOMBS[what], num_changed)
    payload = written.tensor()
    tracemalloc.start()
    try:
        with pytest.raises(TransferError, match="delta is invalid"):
            decode_delta(payload, runs)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20, "the bomb has 64 MiB"


def test_the_largest_delta_takes_memory_within_the_bound_that_the_module_states() -> None:
    num_elements = 1 << 18
    runs = (ElementRun(8, num_elements),)
    new, base = buckets(runs, 1.0, seed=0)
    payload = encode_delta(whole_patch(new, base, runs))
    tracemalloc.start()
    try:
        decode_delta(payload, runs)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * num_elements
