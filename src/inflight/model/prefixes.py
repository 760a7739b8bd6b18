"""Finds tokens of a step's sequences that have the same prefix, for which a model computes the same values.

Completions of a group share their prompt. Turns and branches of an episode share the conversation so far, and all
sequences rendered by one chat template share its first tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inflight.types import Rollout

Int64s = npt.NDArray[np.int64]


def shared_prefixes(rollouts: Sequence[Rollout]) -> tuple[list[int], list[int]]:
    """Return an order that places rollouts with common prefixes next to each other, and the lengths of the prefixes.

    The k-th length is the number of leading tokens that the k-th rollout in this order shares with the one before it. A
    prefix never ends within an image.
    """
    order, lengths = _shared(_keys(rollouts))
    return order, [_outside_images(rollouts[i], length) for i, length in zip(order, lengths, strict=True)]


def prefix_ids(rollouts: Sequence[Rollout]) -> Int64s:
    """Return `MicroBatch.prefix_ids_T` for rollouts that are packed in this order.

    The id of a token is the index of the first packed token with the same prefix.
    """
    return _ids([it.num_tokens for it in rollouts], *shared_prefixes(rollouts))


def shared_prefixes_of_texts(texts: Sequence[Int64s]) -> tuple[list[int], list[int]]:
    """Return the result of `shared_prefixes` for sequences of plain token ids."""
    return _shared([np.ascontiguousarray(text, ">u4").view("V4") for text in texts])


def prefix_ids_of_texts(texts: Sequence[Int64s]) -> Int64s:
    """Return the result of `prefix_ids` for sequences of plain token ids."""
    return _ids([len(text) for text in texts], *shared_prefixes_of_texts(texts))


def _shared(keys: Sequence[npt.NDArray[np.void]]) -> tuple[list[int], list[int]]:
    order = sorted(range(len(keys)), key=lambda i: keys[i].tobytes())
    lengths = [_num_equal(keys[before], keys[i]) for before, i in itertools.pairwise(order)]
    return order, [0, *lengths] if order else []


def _ids(num_tokens: Sequence[int], order: Sequence[int], lengths: Sequence[int]) -> Int64s:
    starts = np.cumsum(num_tokens) - num_tokens
    ids_T = np.arange(sum(num_tokens))
    for (before, i), length in zip(itertools.pairwise(order), lengths[1:], strict=True):
        ids_T[starts[i] : starts[i] + length] = ids_T[starts[before] : starts[before] + length]
    _, first, of_token = np.unique(ids_T, return_index=True, return_inverse=True)
    return first[of_token].astype(np.int64)


def _keys(rollouts: Sequence[Rollout]) -> list[npt.NDArray[np.void]]:
    """Return the inputs from which a model computes each token of a rollout: its id or image, and its experts."""
    urls: dict[str, int] = {}
    records = [it.routed_experts for it in rollouts]
    width = max((record.row_bytes for record in records if record is not None), default=0)
    keys = []
    for rollout, record in zip(rollouts, records, strict=True):
        ids = np.array((*rollout.prompt_token_ids, *rollout.completion_token_ids), ">u4")
        for image in rollout.images:  # token ids are below 2^31
            ids[image.start : image.end] = np.iinfo(np.uint32).max - urls.setdefault(image.url, len(urls))
        key = np.full((len(ids), ids.itemsize + width), 0xFF, np.uint8)  # experts that are not known
        key[:, : ids.itemsize] = ids.view(np.uint8).reshape(-1, ids.itemsize)
        if record is not None:
            rows = np.frombuffer(record.to_bytes(), np.uint8).reshape(-1, record.row_bytes)[: len(ids)]
            key[: len(rows), ids.itemsize : ids.itemsize + record.row_bytes] = rows
        keys.append(key.reshape(-1).view(f"V{key.shape[1]}"))
    return keys


def _outside_images(rollout: Rollout, length: int) -> int:
    """Return ``length``, or the start of the image that a prefix of this length would cut."""
    return next((image.start for image in rollout.images if image.start < length < image.end), length)


def _num_equal(a: npt.NDArray[np.void], b: npt.NDArray[np.void]) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
