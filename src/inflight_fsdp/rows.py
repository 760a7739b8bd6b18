"""A micro-batch as the rows that a rank computes: cut into pipeline chunks, which context-parallel ranks share.

Shape suffixes: T packed tokens, C tokens that are computed (T without those that repeat a shared prefix), R those of
this rank, N targets that this rank predicts, H hidden, M tokens that images fill, L layers, K experts of a token in a
layer or candidate tokens scored at a target's position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inflight.losses.head import chunked_logprobs
from inflight.model.attention import SegmentPlan, SharedTokens
from inflight.model.head_exchange import HeadExchange
from inflight.types import FREE_EXPERT, MicroBatch
from inflight_fsdp.config import RankLayout
from inflight_fsdp.groups import mesh_of


@dataclass(frozen=True, slots=True)
class HeadTargets:
    """The targets of a row; N may be 0."""

    rows_N: torch.Tensor
    """The hidden states that predict the targets: those of the preceding tokens."""
    token_ids_N: torch.Tensor
    """[N], or [N, K] with several candidate tokens at each target's position."""
    temperature_N: torch.Tensor
    chunk_size: int
    """Number of targets whose logits are in memory at the same time."""

    def some(self, chosen: torch.Tensor) -> HeadTargets:
        """Return the targets at these indices."""
        return HeadTargets(self.rows_N[chosen], self.token_ids_N[chosen], self.temperature_N[chosen], self.chunk_size)

    def logprobs(self, hidden_1RH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
        """Return the logprobs [N], or [N, K], under a linear head."""
        return chunked_logprobs(
            hidden_1RH[0].index_select(0, self.rows_N),
            weight_VH,
            self.token_ids_N,
            self.temperature_N,
            bias_V=bias_V,
            chunk_size=self.chunk_size,
        )

    def shared_logprobs(
        self, hidden_1RH: torch.Tensor, weight_VH: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Return the logprobs [N], or [N, K]; each rank of a group computes some of them, with the whole weight.

        The hidden states must be the same on all ranks. On each rank, the gradients of the hidden states and of the
        weight cover only the rank's own targets.
        """
        mine = torch.arange(len(self.rows_N), device=weight_VH.device)[group.rank() :: group.size()]
        logprobs_N = self.some(mine).logprobs(hidden_1RH, weight_VH, None)
        return sum_over_group(logprobs_N.new_zeros(self.token_ids_N.shape).index_copy(0, mine, logprobs_N), group)


@dataclass(frozen=True, slots=True)
class PackedImages:
    """The images of a micro-batch on the device that computes."""

    rows_M: torch.Tensor
    """int64: the token positions that the images fill."""
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens that a policy computes in one forward pass; at least one token."""

    token_ids_R: torch.Tensor
    position_ids_R: torch.Tensor
    plan: SegmentPlan
    """The segments of the whole row; other ranks may compute parts of it."""
    targets: HeadTargets
    places_N: torch.Tensor
    """int64: the targets' indices in the micro-batch."""
    images: PackedImages | None = None
    """Present only if the row is the whole micro-batch."""
    routed_experts_RLK: torch.Tensor | None = None
    """int64: as in `MicroBatch`."""


def rows_of(
    batch: MicroBatch,
    num_rows: int,
    exchange: HeadExchange | None,
    chunk_size: int,
    device: torch.device,
    images: PackedImages | None = None,
) -> list[Row]:
    """Return a micro-batch of any size as exactly ``num_rows`` rows of whole segments, with tensors on ``device``.

    A row without segments gets a padding token: other ranks may have tokens in that row, and all ranks must take part
    in the same collectives. With an ``exchange``, each row is padded so that its ranks get equal parts. ``images`` may
    be passed only if there is a single row.
    """
    rows, start = [], 0
    for lengths in _shares(batch.segment_lengths, num_rows):
        stop = start + sum(lengths)
        rows.append(_row(batch, slice(start, stop), lengths, exchange, chunk_size, device, images))
        start = stop
    return rows


def _shares(lengths: Sequence[int], num_shares: int) -> list[tuple[int, ...]]:
    """Return the lengths, in order, divided into shares with about equal sums; some may be empty."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    total, before = sum(lengths), 0
    for length in lengths:
        shares[min(num_shares - 1, int((before + length / 2) * num_shares / total))].append(length)
        before += length
    return [tuple(share) for share in shares]


def _row(
    batch: MicroBatch,
    tokens: slice,
    lengths: tuple[int, ...],
    exchange: HeadExchange | None,
    chunk_size: int,
    device: torch.device,
    images: PackedImages | None,
) -> Row:
    num_ranks, rank = (1, 0) if exchange is None else (exchange.num_ranks, exchange.group.rank())
    token_ids_T, position_ids_T = batch.token_ids_T[tokens], batch.position_ids_T[tokens]
    experts_TLK = None if batch.routed_experts_TLK is None else batch.routed_experts_TLK[tokens]
    targets_N = batch.loss_mask_T[tokens].nonzero().squeeze(1)
    rows_N, shared = targets_N - 1, None  # a target is predicted at the token before it
    if batch.prefix_ids_T is not None and lengths:
        shared = SharedTokens.of(batch.prefix_ids_T[tokens])
        token_ids_C, position_ids_C = token_ids_T[shared.first_T], position_ids_T[shared.first_T]
        experts_CLK = None if experts_TLK is None else experts_TLK[shared.first_T]
        rows_N = shared.token_S[rows_N]
        if images is not None:
            images = PackedImages(shared.token_S.to(device)[images.rows_M], images.tensors)
    else:
        token_ids_C, position_ids_C, experts_CLK = token_ids_T, position_ids_T, experts_TLK
    num_computed = len(token_ids_C)
    padding = -num_computed % num_ranks if num_computed else num_ranks
    if padding:
        positions_P = torch.arange(padding, device=token_ids_C.device)
        token_ids_C = torch.cat([token_ids_C, torch.zeros_like(positions_P)])
        position_ids_C = torch.cat([position_ids_C, positions_P])
        if experts_CLK is not None:
            experts_CLK = torch.cat([experts_CLK, experts_CLK.new_full((padding, *experts_CLK.shape[1:]), FREE_EXPERT)])
        lengths = (*lengths, padding)
        if shared is not None:
            shared = shared.padded(padding)
    each = len(token_ids_C) // num_ranks
    mine = slice(rank * each, (rank + 1) * each)
    # If the batch is on a GPU and no prefixes are shared, only reading these indices synchronizes with the GPU.
    if num_ranks > 1:
        is_mine_N = (rows_N >= mine.start) & (rows_N < mine.stop)
        rows_N, targets_N = rows_N[is_mine_N] - mine.start, targets_N[is_mine_N]
    scored_T = token_ids_T if batch.target_ids_TK is None else batch.target_ids_TK[tokens]
    targets = HeadTargets(
        rows_N.to(device),
        scored_T[targets_N].to(device),
        batch.temperature_T[tokens][targets_N].to(device),
        chunk_size,
    )
    return Row(
        token_ids_C[mine].to(device),
        position_ids_C[mine].to(device),
        SegmentPlan.build(lengths, device, exchange, shared),
        targets,
        (targets_N + tokens.start).to(device),
        images,
        routed_experts_RLK=None if experts_CLK is None else experts_CLK[mine].to(device, torch.int64),
    )


def head_exchange(ranks: RankLayout, device: torch.device) -> HeadExchange | None:
    """Return the exchange among the ranks that share this rank's rows, or None if no ranks share rows; collective."""
    if ranks.context == 1:
        return None
    shape = (ranks.num_ranks // ranks.context // ranks.tensor, ranks.context, ranks.tensor)
    return HeadExchange(mesh_of(device, shape, ("others", "context", "tensor")).get_group("context"))


def sum_over_group(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of ``x`` over the ranks of a group; the backward pass does not sum gradients over ranks.

    All ranks must compute the same loss from the result, so its gradient is the same on each and must be counted once.
    """
    total: torch.Tensor = _SummedForAll.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _SummedForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
