"""Packs samples, given by their lengths, into the micro-batches of each rank."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.errors import InvalidRequestError
from inflight.model.prefixes import Int64s, shared_prefixes, shared_prefixes_of_texts
from inflight.types import Sample

Packed = list[list[list[int]]]
"""Indices of samples, as ``[share][micro_batch][k]``."""


_LEAST_SHARED = 0.05
"""Minimum share of repeated tokens for which samples are packed by prefix; below it, fuller micro-batches gain more."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the samples of an optimizer step are divided among the trainer's micro-batches."""

    max_tokens: int
    """Maximum number of tokens in a micro-batch."""
    num_shares: int
    """The number of shares of the data; each is computed by one rank, or by several together."""
    share_prefixes: bool = False
    """Whether a prefix that samples have in common is counted and computed only once in each micro-batch."""

    def pack(self, samples: Sequence[Sample]) -> Packed:
        """Return the indices of the samples in each micro-batch.

        Unless prefixes are shared, the result is that of the function `pack`. If they are shared, samples with a common
        prefix are kept together, and shares receive about the same number of computed tokens; a prefix that crosses the
        boundary between two shares or micro-batches is computed in both. Since attention is computed for whole
        sequences, the sequences of a micro-batch add up to at most twice ``max_tokens``. Raises
        `InvalidRequestError` for a sample that is too long.
        """
        rollouts = [sample.rollout for sample in samples]
        return self._pack([it.num_tokens for it in rollouts], lambda: shared_prefixes(rollouts))

    def pack_texts(self, texts: Sequence[Int64s]) -> Packed:
        """Return the indices of the sequences in each micro-batch, as the method `pack` does for samples."""
        return self._pack([len(text) for text in texts], lambda: shared_prefixes_of_texts(texts))

    def _pack(self, lengths: Sequence[int], shared_prefixes: Callable[[], tuple[list[int], list[int]]]) -> Packed:
        if not self.share_prefixes or not lengths:
            return pack(lengths, self.max_tokens, self.num_shares)
        _check_lengths(lengths, self.max_tokens)
        order, shared = shared_prefixes()
        if sum(shared) < _LEAST_SHARED * sum(lengths):
            return pack(lengths, self.max_tokens, self.num_shares)
        total, before, num_filled, num_attended = sum(lengths) - sum(shared), 0.0, 0, 0
        per_share: Packed = [[] for _ in range(self.num_shares)]
        for i, num_shared in zip(order, shared, strict=True):
            num_new = lengths[i] - num_shared
            middle = before + num_new / 2
            micro_batches = per_share[min(self.num_shares - 1, int(middle * self.num_shares / total))]
            before += num_new
            has_room = num_filled + num_new <= self.max_tokens and num_attended + lengths[i] <= 2 * self.max_tokens
            if micro_batches and has_room:
                micro_batches[-1].append(i)
                num_filled, num_attended = num_filled + num_new, num_attended + lengths[i]
            else:
                micro_batches.append([i])
                num_filled = num_attended = lengths[i]
        return _with_equal_numbers(per_share)


def pack(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> Packed:
    """Return indices into ``lengths`` as ``[rank][micro_batch][k]``, at most ``max_tokens`` per micro-batch.

    Each sample, longest first, goes to the rank with the fewest tokens so far (LPT, Graham 1969), so the loads of two
    ranks differ by no more than one sample. Within a rank, it goes to the first micro-batch with enough room
    (first-fit-decreasing). All ranks compute micro-batch i at the same time, so all receive the same number of
    micro-batches: the fullest come first, and the last ones may be empty. The result is deterministic. Raises
    `InvalidRequestError` for a sample that is too long.
    """
    _check_lengths(lengths, max_tokens)
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return _with_equal_numbers(
        [_first_fit(samples, lengths, max_tokens) for samples in _balance(longest_first, lengths, num_ranks)]
    )


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise InvalidRequestError(
            f"sample {lengths.index(longest)} has {longest} tokens but a micro-batch holds {max_tokens}: raise the "
            f"tokens per micro-batch to at least {longest}, or sample fewer tokens per completion"
        )


def _with_equal_numbers(per_rank: Packed) -> Packed:
    """Return the micro-batches of each rank, with empty ones appended so that all ranks have the same number."""
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
