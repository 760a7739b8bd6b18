"""Divides tensors among the kit's senders: by rows, by columns, in stripes, into halves, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from inflight.wire import Box, Sharding, TensorSpec


def cut_tensors(specs: Sequence[TensorSpec], num_senders: int) -> list[Sharding]:
    """Return a sharding for each tensor, using each way of cutting in turn.

    The parts differ in size, and some senders have nothing to send.
    """
    return [
        Sharding(senders=tuple(map(tuple, _WAYS[i % len(_WAYS)](spec.shape, num_senders, i))))
        for i, spec in enumerate(specs)
    ]


def halve_tensors(specs: Sequence[TensorSpec], *, swapped: bool) -> list[Sharding]:
    """Return a sharding for each tensor: two senders send equal halves; the second one sends tensors that cannot be
    halved.

    ``swapped`` exchanges the halves.
    """
    shardings = []
    for spec in specs:
        dim = next((dim for dim, size in enumerate(spec.shape) if size % 2 == 0), None)
        whole = _whole(spec.shape)
        halves: tuple[tuple[Box, ...], tuple[Box, ...]] = ((), (whole,))
        if dim is not None:
            middle = spec.shape[dim] // 2
            first, second = ((*whole[:dim], edges, *whole[dim + 1 :]) for edges in ((0, middle), (middle, 2 * middle)))
            halves = ((second,), (first,)) if swapped else ((first,), (second,))
        shardings.append(Sharding(senders=halves))
    return shardings


def _by_rows(shape: tuple[int, ...], num_senders: int, index: int) -> list[list[Box]]:
    return _along(0, shape, num_senders, num_senders, index)


def _by_columns(shape: tuple[int, ...], num_senders: int, index: int) -> list[list[Box]]:
    return _along(len(shape) - 1, shape, num_senders, num_senders, index)


def _in_stripes(shape: tuple[int, ...], num_senders: int, index: int) -> list[list[Box]]:
    return _along(0, shape, 2 * num_senders + 1, num_senders, index)


def _by_one(shape: tuple[int, ...], num_senders: int, index: int) -> list[list[Box]]:
    return [[_whole(shape)] if sender == index // 4 % num_senders else [] for sender in range(num_senders)]


_WAYS: tuple[Callable[[tuple[int, ...], int, int], list[list[Box]]], ...] = (
    *(_by_rows, _by_columns, _in_stripes, _by_one),
)


def _along(dim: int, shape: tuple[int, ...], num_pieces: int, num_senders: int, index: int) -> list[list[Box]]:
    """Return the boxes of each sender: pieces of growing size along one dimension are assigned to the senders in
    turn."""
    if not shape:
        return _by_one(shape, num_senders, index)
    total, whole = num_pieces * (num_pieces + 1), _whole(shape)
    edges = [shape[dim] * i * (i + 1) // total for i in range(num_pieces + 1)]
    boxes: list[list[Box]] = [[] for _ in range(num_senders)]
    for i, piece in enumerate(itertools.pairwise(edges)):
        if piece[0] < piece[1]:
            boxes[(i + index) % num_senders].append((*whole[:dim], piece, *whole[dim + 1 :]))
    return boxes


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)
