"""The checksum that is computed where the bytes lie: its definition, what it finds, and who computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inflight.errors import TransferError
from inflight.weights.encode import bucket_bytes
from inflight.weights.encode.bucket_bytes import checksum, checksum_as, sums64

MODULUS = 1 << 64
ROW, PRIME = 4096, 4099
ROW_BYTES = 8 * ROW


def reference(data: bytes) -> str:
    """The definition, one word after another."""
    rows, residues = [0] * (len(data) // ROW_BYTES + 1), [0] * PRIME
    for index in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * index : 8 * index + 8].ljust(8, b"\0"), "little")
        rows[index // ROW] += word
        residues[index % PRIME] += word
    told = [len(data), *rows, *residues]
    return "sums64:" + xxhash.xxh3_128_hexdigest(b"".join((n % MODULUS).to_bytes(8, "little") for n in told))


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def random_bytes(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


@given(st.binary(max_size=100))
def test_it_is_what_its_definition_says(data: bytes) -> None:
    assert sums64(tensor(data)) == reference(data)


@pytest.mark.parametrize("size_bytes", [0, 8 * PRIME - 1, ROW_BYTES, ROW_BYTES + 9, 3 * ROW_BYTES + 8, 70 * ROW_BYTES])
def test_sums_are_put_together_as_the_definition_says(size_bytes: int) -> None:
    flat = random_bytes(size_bytes)
    assert sums64(flat) == reference(flat.numpy().tobytes())


@pytest.mark.parametrize("num_rows", [1, 2, 512])
def test_any_number_of_rows_at_a_time_gives_the_same(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = random_bytes(90 * ROW_BYTES + 5)
    whole = sums64(flat)
    monkeypatch.setitem(bucket_bytes._NUM_ROWS, "cpu", num_rows)
    assert sums64(flat) == whole


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_changed_byte_is_found(data: bytes, chosen: st.DataObject) -> None:
    at = chosen.draw(st.integers(0, len(data) - 1))
    other = chosen.draw(st.integers(0, 255).filter(lambda byte: byte != data[at]))
    changed = data[:at] + bytes([other]) + data[at + 1 :]
    assert sums64(tensor(changed)) != sums64(tensor(data))


@settings(max_examples=30)
@given(st.integers(0, 3 * ROW_BYTES), st.integers(1, 255))
def test_any_changed_byte_of_many_rows_is_found(at: int, flip: int) -> None:
    flat = random_bytes(3 * ROW_BYTES + 1)
    before = sums64(flat)
    flat[at] ^= flip
    assert sums64(flat) != before


WORDS = st.one_of(
    st.integers(0, MODULUS - 1), st.integers(0, 63).map(lambda bit: 1 << bit), st.sampled_from([0, MODULUS - 1])
)


@given(st.lists(WORDS, min_size=2, max_size=40), st.data())
def test_any_exchange_of_two_unequal_words_is_found(words: list[int], chosen: st.DataObject) -> None:
    first, second = (chosen.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = list(words)
    swapped[first], swapped[second] = words[second], words[first]
    before, after = (b"".join(word.to_bytes(8, "little") for word in it) for it in (words, swapped))
    assert (sums64(tensor(before)) == sums64(tensor(after))) == (before == after)


@pytest.mark.parametrize("distance", [1, 5, ROW, PRIME, 3 * PRIME, ROW * PRIME])
@pytest.mark.parametrize("bit", [0, 31, 63])
def test_words_that_differ_in_one_bit_are_found_exchanged_over_any_distance(bit: int, distance: int) -> None:
    """Zeros but for one bit: every row and every residue has equal words elsewhere."""
    flat = torch.zeros(8 * (distance + 10), dtype=torch.uint8)
    words = flat.view(torch.int64)
    flat[8 * 7 + bit // 8] = 1 << bit % 8
    before = sums64(flat)
    words[7], words[7 + distance] = words[7 + distance].clone(), words[7].clone()
    assert sums64(flat) != before


@settings(max_examples=40)
@given(st.integers(0, 3 * ROW), st.integers(1, ROW), st.integers(0, 4 * ROW), st.integers(0, 2**32))
def test_any_damage_within_a_row_s_length_is_found(start: int, length: int, shift: int, seed: int) -> None:
    words = torch.arange(8 * ROW) % 7
    before = sums64(words.view(torch.uint8))
    part = words[start : start + length]
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    changed = part[order].roll(shift)
    differs = not torch.equal(changed, part)
    words[start : start + length] = changed
    assert (sums64(words.view(torch.uint8)) != before) == differs


@settings(max_examples=40)
@example(0, ROW, 0)
@given(st.integers(0, 2 * ROW), st.integers(1, ROW), st.integers(0, 5 * ROW))
def test_two_blocks_of_the_same_words_in_another_order_are_found_exchanged(start: int, length: int, gap: int) -> None:
    """An identity matrix that is cut anywhere: sums of whole blocks alone would tell nothing."""
    words = torch.zeros(10 * ROW, dtype=torch.int64)
    second = start + length + gap
    words[start], words[second + length - 1] = 1, 1
    before = sums64(words.view(torch.uint8))
    one, two = words[start : start + length].clone(), words[second : second + length].clone()
    words[start : start + length], words[second : second + length] = two, one
    is_found = sums64(words.view(torch.uint8)) != before
    assert is_found == (not torch.equal(one, two)) or (second - start) % PRIME == 0


@pytest.mark.parametrize("damage", ["shifted by a word", "shifted by a row", "reversed", "a zeroed row", "an old half"])
def test_damage_of_many_rows_is_found(damage: str) -> None:
    words = random_bytes(20 * ROW_BYTES).view(torch.int64)
    changed = words.clone()
    if damage.startswith("shifted"):
        changed = words.roll(ROW if damage.endswith("row") else 1)
    elif damage == "reversed":
        changed = words.flip(0)
    elif damage == "a zeroed row":
        changed[3 * ROW : 4 * ROW] = 0
    else:
        changed[10 * ROW :] = random_bytes(10 * ROW_BYTES, seed=1).view(torch.int64)
    assert sums64(changed.view(torch.uint8)) != sums64(words.view(torch.uint8))


def test_each_byte_is_read_twice_and_nothing_of_its_size_is_written() -> None:
    flat = random_bytes(256 * ROW_BYTES)
    with Accesses() as seen:
        sums64(flat)
    assert seen.read_bytes < 2.1 * flat.numel()
    assert seen.written_bytes < 0.05 * flat.numel()


class Accesses(TorchDispatchMode):
    """Counts the bytes of the tensors that torch's operations read and write; views and copies to the host aside."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = self.written_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.read_bytes += sum(it.nbytes for it in tree_leaves(args) if isinstance(it, torch.Tensor))
            self.written_bytes += sum(it.nbytes for it in tree_leaves(made) if isinstance(it, torch.Tensor))
        return made


@given(st.binary(max_size=200), st.data())
def test_any_cut_and_any_zero_more_is_found(data: bytes, chosen: st.DataObject) -> None:
    found = sums64(tensor(data))
    for other in (data[: chosen.draw(st.integers(0, max(0, len(data) - 1)))], data + b"\0", data + b"\0" * 8):
        assert (sums64(tensor(other)) == found) == (other == data)


@given(st.binary(min_size=16, max_size=64), st.integers(1, 3))
def test_exchanged_and_reordered_blocks_are_found(data: bytes, num_words: int) -> None:
    block = 8 * num_words
    one, two = data[:block], data[:block][::-1]
    before, after = one + data + two, two + data + one
    assert (sums64(tensor(before)) == sums64(tensor(after))) == (before == after)


def test_neither_of_the_two_kinds_of_sums_finds_everything_alone() -> None:
    """What a simpler checksum would let through: words exchanged within a row, and words of one residue exchanged."""
    words = random_bytes(3 * ROW_BYTES).view(torch.int64)
    whole = bucket_bytes._sums(words.view(torch.uint8))
    for distance, kind in ((1, slice(0, 4)), (PRIME, slice(4, None))):
        swapped = words.clone()
        swapped[0], swapped[distance] = words[distance], words[0]
        found = bucket_bytes._sums(swapped.view(torch.uint8))
        assert torch.equal(found[kind], whole[kind]) and not torch.equal(found, whole)


def test_a_view_at_an_odd_offset_has_the_checksum_of_its_own_bytes() -> None:
    flat = random_bytes(1000)
    for start in range(9):
        assert sums64(flat[start : start + 900]) == sums64(flat[start : start + 900].clone())


def test_the_receiver_computes_what_was_announced() -> None:
    flat = random_bytes(100)
    for announced in (sums64(flat), checksum(flat)):
        assert checksum_as(announced, flat) == announced
    assert len(checksum(flat)) == 32


def test_tensors_without_bytes_are_refused() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(8, dtype=torch.uint8, device="cuda")
    for flat in (fake, torch.empty(8, dtype=torch.uint8, device="meta")):
        with pytest.raises(TransferError, match="8 bytes cannot be read"):
            sums64(flat)
