"""Headers of Fast-LLM's broadcasts: real pickles are read, and nothing but them; none is unpickled."""

from __future__ import annotations

import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.dialects.fast_llm.framing import TensorHeader, header_bytes, parse_header
from inflight.wire import DTYPE_SIZES, TensorSpec

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
HEADERS = st.builds(
    lambda shard, name, dtype, shape: TensorHeader(
        shard, TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape})
    ),
    NAMES,
    NAMES,
    st.sampled_from(sorted(DTYPE_SIZES)),
    st.lists(st.integers(0, 2**40), max_size=6).map(tuple),
)


def value_of(header: TensorHeader) -> tuple[Any, ...]:
    spec = header.spec
    return header.shard, spec.name, torch.Size(spec.shape), getattr(torch, spec.dtype)


@given(HEADERS, st.sampled_from([2, 3, 4, 5]))
def test_a_header_that_python_pickles_is_read(header: TensorHeader, protocol: int) -> None:
    assert parse_header(pickle.dumps(value_of(header), protocol=protocol)) == header


@given(HEADERS)
def test_a_header_that_we_write_is_what_fast_llm_unpickles(header: TensorHeader) -> None:
    assert pickle.loads(header_bytes(header)) == value_of(header)
    assert parse_header(header_bytes(header)) == header


def test_the_end_of_an_update_is_none() -> None:
    assert pickle.loads(header_bytes(None)) is None
    assert parse_header(pickle.dumps(None)) is None


class Calling:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_a_header_that_calls_something_is_refused_and_calls_nothing(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "called"
    touch = Calling(os.system, f"touch {witness}")
    evil = [
        touch,
        ("weights", touch, torch.Size([1]), torch.float32),
        ("weights", "a", Calling(torch.Size, (touch,)), torch.float32),
        ("weights", "a", torch.Size([1]), Calling(eval, f"open({str(witness)!r}, 'w')")),
        ("weights", "a", torch.Size([1]), Calling(torch.load, str(witness))),
        ("weights", "a", torch.Size([1]), Calling(torch.hub.load, "a/b", "c")),
    ]
    for value in evil:
        with pytest.raises(ValueError, match=r"calls something|is not allowed|not a complete|not \(shard"):
            parse_header(pickle.dumps(value, protocol=protocol))
    assert not witness.exists()


def test_values_of_another_shape_are_refused() -> None:
    size, dtype = torch.Size([2]), torch.float32
    wrong = [
        ("weights", "a", size),
        ("weights", "a", size, dtype, 1),
        ("weights", b"a", size, dtype),
        ("weights", "", size, dtype),
        ("weights", "a" * 1025, size, dtype),
        ("weights", "a", (2,), dtype),
        ("weights", "a", size, "torch.float32"),
        ("weights", "a", size, torch.int64),
        ("weights", "a", size, torch.Size),
        ("weights", "a", Calling(torch.Size, (True,)), dtype),
        ["weights", "a", size, dtype],
        {"weights": "a"},
        7,
    ]
    for value in wrong:
        with pytest.raises(ValueError, match=r"\S"):
            parse_header(pickle.dumps(value))
    with pytest.raises(ValueError, match="bytes follow"):
        parse_header(pickle.dumps(None) + b"x")


def test_pickles_that_exhaust_memory_are_refused_at_once() -> None:
    started = time.monotonic()
    laughs = b"(" + b"".join(b"h%c" % i * 9 + b"t\x94(" for i in range(200))
    huge_memo = b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b"."
    assert parse_header(huge_memo) is None  # C's unpickler would reserve 32 GiB for it
    for data in (b"\x80\x04" + laughs, b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.", b"(" * 65536, b"N" * 65536):
        with pytest.raises(ValueError, match=r"\S"):
            parse_header(data)
    assert time.monotonic() - started < 5


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    try:
        header = parse_header(data)
    except ValueError:
        return
    assert header is None or isinstance(header, TensorHeader)


@given(HEADERS, st.data())
def test_a_damaged_header_is_refused_or_another_header(header: TensorHeader, data: st.DataObject) -> None:
    damaged = bytearray(header_bytes(header))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    test_any_other_bytes_are_refused_and_nothing_else_happens.hypothesis.inner_test(bytes(damaged))  # type: ignore[attr-defined]
