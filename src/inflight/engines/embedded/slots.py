"""Keys and values of running sequences, in slots grouped by length.

Each arena holds sequences of up to ``capacity`` tokens; a sequence that outgrows its arena moves to the next one, whose
capacity is twice as large. Decoding attends arena by arena, so a short sequence does not incur the cost of the longest
one. A sequence reserves memory for its maximum length when it starts, so running sequences can always continue. Arenas
grow and shrink with their sequences, and never exceed the memory limit. Code that needs constant addresses uses one
arena of a fixed size instead.

Shape suffixes: L layers, S slots, K key-value heads, C capacity, D head dimension.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from inflight.model.attention import heads_of

SMALLEST_CAPACITY = 64


class Arena:
    """Slots with the same capacity.

    The occupied slots are always the first ``len(owners)``, unless the number of slots is fixed (``num_fixed``). In
    that case, neither the memory nor the slots ever move.
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
        """Assign the next row to a slot and zero it, because masked values are multiplied by 0, which keeps NaNs."""
        if self._is_fixed:
            row = heapq.heappop(self._free_rows)  # `free` has left it zeroed
        else:
            row = len(self.owners)
            self.keys_LSKCD[:, row] = 0
            self.values_LSKCD[:, row] = 0
        self.owners.append(slot)
        slot.arena, slot.row = self, row

    def free(self, slot: Slot) -> None:
        """Reclaim a slot's row. The whole last row, including its zeros (see `take`), moves into its place."""
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
        """Reallocate memory for ``num_slots`` slots, at least as many as are occupied.

        If it raises, nothing has changed.
        """
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
    """The place of one sequence's keys and values. It has ``length`` positions, and may grow to ``reserved_bytes``.

    ``row`` is -1 if the slot lost its row in a move that ran out of memory.
    """

    __slots__ = ("arena", "length", "reserved_bytes", "row")

    def __init__(self, reserved_bytes: int) -> None:
        self.arena: Arena
        self.row = -1
        self.length = 0
        self.reserved_bytes = reserved_bytes


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of one token's keys and values in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def token_bytes_of(config: Any, dtype: torch.dtype) -> int:
    """Return the size in bytes of one token's keys and values in a model of this configuration."""
    return token_bytes(config.num_hidden_layers, *heads_of(config)[1:], dtype)


class SlotStore:
    """Keys and values of all running sequences of one model, in at most ``limit_bytes``.

    With ``num_fixed``, that many slots for sequences of maximum length are allocated in advance, and no memory moves.
    If an allocation fails, torch's error propagates: `open` has then allocated nothing, `reserve` leaves a slot that
    can only be closed, and other slots are unaffected.
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
        capacity = SMALLEST_CAPACITY
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
        """Return whether a sequence that may reach ``most`` positions can start now."""
        return self.reserved_bytes + self._arena_for(most).slot_bytes <= self.limit_bytes

    def open(self, length: int, most: int) -> Slot:
        """Return a slot that can hold ``length + 1`` positions and may grow to ``most``."""
        slot = Slot(self._arena_for(most).slot_bytes)
        self._take(self._arena_for(length + 1), slot)
        self.reserved_bytes += slot.reserved_bytes
        return slot

    def expect(self, wanted: Iterable[tuple[Slot, int]]) -> None:
        """Grow arenas once for all slots that are about to `reserve` these numbers of positions, not once per slot."""
        moves = Counter(
            self._arena_for(slot.length + num) for slot, num in wanted if slot.length + num > slot.arena.capacity
        )
        for arena, num in moves.items():
            more = len(arena.owners) + num - arena.num_slots
            if more > 0 and self.size_bytes + more * arena.slot_bytes <= self.limit_bytes:
                with contextlib.suppress(RuntimeError, MemoryError):  # `reserve` then raises for the slot in question
                    arena.resize(len(arena.owners) + num)

    def reserve(self, slot: Slot, num: int = 1) -> None:
        """Ensure that there is space for ``num`` more positions; the slot may move to a larger arena."""
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
        """Copy the positions of ``source`` into ``target``, which must be able to hold them."""
        length = source.length
        target.arena.keys_LSKCD[:, target.row, :, :length] = source.arena.keys_LSKCD[:, source.row, :, :length]
        target.arena.values_LSKCD[:, target.row, :, :length] = source.arena.values_LSKCD[:, source.row, :, :length]
        target.length = length

    def close(self, slot: Slot) -> None:
        self.reserved_bytes -= slot.reserved_bytes
        if slot.row >= 0:
            slot.arena.free(slot)

    def free(self) -> None:
        """Free every arena, including any that could not shrink when its last slot was closed. No slot may be open."""
        for arena in self.arenas:
            arena.resize(0)

    def _take(self, arena: Arena, slot: Slot) -> None:
        """Assign a row to a slot. A full arena grows by a quarter, or by less near the limit."""
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
