"""Data of the wire: dense and sparse tensors, refusals, and outputs as the SDK reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.dialects.tinker.data import datums_of, output_message
from inflight.dialects.tinker.protobuf import messages, parse
from inflight.errors import InvalidRequestError


def request_with(token_ids: list[int], **inputs: Any) -> Any:
    """A request with one datum; an input is an array, or a function that fills the message of its tensor."""
    request = messages().ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(token_ids, "<i4").tobytes()
    for name, value in inputs.items():
        tensor = datum.loss_fn_inputs[name]
        if callable(value):
            value(tensor)
            continue
        kind = {"float32": 1, "int64": 2, "int32": 3}[value.dtype.name]
        tensor.dense, tensor.dtype = value.tobytes(), kind
        tensor.shape.extend(value.shape)
    return parse("ForwardBackwardRequest", request.SerializeToString())


def read(request: Any) -> Any:
    (datum,) = datums_of(request, vocab_size=100, max_tokens=50)
    return datum


def sparse(array: np.ndarray[Any, Any], **changes: bytes) -> Any:
    """Fill a tensor with the CSR form of an array."""

    def fill(tensor: Any) -> None:
        rows, columns = np.nonzero(array)
        counts = np.bincount(rows, minlength=len(array))
        tensor.sparse_csr.values = array[rows, columns].tobytes()
        tensor.sparse_csr.crow_indices = np.concatenate([[0], np.cumsum(counts)]).astype("<i8").tobytes()
        tensor.sparse_csr.col_indices = columns.astype("<i8").tobytes()
        tensor.dtype = {"float32": 1, "int64": 2}[array.dtype.name]
        tensor.shape.extend(array.shape)
        for name, value in changes.items():
            setattr(tensor.sparse_csr, name, value)

    return fill


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_sparse_tensors_are_read_as_the_dense_ones(num_tokens: int, width: int, draw: Any) -> None:
    cells = draw.draw(st.lists(st.integers(0, 99), min_size=num_tokens * width, max_size=num_tokens * width))
    targets = np.array(cells, np.int64).reshape(num_tokens, width) * (np.arange(width) % 2 == 0)
    weights = targets.astype(np.float32) / 7
    ids = list(range(num_tokens))
    dense = read(request_with(ids, target_tokens=targets, weights=weights))
    found = read(request_with(ids, target_tokens=sparse(targets), weights=sparse(weights)))
    for name in ("target_tokens", "weights"):
        np.testing.assert_array_equal(found.inputs[name], dense.inputs[name])
        np.testing.assert_array_equal(dense.inputs[name], {"target_tokens": targets, "weights": weights}[name])
    assert found.token_ids == tuple(ids)


def test_bfloat16_and_int32_are_widened() -> None:
    def halves(tensor: Any) -> None:
        words = np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16
        tensor.dense, tensor.dtype = words.astype("<u2").tobytes(), 4
        tensor.shape.append(2)

    datum = read(request_with([1, 2], target_tokens=np.array([3, 4], np.int32), weights=halves))
    assert datum.inputs["weights"].tolist() == [1.5, -2.0]
    assert datum.inputs["target_tokens"].dtype == np.int64


TARGETS = np.array([1, 2], np.int64)


@pytest.mark.parametrize(
    ("token_ids", "inputs", "message"),
    [
        ([], {"target_tokens": TARGETS}, "it has no tokens"),
        ([1, 100], {"target_tokens": TARGETS}, "tokens contain the id 100, but the vocabulary has 100"),
        ([1, 2], {"target_tokens": TARGETS - 2}, "target_tokens contain the id -1"),
        ([1, 2], {}, "it has no target_tokens"),
        (
            [1] * 50,
            {"target_tokens": np.ones(50, np.int64)},
            "it has 50 tokens, but .* has room for only 49",
        ),
        ([1, 2], {"target_tokens": np.ones(3, np.int64)}, r"target_tokens has shape \[3\], .*, the first of 2"),
        ([1, 2], {"target_tokens": TARGETS, "weights": np.array([1, np.nan], np.float32)}, "are not finite"),
        (
            [1, 2],
            {"target_tokens": sparse(np.ones((2, 2), np.int64), col_indices=np.array([0, 1, 0, 2]).tobytes())},
            "the sparse indices of target_tokens do not fit its shape",
        ),
        (
            [1, 2],
            {"target_tokens": sparse(np.ones((2, 2), np.int64), crow_indices=np.array([0, 3, 2]).tobytes())},
            "the sparse indices of target_tokens do not fit its shape",
        ),
        ([1, 2], {"target_tokens": sparse(np.ones((2, 2), np.int64), values=b"123")}, "has 3 bytes"),
    ],
)
def test_data_that_no_loss_can_use_are_refused_by_their_index(
    token_ids: list[int], inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"datum 0: .*{message}"):
        read(request_with(token_ids, **inputs))


def test_a_shape_that_contradicts_the_bytes_is_refused() -> None:
    def short(tensor: Any) -> None:
        tensor.dense, tensor.dtype = TARGETS.tobytes(), 2
        tensor.shape.extend([2, 1 << 40])

    with pytest.raises(InvalidRequestError, match="has 2 numbers, which do not fit its shape"):
        read(request_with([1, 2], target_tokens=short))


def test_an_image_is_refused() -> None:
    request = request_with([1, 2], target_tokens=TARGETS)
    request.data[0].model_input.add().image.data = b"png"
    with pytest.raises(InvalidRequestError, match="datum 0: it has a chunk of kind 'image'"):
        read(request)


def test_outputs_of_equal_shape_share_a_record() -> None:
    arrays = [np.ones(3, np.float32), np.zeros(2, np.float32), np.ones((2, 4), np.float32)]
    output = messages().ForwardBackwardOutput()
    output.ParseFromString(output_message(arrays, [-it for it in arrays], {"loss:sum": 2.0}))
    assert [record.num_datums for record in output.loss_fn_outputs] == [2, 1]
    first = output.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 12, 20]
    assert np.frombuffer(first.data, "<f4").tolist() == [1, 1, 1, 0, 0]
    losses = output.loss_fn_outputs[0].fields["elementwise_loss"]
    assert np.frombuffer(losses.data, "<f4").tolist() == [-1, -1, -1, 0, 0]
    assert list(output.loss_fn_outputs[1].fields["logprobs"].trailing_shape) == [4]
    assert dict(output.metrics) == {"loss:sum": 2.0}


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the body is not a ForwardBackwardRequest"):
        parse("ForwardBackwardRequest", b"\xff\xff\xff")
