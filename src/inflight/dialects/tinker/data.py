"""Training data of Tinker's API: token sequences with loss inputs, as arrays.

Shape suffixes: N tokens of a datum, K candidates of a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.dialects.tinker.protobuf import messages
from inflight.errors import InvalidRequestError

Array = npt.NDArray[Any]
_DTYPES: dict[int, Any] = {0: np.dtype("<f4"), 1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_BFLOAT16 = 4
_OUTPUT_TYPE = "scalar"
TARGETS = "target_tokens"
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
"""Inputs that may have one value for a whole datum."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence. Row i of a loss input belongs to the prediction after token i."""

    token_ids: tuple[int, ...]
    """The N tokens that the model sees."""
    inputs: Mapping[str, Array]
    """Loss inputs [N] or [N, K] by name."""

    @property
    def target_rows(self) -> Array:
        """The target tokens that are scored, int64 [N, K]; K is 1 if there is one target for each token."""
        targets: Array = self.inputs[TARGETS]
        return targets if targets.ndim == 2 else targets[:, None]


def datums_of(request: Any, *, vocab_size: int, max_tokens: int) -> list[Datum]:
    """Return the data of a ``ForwardBackwardRequest``.

    For data that no loss can use, raises an `InvalidRequestError` that names the datum.
    """
    found = []
    for index, datum in enumerate(request.data):
        try:
            found.append(_datum(datum, vocab_size, max_tokens))
        except ValueError as error:
            raise InvalidRequestError(f"datum {index}: {error}") from error
    return found


def _datum(datum: Any, vocab_size: int, max_tokens: int) -> Datum:
    token_ids: list[int] = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"it has a chunk of kind {kind!r}, but only token ids are supported")
        token_ids += _numbers(chunk.encoded_text.tokens, np.dtype("<i4"), "tokens").tolist()
    if not token_ids:
        raise ValueError("it has no tokens")
    if len(token_ids) >= max_tokens:
        raise ValueError(
            f"it has {len(token_ids)} tokens, but the model's context has room for only {max_tokens - 1} and a target"
        )
    _check_ids(np.array(token_ids), vocab_size, "tokens")
    inputs = {name: _array(tensor, name) for name, tensor in datum.loss_fn_inputs.items()}
    for name, array in inputs.items():
        rows = {len(token_ids)} | ({1} if name in THRESHOLDS else set())
        if array.ndim not in (1, 2) or len(array) not in rows:
            raise ValueError(
                f"{name} has shape {list(array.shape)}, but must have 1 or 2 dimensions, the first of "
                f"{len(token_ids)}, the number of tokens"
            )
    if TARGETS not in inputs:
        raise ValueError(f"it has no {TARGETS}")
    inputs[TARGETS] = inputs[TARGETS].astype(np.int64)
    _check_ids(inputs[TARGETS], vocab_size, TARGETS)
    return Datum(tuple(token_ids), inputs)


def _check_ids(ids: Array, vocab_size: int, name: str) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise ValueError(f"{name} contain the id {int(ids[outside][0])}, but the vocabulary has {vocab_size} tokens")


def _array(tensor: Any, name: str) -> Array:
    """Return a tensor of the protocol as a dense array: integers as int64, floating-point numbers as float32."""
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"{name} has the invalid shape {list(shape)}")
    kind = tensor.WhichOneof("encoding")
    if kind == "sparse_csr":
        array = _dense(tensor.sparse_csr, tensor.dtype, shape, name)
    else:
        array = _values(tensor.dense, tensor.dtype, name)
    if array.size != int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{name} has {array.size} numbers, which do not fit its shape {list(shape)}")
    array = array.reshape(shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} contains numbers that are not finite")
    return array.astype(np.int64) if array.dtype.kind == "i" else array.astype(np.float32)


def _values(content: bytes, dtype: int, name: str) -> Array:
    if dtype == _BFLOAT16:
        words = _numbers(content, np.dtype("<u2"), name).astype(np.uint32) << 16
        return words.view(np.float32)
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    return _numbers(content, _DTYPES[dtype], name)


def _dense(sparse: Any, dtype: int, shape: tuple[int, ...], name: str) -> Array:
    if len(shape) != 2 or shape[0] * shape[1] > 1 << 24:
        raise ValueError(
            f"{name} is sparse with shape {list(shape)}, but must have 2 dimensions and at most {1 << 24} elements"
        )
    values = _values(sparse.values, dtype, name)
    rows = _numbers(sparse.crow_indices, np.dtype("<i8"), name)
    columns = _numbers(sparse.col_indices, np.dtype("<i8"), name)
    counts = np.diff(rows)
    fits = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(columns) == len(values)
    if not fits or (counts < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
        raise ValueError(f"the sparse indices of {name} do not fit its shape {list(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense.ravel()


def _numbers(content: bytes, dtype: np.dtype[Any], name: str) -> Array:
    if len(content) % dtype.itemsize:
        raise ValueError(f"{name} has {len(content)} bytes, which is not a multiple of the size of {dtype.name}")
    return np.frombuffer(content, dtype)


def output_message(logprobs: Sequence[Array], losses: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return, as bytes, a ``ForwardBackwardOutput`` with the logprobs and losses, [N] or [N, K], of each datum.

    Names of metrics have the form ``name:reducer``; the SDK uses the reducer to combine the metrics of several calls.
    """
    output = messages().ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE)
    output.metrics.update(metrics)
    for _, run in itertools.groupby(zip(logprobs, losses, strict=True), lambda it: it[0].shape[1:]):
        of_shape = list(run)  # consecutive data whose shapes differ only in the first dimension
        record = output.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(of_shape))
        for name, arrays in zip(("logprobs", "elementwise_loss"), zip(*of_shape, strict=True), strict=True):
            flats = [np.ascontiguousarray(it, "<f4").tobytes() for it in arrays]
            tensor = record.fields[name]
            tensor.data = b"".join(flats)
            tensor.offsets = np.cumsum([0, *map(len, flats)], dtype="<i8").tobytes()
            tensor.dtype = 1
            tensor.trailing_shape.extend(arrays[0].shape[1:])
    content: bytes = output.SerializeToString()
    return content
