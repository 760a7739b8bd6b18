"""Packs samples, given by their lengths, into the micro-batches of each rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from inflight.errors import InvalidRequestError


def pack(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Return indices into ``lengths`` as ``[rank][micro_batch][k]``, at most ``max_tokens`` per micro-batch.

    Samples go to the rank with the fewest tokens, longest first (LPT, Graham 1969), so that two ranks differ by no more
    than one sample; within a rank, into the first micro-batch with room (first-fit-decreasing). All ranks compute
    micro-batch i at the same time, so all get the same number of micro-batches, fullest first and perhaps empty at the
    end. Deterministic. Raises `InvalidRequestError` for a sample that is too long.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if longest_first and lengths[longest_first[0]] > max_tokens:
        index = longest_first[0]
        raise InvalidRequestError(
            f"sample {index} has {lengths[index]} tokens but a micro-batch holds {max_tokens}: raise the tokens per "
            f"micro-batch to at least {lengths[index]}, or sample fewer tokens per completion"
        )
    per_rank = [_first_fit(samples, lengths, max_tokens) for samples in _balance(longest_first, lengths, num_ranks)]
    num_micro_batches = max(len(micro_batches) for micro_batches in per_rank)
    return [micro_batches + [[] for _ in range(num_micro_batches - len(micro_batches))] for micro_batches in per_rank]


def _balance(longest_first: Sequence[int], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    samples: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in longest_first:
        load, rank = loads[0]
        samples[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return samples


def _first_fit(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for index in longest_first:
        place = next((i for i, free in enumerate(room) if lengths[index] <= free), None)
        if place is None:
            micro_batches.append([index])
            room.append(max_tokens - lengths[index])
        else:
            micro_batches[place].append(index)
            room[place] -= lengths[index]
    return [micro_batches[i] for i in sorted(range(len(room)), key=lambda i: room[i])]
