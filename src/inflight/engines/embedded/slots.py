"""Keys and values of running sequences, in slots grouped by length, and attention over them.

Each arena holds sequences of up to ``capacity`` tokens; a sequence that outgrows it moves to the next, twice as large.
Decoding attends arena by arena, so a short sequence does not pay for the longest one. A sequence reserves the most it
can need when it starts, so running sequences can always continue. Arenas grow and shrink with their sequences and never
exceed the limit. For code that keeps addresses there is one arena of a fixed size instead. Knows nothing of requests.

Shape suffixes: L layers, S slots, K key-value heads, Q query heads, C capacity, D head dimension, B decoding rows,
W tokens of one row (at most), T packed tokens.
"""

from __future__ import annotations

import contextlib
import heapq
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from inflight.model.attention import SegmentPlan, SlotIndex, heads_of, kernel_in_words, segment_attention

ATTENTION_NAME = "inflight_slots"

_SMALLEST_CAPACITY = 64


class Arena:
    """Slots of one capacity.

    The occupied ones are always the first ``len(owners)``, unless there is a fixed number, ``num_fixed``: memory and
    slots then stay where they are.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        options: dict[str, Any],
        num_fixed: int = 0,
    ) -> None:
        self.capacity = capacity
        self.owners: list[Slot] = []
        self._is_fixed = num_fixed > 0
        self._free_rows = list(range(num_fixed))
        self._shape = (num_layers, num_fixed, num_kv_heads, capacity, head_dim)
        self._options = options
        self.keys_LSKCD = torch.zeros(self._shape, **options)
        self.values_LSKCD = torch.zeros(self._shape, **options)
        self.slot_bytes = capacity * token_bytes(num_layers, num_kv_heads, head_dim, options["dtype"])

    @property
    def num_slots(self) -> int:
        """Number of slots with allocated memory."""
        return self.keys_LSKCD.shape[1]

    @property
    def size_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def take(self, slot: Slot) -> None:
        """Give a slot the next row, zeroed: attention multiplies masked values by zero, which leaves NaN as it is."""
        if self._is_fixed:
            row = heapq.heappop(self._free_rows)  # `free` has left it zeroed
        else:
            row = len(self.owners)
            self.keys_LSKCD[:, row] = 0
            self.values_LSKCD[:, row] = 0
        self.owners.append(slot)
        slot.arena, slot.row = self, row

    def free(self, slot: Slot) -> None:
        """Take a slot's row back. The last row moves into its place as a whole, with its zeros (see `take`)."""
        if self._is_fixed:
            written = slice(slot.length + 1)  # a step that failed may have stored one position more
            self.keys_LSKCD[:, slot.row, :, written] = 0
            self.values_LSKCD[:, slot.row, :, written] = 0
            heapq.heappush(self._free_rows, slot.row)
            self.owners.remove(slot)
            slot.row = -1
            return
        last = self.owners.pop()
        if last is not slot:
            self.keys_LSKCD[:, slot.row] = self.keys_LSKCD[:, last.row]
            self.values_LSKCD[:, slot.row] = self.values_LSKCD[:, last.row]
            self.owners[slot.row] = last
            last.row = slot.row
        slot.row = -1
        if self.num_slots > 1.5 * len(self.owners) + 1 or not self.owners:
            with contextlib.suppress(RuntimeError, MemoryError):  # without memory for a copy the size stays
                self.resize(len(self.owners))

    def resize(self, num_slots: int) -> None:
        """Reallocate to ``num_slots`` slots, at least the occupied ones. If it raises, nothing has changed."""
        self.keys_LSKCD, self.values_LSKCD = (
            self._resized(self.keys_LSKCD, num_slots),
            self._resized(self.values_LSKCD, num_slots),
        )

    def _resized(self, tensor_LSKCD: torch.Tensor, num_slots: int) -> torch.Tensor:
        num_taken = len(self.owners)
        resized_LSKCD = torch.empty((self._shape[0], num_slots, *self._shape[2:]), **self._options)
        resized_LSKCD[:, :num_taken] = tensor_LSKCD[:, :num_taken]
        return resized_LSKCD


class Slot:
    """The place of one sequence's keys and values: ``length`` positions, which may grow to ``reserved_bytes``.

    ``row`` is -1 if the slot lost its place in a move that ran out of memory.
    """

    __slots__ = ("arena", "length", "reserved_bytes", "row")

    def __init__(self, reserved_bytes: int) -> None:
        self.arena: Arena
        self.row = -1
        self.length = 0
        self.reserved_bytes = reserved_bytes


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def token_bytes_of(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in a model of this configuration."""
    return token_bytes(config.num_hidden_layers, *heads_of(config)[1:], dtype)


def decode_kernel_in_words(config: Any, dtype: torch.dtype, device: torch.device) -> str:
    """Return which kernel torch takes to decode sequences of different lengths with a model of this configuration."""
    num_heads, num_kv_heads, head_dim = heads_of(config)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    query_BKGD = torch.empty(2, num_kv_heads, num_heads // num_kv_heads, head_dim, **options)
    keys_BKCD = torch.empty(2, num_kv_heads, _SMALLEST_CAPACITY, head_dim, **options)
    visible_B11C = torch.ones(2, 1, 1, _SMALLEST_CAPACITY, dtype=torch.bool, device=device)
    return kernel_in_words(query_BKGD, keys_BKCD, keys_BKCD, visible_B11C, is_causal=False)


class SlotStore:
    """Keys and values of all running sequences of one model, in at most ``limit_bytes``.

    With ``num_fixed`` there are that many slots of the longest sequence, allocated at once, and no memory moves. If
    there is even less memory, torch's error passes through: `open` has then allocated nothing, `reserve` leaves a slot
    that can only be closed, and other slots are unaffected.
    """

    def __init__(
        self,
        config: Any,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        limit_bytes: int,
        num_fixed: int = 0,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads_of(config)
        options = {"dtype": dtype, "device": device}
        capacities = []
        capacity = _SMALLEST_CAPACITY
        while capacity < max_model_len and not num_fixed:
            capacities.append(capacity)
            capacity *= 2
        capacities.append(max_model_len)
        shape = (config.num_hidden_layers, num_kv_heads)
        self.arenas = [Arena(*shape, capacity, head_dim, options, num_fixed) for capacity in capacities]
        self.groups = num_heads // num_kv_heads
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0

    @property
    def size_bytes(self) -> int:
        return sum(arena.size_bytes for arena in self.arenas)

    def fits(self, most: int) -> bool:
        """Return whether a sequence of up to ``most`` positions can start now."""
        return self.reserved_bytes + self._arena_for(most).slot_bytes <= self.limit_bytes

    def open(self, length: int, most: int) -> Slot:
        """Return a slot with room for ``length + 1`` positions, which may grow to ``most``."""
        slot = Slot(self._arena_for(most).slot_bytes)
        self._take(self._arena_for(length + 1), slot)
        self.reserved_bytes += slot.reserved_bytes
        return slot

    def expect(self, wanted: Iterable[tuple[Slot, int]]) -> None:
        """Grow arenas at once for all slots that are about to `reserve` so many more positions, not once for each."""
        moves = Counter(
            self._arena_for(slot.length + num) for slot, num in wanted if slot.length + num > slot.arena.capacity
        )
        for arena, num in moves.items():
            more = len(arena.owners) + num - arena.num_slots
            if more > 0 and self.size_bytes + more * arena.slot_bytes <= self.limit_bytes:
                with contextlib.suppress(RuntimeError, MemoryError):  # `reserve` then tells whose place it is
                    arena.resize(len(arena.owners) + num)

    def reserve(self, slot: Slot, num: int = 1) -> None:
        """Make room for ``num`` more positions; the slot may move to a larger arena."""
        if slot.length + num <= slot.arena.capacity:
            return
        old, row, length = slot.arena, slot.row, slot.length
        keys_LKCD = old.keys_LSKCD[:, row, :, :length].clone()
        values_LKCD = old.values_LSKCD[:, row, :, :length].clone()
        old.free(slot)
        self._take(self._arena_for(length + num), slot)
        slot.arena.keys_LSKCD[:, slot.row, :, :length] = keys_LKCD
        slot.arena.values_LSKCD[:, slot.row, :, :length] = values_LKCD

    def copy(self, source: Slot, target: Slot) -> None:
        """Copy the positions of ``source`` into ``target``, which must have room for them."""
        length = source.length
        target.arena.keys_LSKCD[:, target.row, :, :length] = source.arena.keys_LSKCD[:, source.row, :, :length]
        target.arena.values_LSKCD[:, target.row, :, :length] = source.arena.values_LSKCD[:, source.row, :, :length]
        target.length = length

    def close(self, slot: Slot) -> None:
        self.reserved_bytes -= slot.reserved_bytes
        if slot.row >= 0:
            slot.arena.free(slot)

    def free(self) -> None:
        """Free every arena; no slot may be open. One that had no memory to shrink when its last slot closed is left."""
        for arena in self.arenas:
            arena.resize(0)

    def _take(self, arena: Arena, slot: Slot) -> None:
        """Give a slot a row; a full arena grows by a quarter, or less near the limit."""
        needed = len(arena.owners) + 1
        if needed > arena.num_slots:
            wanted = needed + needed // 4
            if self.size_bytes + (wanted - arena.num_slots) * arena.slot_bytes > self.limit_bytes:
                wanted = needed
                for other in self.arenas:
                    if other.num_slots > len(other.owners):
                        other.resize(len(other.owners))
            arena.resize(wanted)
        arena.take(slot)

    def _arena_for(self, length: int) -> Arena:
        return next((arena for arena in self.arenas if arena.capacity >= length), self.arenas[-1])


class AttentionPlan(Protocol):
    """How one forward attends; passed through the model as ``step_plan``."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        query_1QTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Store the keys and values of one layer and return the attention output [1, T, Q, D]."""


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """Decoding tokens ``start <= t < stop`` of the packed batch, which belong to rows of one arena.

    ``rows_T`` and ``positions_T`` say where the keys and values of each go. ``index`` is None if each row has one
    token. ``is_all`` says that the rows are the arena's first ones in order, so that none has to be copied.
    """

    start: int
    stop: int
    longest: int
    positions_T: torch.Tensor
    rows_T: torch.Tensor
    rows_B: torch.Tensor
    index: SlotIndex | None
    visible_B1WC: torch.Tensor | None
    is_all: bool


def _decoding_rows(
    owners: Sequence[Slot], counts: Sequence[int], start: int, groups: int, device: torch.device
) -> DecodingRows:
    """Return the part of a step in which slot i of ``owners`` decodes ``counts[i]`` tokens.

    ``groups`` queries share a key-value head.
    """
    width = max(counts)
    rows = [slot.row for slot in owners]
    rows_B = rows_T = torch.tensor(rows, device=device)
    positions = [slot.length + i for slot, count in zip(owners, counts, strict=True) for i in range(count)]
    positions_T = positions_BW = torch.tensor(positions, device=device)
    index = None
    if width > 1:
        rows_T = torch.tensor([r for r, count in zip(rows, counts, strict=True) for _ in range(count)], device=device)
        index = SlotIndex.padded(counts, width, device)
        positions_BW = positions_T[index.token_of_slot_P]
    longest, visible_B1WC = max(positions) + 1, None
    if width > 1 or min(positions) + 1 < longest:
        seen_BWC = torch.arange(longest, device=device) <= positions_BW.view(len(rows), width, 1)
        visible_B1WC = seen_BWC.repeat(1, groups if width > 1 else 1, 1)[:, None]
    is_all = rows == list(range(len(rows)))
    stop = start + len(positions)
    return DecodingRows(start, stop, longest, positions_T, rows_T, rows_B, index, visible_B1WC, is_all)


class StepPlan(AttentionPlan):
    """How one forward attends: first the tokens of each decoding slot, then whole segments to prefill.

    A slot decodes one token and those that ``ahead`` says for it. Decoding slots come arena by arena, in the order of
    each arena's owners. ``only`` limits them to some slots.
    """

    def __init__(
        self,
        store: SlotStore,
        prefill: Sequence[Slot],
        lengths: Sequence[int],
        device: torch.device,
        only: Collection[Slot] | None = None,
        ahead: Mapping[Slot, int] | None = None,
    ) -> None:
        self._decoding: list[tuple[Arena, DecodingRows]] = []
        self.decoding_slots: list[Slot] = []
        self._counts: list[int] = []
        for arena in store.arenas:
            owners = [slot for slot in arena.owners if slot.length and (only is None or slot in only)]
            if not owners:
                continue
            counts = [1 + ahead.get(slot, 0) for slot in owners] if ahead else [1] * len(owners)
            rows = _decoding_rows(owners, counts, sum(self._counts), store.groups, device)
            self._decoding.append((arena, rows))
            self.decoding_slots += owners
            self._counts += counts
        self._prefill = list(zip(prefill, lengths, strict=True))
        self._segments = SegmentPlan.build(tuple(lengths), device) if prefill else None

    def positions(self) -> list[int]:
        counted = zip(self.decoding_slots, self._counts, strict=True)
        decoding = [slot.length + i for slot, count in counted for i in range(count)]
        return decoding + [position for _, length in self._prefill for position in range(length)]

    def attend(
        self,
        layer: int,
        query_1QTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        num_decoding = sum(self._counts)
        outputs = []
        for arena, rows in self._decoding:
            stored = arena.keys_LSKCD[layer], arena.values_LSKCD[layer]
            outputs.append(attend_rows(*stored, rows, query_1QTD, key_1KTD, value_1KTD, scale))
        if self._segments is not None:
            start = num_decoding
            for slot, length in self._prefill:
                stop = start + length
                slot.arena.keys_LSKCD[layer, slot.row, :, :length] = key_1KTD[0, :, start:stop]
                slot.arena.values_LSKCD[layer, slot.row, :, :length] = value_1KTD[0, :, start:stop]
                start = stop
            rest = slice(num_decoding, None)
            outputs.append(
                segment_attention(
                    query_1QTD[:, :, rest], key_1KTD[:, :, rest], value_1KTD[:, :, rest], self._segments, scale
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def attend_rows(
    keys_SKCD: torch.Tensor,
    values_SKCD: torch.Tensor,
    part: DecodingRows,
    query_1QTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTD: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Store the keys and values of decoding rows in one layer of an arena; return the attention output [1, T, Q, D]."""
    tokens = slice(part.start, part.stop)
    keys_SKCD[part.rows_T, :, part.positions_T] = key_1KTD[0, :, tokens].transpose(0, 1)
    values_SKCD[part.rows_T, :, part.positions_T] = value_1KTD[0, :, tokens].transpose(0, 1)
    num_rows = len(part.rows_B)
    if part.is_all:
        keys_BKCD, values_BKCD = keys_SKCD[:num_rows, :, : part.longest], values_SKCD[:num_rows, :, : part.longest]
    else:
        keys_BKCD, values_BKCD = (it[part.rows_B, :, : part.longest] for it in (keys_SKCD, values_SKCD))
    query_TQD = query_1QTD[0, :, tokens].transpose(0, 1)
    if part.index is not None:
        query_TQD = query_TQD[part.index.token_of_slot_P]
    num_heads, head_dim = query_TQD.shape[1:]
    # Queries that share a key-value head become query positions of that head, so keys are not repeated in memory.
    query_BQWD = query_TQD.view(num_rows, -1, num_heads, head_dim).transpose(1, 2)
    output_BKXD = F.scaled_dot_product_attention(
        query_BQWD.reshape(num_rows, keys_SKCD.shape[1], -1, head_dim),
        keys_BKCD,
        values_BKCD,
        attn_mask=part.visible_B1WC,
        scale=scale,
    )
    output_TQD = output_BKXD.reshape(query_BQWD.shape).transpose(1, 2).reshape(-1, num_heads, head_dim)
    if part.index is not None:
        output_TQD = output_TQD[part.index.slot_of_token_T]
    return output_TQD[None]


def register_slot_attention() -> None:
    """Register `ATTENTION_NAME` with transformers; models built with it take a ``step_plan`` keyword."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    step_plan: AttentionPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    return step_plan.attend(layer, query, key, value, scaling), None
