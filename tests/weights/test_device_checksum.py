"""The checksum that is computed where the bytes lie: its definition, what it finds, and who computes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from inflight.errors import TransferError
from inflight.weights import device_checksum
from inflight.weights.device_checksum import checksum_as, words64
from inflight.weights.packing import checksum

MODULUS = 1 << 64
LANES = ((0x9E3779B97F4A7C15, False), (0xC2B2AE3D27D4EB4D, True))
ROW_BYTES = 8 * device_checksum._ROW


def reference(data: bytes) -> str:
    """The definition, one word after another."""
    lanes = []
    for odd, folds in LANES:
        total, power = len(data) * odd, 1
        for start in range(0, len(data), 8):
            word = int.from_bytes(data[start : start + 8].ljust(8, b"\0"), "little", signed=True)
            total += (word + (word >> 32) if folds else word) * power
            power = power * odd % MODULUS
        lanes.append(f"{total % MODULUS:016x}")
    return "words64:" + "".join(lanes)


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def random_bytes(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


@given(st.binary(max_size=100))
def test_it_is_what_its_definition_says(data: bytes) -> None:
    assert words64(tensor(data)) == reference(data)


@pytest.mark.parametrize("size_bytes", [ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 9, 3 * ROW_BYTES + 8])
def test_rows_are_put_together_as_the_definition_says(size_bytes: int) -> None:
    flat = random_bytes(size_bytes)
    assert words64(flat) == reference(flat.numpy().tobytes())


def test_many_rows_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = random_bytes(9 * ROW_BYTES + 5)
    whole = words64(flat)
    monkeypatch.setattr(device_checksum, "_NUM_ROWS", 2)
    assert words64(flat) == whole


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_changed_byte_is_found(data: bytes, chosen: st.DataObject) -> None:
    at = chosen.draw(st.integers(0, len(data) - 1))
    other = chosen.draw(st.integers(0, 255).filter(lambda byte: byte != data[at]))
    changed = data[:at] + bytes([other]) + data[at + 1 :]
    assert words64(tensor(changed)) != words64(tensor(data))


@settings(max_examples=30)
@given(st.integers(0, 3 * ROW_BYTES), st.integers(1, 255))
def test_any_changed_byte_of_many_rows_is_found(at: int, flip: int) -> None:
    flat = random_bytes(3 * ROW_BYTES + 1)
    before = words64(flat)
    flat[at] ^= flip
    assert words64(flat) != before


WORDS = st.one_of(
    st.integers(0, MODULUS - 1), st.integers(0, 63).map(lambda bit: 1 << bit), st.sampled_from([0, MODULUS - 1])
)


@given(st.lists(WORDS, min_size=2, max_size=40), st.data())
def test_any_exchange_of_two_unequal_words_is_found(words: list[int], chosen: st.DataObject) -> None:
    first, second = (chosen.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = list(words)
    swapped[first], swapped[second] = words[second], words[first]
    before, after = (b"".join(word.to_bytes(8, "little") for word in it) for it in (words, swapped))
    assert (words64(tensor(before)) == words64(tensor(after))) == (before == after)


@pytest.mark.parametrize("bit", range(64))
def test_words_that_differ_in_one_bit_are_found_exchanged_over_a_long_distance(bit: int) -> None:
    words = torch.zeros((1 << 19) + 1, dtype=torch.int64)
    flat = words.view(torch.uint8)
    flat[bit // 8] = 1 << bit % 8
    before = words64(flat)
    words[-1], words[0] = words[0].clone(), words[-1].clone()
    assert words64(flat) != before


@given(st.binary(max_size=200), st.data())
def test_any_cut_and_any_zero_more_is_found(data: bytes, chosen: st.DataObject) -> None:
    found = words64(tensor(data))
    for other in (data[: chosen.draw(st.integers(0, max(0, len(data) - 1)))], data + b"\0", data + b"\0" * 8):
        assert (words64(tensor(other)) == found) == (other == data)


@given(st.binary(min_size=16, max_size=64), st.integers(1, 3))
def test_exchanged_and_reordered_blocks_are_found(data: bytes, num_words: int) -> None:
    block = 8 * num_words
    one, two = data[:block], data[:block][::-1]
    before, after = one + data + two, two + data + one
    assert (words64(tensor(before)) == words64(tensor(after))) == (before == after)


def test_one_lane_alone_misses_what_both_find() -> None:
    """The two lanes are there for a reason: this is what a simpler checksum would let through."""
    words = torch.tensor([-(2**63), 0, 5], dtype=torch.int64)
    swapped = words[[1, 0, 2]]
    none = torch.zeros(1, dtype=torch.int64)
    plain, folded = (
        [int(device_checksum._lane(it, none, odd, folds=folds)) for it in (words, swapped)] for odd, folds in LANES
    )
    assert plain[0] == plain[1]
    assert folded[0] != folded[1]


def test_a_view_at_an_odd_offset_has_the_checksum_of_its_own_bytes() -> None:
    flat = random_bytes(1000)
    for start in range(9):
        assert words64(flat[start : start + 900]) == words64(flat[start : start + 900].clone())


def test_the_receiver_computes_what_was_announced() -> None:
    flat = random_bytes(100)
    for announced in (words64(flat), checksum(flat)):
        assert checksum_as(announced, flat) == announced
    assert len(checksum(flat)) == 32


def test_tensors_without_bytes_are_refused() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(8, dtype=torch.uint8, device="cuda")
    for flat in (fake, torch.empty(8, dtype=torch.uint8, device="meta")):
        with pytest.raises(TransferError, match="8 bytes cannot be read"):
            words64(flat)
