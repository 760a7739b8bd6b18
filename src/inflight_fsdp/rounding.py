"""How many updates of an optimizer step a narrow dtype rounds away. Knows nothing of models and optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_SAMPLE = 1 << 20
"""Elements of one rank that are looked at."""


class LostUpdates:
    """Looks at evenly spread elements of one rank's shards, before and after a step."""

    def __init__(self, shards: Sequence[torch.Tensor]) -> None:
        self._shards = shards
        self._stride = max(1, sum(shard.numel() for shard in shards) // _SAMPLE)
        self._before: list[torch.Tensor] = []

    def before_step(self) -> None:
        """Note what the elements are."""
        self._before = self._sample(self._shards)

    def share(self, gradients: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> float | None:
        """Return the share of elements with a gradient that the step left as they were; None without any; collective.

        The same on every rank of the group, which communicates from ``device``.
        """
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        for before, after, gradient in zip(
            self._before, self._sample(self._shards), self._sample(gradients), strict=True
        ):
            pulled = gradient != 0
            counts += torch.stack([(pulled & (before == after)).sum(), pulled.sum()]).to(device)
        self._before = []
        if group.size() > 1:
            dist.all_reduce(counts, group=group)
        lost, pulled_on = counts.tolist()
        return lost / pulled_on if pulled_on else None

    def _sample(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.reshape(-1)[:: self._stride].clone() for tensor in tensors]
