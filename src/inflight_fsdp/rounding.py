"""How many updates of an optimizer step a narrow dtype rounds away. Knows nothing of models and optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_SAMPLE = 1 << 20
"""Elements of one rank that are compared."""


def spread_sample(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of evenly spread elements of one rank's shards."""
    stride = max(1, sum(shard.numel() for shard in shards) // _SAMPLE)
    return [shard.reshape(-1)[::stride].clone() for shard in shards]


def lost_share(
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    device: torch.device,
) -> float | None:
    """Return the share of elements with a gradient that a step left as they were; None without any; collective.

    Over the default group, which communicates from ``device``; each shard must be passed by one rank only.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for old, new, gradient in zip(before, after, gradients, strict=True):
        pulled = gradient != 0
        counts += torch.stack([(pulled & (old == new)).sum(), pulled.sum()]).to(device)
    if dist.get_world_size() > 1:
        dist.all_reduce(counts)
    lost, pulled_on = counts.tolist()
    return lost / pulled_on if pulled_on else None
