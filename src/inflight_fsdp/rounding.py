"""The share of an optimizer step's updates that is lost because a narrow dtype rounds them away."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from inflight.errors import PrecisionWarning

_SAMPLE = 1 << 20
"""Approximate number of elements that each rank compares."""
_NUM_STEPS = 3
"""Number of steps after which the lost updates are reported."""


def spread_sample(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of evenly spaced elements of one rank's shards."""
    stride = max(1, sum(shard.numel() for shard in shards) // _SAMPLE)
    return [shard.reshape(-1)[::stride].clone() for shard in shards]


def lost_share(
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    device: torch.device,
) -> float | None:
    """Return the share of elements that a step left unchanged, among those whose gradient is not zero.

    Returns None if all gradients are zero. Collective over the default group, which communicates from ``device``. Only
    one rank may pass each shard.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for old, new, gradient in zip(before, after, gradients, strict=True):
        pulled = gradient != 0
        counts += torch.stack([(pulled & (old == new)).sum(), pulled.sum()]).to(device)
    if dist.get_world_size() > 1:
        dist.all_reduce(counts)
    lost, pulled_on = counts.tolist()
    return lost / pulled_on if pulled_on else None


class LostUpdates:
    """Warns that bfloat16 master weights lose updates: first in general terms, and after a few steps with figures."""

    def __init__(self, *, warns: bool) -> None:
        self._shares: list[float] = []
        self._warns = warns
        self._warn(
            "master_dtype 'bfloat16': weights and moments have 8 significant bits, so an update smaller than 1/512 "
            f"of its weight is rounded away. After {_NUM_STEPS} steps the worker reports how many were lost; "
            "master_dtype 'float32' keeps them"
        )

    def note(self, share: float | None) -> None:
        """Record the share that `lost_share` returned for a step."""
        if share is None or len(self._shares) == _NUM_STEPS:
            return
        self._shares.append(share)
        if len(self._shares) == _NUM_STEPS:
            self._warn(
                f"{sum(self._shares) / _NUM_STEPS:.1%} of the updates of {_NUM_STEPS} steps were rounded away "
                "with master_dtype 'bfloat16'; master_dtype 'float32' keeps them"
            )

    def _warn(self, text: str) -> None:
        if self._warns:
            warnings.warn(text, PrecisionWarning, stacklevel=3)
