"""Converts Tinker's data to micro-batches, and a micro-batch's logprobs and losses to those of each datum.

A datum of N tokens becomes a segment of N + 1: row i, the prediction after token i, is the target at index i + 1.

Shape suffixes: T packed tokens, N tokens of a datum, K candidates of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from inflight.dialects.tinker.data import TARGETS, THRESHOLDS, Array, Datum
from inflight.dialects.tinker.losses import OPTIONAL_INPUTS, WEIGHTS, TinkerLoss
from inflight.errors import InvalidRequestError
from inflight.model.prefixes import prefix_ids_of_texts
from inflight.types import MicroBatch

_IF_ABSENT = {WEIGHTS: 1.0, **dict.fromkeys(THRESHOLDS, np.nan)}
"""The values of inputs that a datum lacks; the losses replace NaN with the setting."""


@dataclass(frozen=True, slots=True)
class PackedData:
    """A micro-batch and its loss inputs [T] or [T, K]. Index 0 of each segment is not a target; its inputs are 0."""

    batch: MicroBatch
    inputs: Mapping[str, torch.Tensor]


def check_inputs(data: Sequence[Datum], name: str, loss: TinkerLoss) -> None:
    """Raise `InvalidRequestError` if a datum lacks an input of the loss, or has an unused or misshapen one."""
    for index, datum in enumerate(data):
        given = set(datum.inputs)
        if missing := [it for it in loss.inputs if it not in given]:
            raise InvalidRequestError(f"datum {index}: loss_fn {name!r} needs {missing[0]}, but it has {sorted(given)}")
        if unknown := sorted(given - set(loss.inputs) - set(OPTIONAL_INPUTS)):
            raise InvalidRequestError(f"datum {index}: loss_fn {name!r} does not use {unknown[0]}")
        several = datum.inputs[TARGETS].ndim == 2
        if several and not loss.takes_candidates:
            raise InvalidRequestError(f"datum {index}: loss_fn {name!r} takes one target for each token, not several")
        for key in (*loss.inputs, WEIGHTS, *THRESHOLDS):
            of_datum = key in THRESHOLDS and key in given and datum.inputs[key].shape == (1,)
            if key in given and not of_datum and datum.inputs[key].shape != datum.inputs[TARGETS].shape:
                shapes = f"{list(datum.inputs[key].shape)}, but {TARGETS} {list(datum.inputs[TARGETS].shape)}"
                raise InvalidRequestError(f"datum {index}: {key} has shape {shapes}: they must be equal")


def segment_of(datum: Datum) -> npt.NDArray[np.int64]:
    """Return the tokens of a datum followed by its last target: its segment in the micro-batch."""
    return np.array((*datum.token_ids, datum.target_rows[-1, 0]), np.int64)


def micro_batch_of(data: Sequence[Datum], loss: TinkerLoss, *, share_prefixes: bool = False) -> PackedData:
    """Return data as one micro-batch on the CPU. Without data, the micro-batch has no tokens."""
    segments = [segment_of(datum) for datum in data]
    lengths = tuple(len(datum.token_ids) + 1 for datum in data)
    num_tokens, num_targets = sum(lengths), max((datum.target_rows.shape[1] for datum in data), default=1)
    targets_TK = np.zeros((num_tokens, num_targets), np.int64)
    mask_T = np.zeros(num_tokens, np.bool_)
    names = {name for datum in data for name in datum.inputs if name != TARGETS} | {*loss.inputs, WEIGHTS}
    inputs = {name: np.zeros((num_tokens, num_targets), np.float32) for name in names}
    start = 0
    for datum, length in zip(data, lengths, strict=True):
        rows = slice(start + 1, start + length)
        targets_NK = datum.target_rows
        targets_TK[rows, : targets_NK.shape[1]] = targets_NK
        mask_T[rows] = True
        for name, into_TK in inputs.items():
            if name in datum.inputs:
                values: Array = datum.inputs[name]
                into_TK[rows, : targets_NK.shape[1]] = values if values.ndim == 2 else values[:, None]
            elif name in _IF_ABSENT:
                into_TK[rows, : targets_NK.shape[1]] = _IF_ABSENT[name]
        start += length
    batch = MicroBatch(
        token_ids_T=torch.from_numpy(np.concatenate([*segments, np.zeros(0, np.int64)])),
        position_ids_T=torch.from_numpy(np.concatenate([np.arange(length) for length in (*lengths, 0)])),
        segment_ids_T=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        segment_lengths=lengths,
        loss_mask_T=torch.from_numpy(mask_T),
        behaviour_logprobs_T=torch.zeros(num_tokens),
        advantages_T=torch.zeros(num_tokens),
        temperature_T=torch.ones(num_tokens),
        versions_T=torch.full((num_tokens,), -1),
        target_ids_TK=torch.from_numpy(targets_TK),
        prefix_ids_T=torch.from_numpy(prefix_ids_of_texts(segments)) if share_prefixes else None,
    )
    return PackedData(
        batch, {name: torch.from_numpy(it if loss.takes_candidates else it[:, 0]) for name, it in inputs.items()}
    )


def loss_of(
    packed: PackedData, logprobs_TK: torch.Tensor, loss: TinkerLoss, settings: Mapping[str, float]
) -> torch.Tensor:
    """Return the loss of a micro-batch as a scalar in at least float32."""
    return _loss_of_targets(packed, logprobs_TK, loss, settings).sum()


def loss_of_rows(packed: PackedData, logprobs_TK: Array, loss: TinkerLoss, settings: Mapping[str, float]) -> Array:
    """Return the loss of each row of a micro-batch, float32 [T, K]; it is 0 for rows that are not targets."""
    losses_TK = torch.zeros(logprobs_TK.shape)
    found = _loss_of_targets(packed, torch.tensor(logprobs_TK), loss, settings)
    losses_TK[packed.batch.loss_mask_T] = found if loss.takes_candidates else found[:, None]
    return losses_TK.numpy()


def _loss_of_targets(
    packed: PackedData, logprobs_TK: torch.Tensor, loss: TinkerLoss, settings: Mapping[str, float]
) -> torch.Tensor:
    device = logprobs_TK.device
    mask_T = packed.batch.loss_mask_T.to(device)
    logprobs = (logprobs_TK if loss.takes_candidates else logprobs_TK[:, 0])[mask_T]
    inputs = {name: tensor.to(device, logprobs.dtype)[mask_T] for name, tensor in packed.inputs.items()}
    weights = inputs.pop(WEIGHTS)
    counts = weights != 0  # an infinite loss of a row that does not count would otherwise make the sum NaN
    logprobs = torch.where(counts, logprobs, logprobs.detach())
    rows = loss.rows(logprobs, inputs, settings, packed.batch.segment_ids_T.to(device)[mask_T])
    return torch.where(counts, weights * rows, 0.0)


def rows_of_data(data: Sequence[Datum], values_TK: Array) -> list[Array]:
    """Return the values of each datum of a micro-batch: [N], or [N, K] if it has several targets for each token."""
    found, start = [], 0
    for datum in data:
        end = start + len(datum.token_ids) + 1
        rows_NK = values_TK[start + 1 : end, : datum.target_rows.shape[1]]
        found.append(rows_NK if datum.inputs[TARGETS].ndim == 2 else rows_NK[:, 0])
        start = end
    return found
