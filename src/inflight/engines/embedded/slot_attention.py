"""Attention over the slots of running sequences, and over prompts whose keys and values are stored in slots.

Shape suffixes: S slots, K key-value heads, Q query heads, C capacity, D head dimension, B decoding rows, W maximum
number of tokens in a row, T packed tokens, P padded places, G queries per key-value head, X queries per row and head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from inflight.engines.embedded.slots import SMALLEST_CAPACITY, Arena, Slot, SlotStore
from inflight.model.attention import SegmentPlan, SlotIndex, describe_kernel, heads_of, segment_attention

ATTENTION_NAME = "inflight_slots"


class AttentionPlan(Protocol):
    """How one forward pass attends; passed through the model as ``step_plan``."""

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
    """The decoding tokens ``start <= t < stop`` of the packed batch, which belong to rows of one arena.

    ``vectors_X`` contains the index of each key and value vector [K * T] among all vectors of an arena's layer.
    ``index`` is None if each row has one token. ``is_all`` is true if the rows are the first rows of the arena in
    order, so that none has to be copied.
    """

    start: int
    stop: int
    longest: int
    vectors_X: torch.Tensor
    rows_B: torch.Tensor
    index: SlotIndex | None
    visible_B1WC: torch.Tensor | None
    is_all: bool


def _decoding_rows(
    arena: Arena, owners: Sequence[Slot], counts: Sequence[int], start: int, groups: int, device: torch.device
) -> DecodingRows:
    """Return the part of a step in which slot i of ``owners``, all in ``arena``, decodes ``counts[i]`` tokens.

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
    vectors_X = vector_indices(rows_T, positions_T, *arena.keys_LSKCD.shape[2:4])
    return DecodingRows(start, stop, longest, vectors_X, rows_B, index, visible_B1WC, is_all)


def vector_indices(rows_T: torch.Tensor, positions_T: torch.Tensor, num_heads: int, capacity: int) -> torch.Tensor:
    """Return, for each head and token [K * T], the index of its vector in an arena's layer."""
    heads_K1 = torch.arange(num_heads, device=rows_T.device)[:, None]
    return ((rows_T * num_heads + heads_K1) * capacity + positions_T).flatten()


class StepPlan(AttentionPlan):
    """How one forward pass attends: first come the tokens of each decoding slot, then whole segments to prefill.

    A slot decodes one token plus the number of tokens that ``ahead`` specifies for it. Decoding slots are ordered by
    arena, and within an arena in the order of its owners. ``only`` restricts decoding to some slots.
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
            rows = _decoding_rows(arena, owners, counts, sum(self._counts), store.groups, device)
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
    """Store the keys and values of decoding rows in one arena's layer, and return the attention output [1, T, Q, D]."""
    tokens = slice(part.start, part.stop)
    head_dim = keys_SKCD.shape[-1]
    # One index of contiguous vectors: three of them, of rows, heads and positions, take four times as long on CPUs.
    keys_SKCD.view(-1, head_dim).index_copy_(0, part.vectors_X, key_1KTD[0, :, tokens].reshape(-1, head_dim))
    values_SKCD.view(-1, head_dim).index_copy_(0, part.vectors_X, value_1KTD[0, :, tokens].reshape(-1, head_dim))
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
    """Register `ATTENTION_NAME` with transformers. Models built with it accept a ``step_plan`` keyword argument."""
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


def describe_decode_kernel(config: Any, dtype: torch.dtype, device: torch.device) -> str:
    """Return which kernel torch uses to decode sequences of different lengths with a model of this configuration."""
    num_heads, num_kv_heads, head_dim = heads_of(config)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    query_BKGD = torch.empty(2, num_kv_heads, num_heads // num_kv_heads, head_dim, **options)
    keys_BKCD = torch.empty(2, num_kv_heads, SMALLEST_CAPACITY, head_dim, **options)
    visible_B11C = torch.ones(2, 1, 1, SMALLEST_CAPACITY, dtype=torch.bool, device=device)
    return describe_kernel(query_BKGD, keys_BKCD, keys_BKCD, visible_B11C, is_causal=False)
