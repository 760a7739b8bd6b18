"""Attention over a packed row that is split across ranks: each switches from some tokens to some heads, and back.

Before the attention, every rank receives all tokens of some heads; afterwards, it receives all heads of its own tokens
(DeepSpeed-Ulysses, arXiv:2309.14509, section 3). Each token of each head is sent once and computed once, so sums are
the same as on one rank.

Shape suffixes: T packed tokens, R tokens of one rank, A heads, P heads of one rank, D head size, C ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The ranks that share one packed row; rank i of the group holds the i-th of the row's equal parts."""

    group: dist.ProcessGroup

    @property
    def num_ranks(self) -> int:
        return self.group.size()

    def to_heads(self, x_RAD: torch.Tensor) -> torch.Tensor:
        """Return [T, P, D]: all tokens of this rank's heads."""
        x_RCPD = x_RAD.reshape(len(x_RAD), self.num_ranks, -1, x_RAD.shape[2])
        return _exchange_parts(x_RCPD.transpose(0, 1), self.group).flatten(0, 1)

    def to_tokens(self, x_TPD: torch.Tensor) -> torch.Tensor:
        """Return [R, A, D]: all heads of this rank's tokens."""
        x_CRPD = x_TPD.reshape(self.num_ranks, -1, *x_TPD.shape[1:])
        return _exchange_parts(x_CRPD, self.group).transpose(0, 1).flatten(1, 2)

    def with_divisible_heads(
        self, query_RAD: torch.Tensor, key_RAD: torch.Tensor, value_RAD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values whose numbers of heads are divisible by the number of ranks.

        The number of query heads must already be divisible. If the number of key-value heads is not, each of them is
        repeated for its query heads.
        """
        num_heads, num_kv_heads = query_RAD.shape[1], key_RAD.shape[1]
        if num_kv_heads % self.num_ranks:
            groups = num_heads // num_kv_heads
            key_RAD, value_RAD = (x.repeat_interleave(groups, dim=1) for x in (key_RAD, value_RAD))
        return query_RAD, key_RAD, value_RAD


def _exchange_parts(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send x[i] to rank i of the group; return the received tensors, in the order of the ranks."""
    received: torch.Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """An exchange that is its own inverse and its own derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        sent = x.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange_parts(gradient, ctx.group), None
