"""How ranks agree on a failure, so that no rank waits for one that has stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from inflight.errors import ConfigError

T = TypeVar("T")
_MESSAGE_BYTES = 2048


def first_failure(failure: str | None, device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the failure of the lowest rank that has failed, or None; collective over a group of all ranks.

    Every rank returns the same failure; on the other ranks, the failed rank's number precedes it. The group must be
    able to communicate from ``device``; without ``group``, the default group is used.
    """
    if dist.get_world_size() == 1:
        return failure
    text = (failure or "").encode()[:_MESSAGE_BYTES]
    mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    mine = mine.to(device)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine, group=group)
    for rank, message in enumerate(everyone):
        if message[0]:
            words = bytes(message.tolist()).rstrip(b"\0").decode(errors="ignore")
            return words if rank == dist.get_rank() else f"rank {rank}: {words}"
    return None


def on_every_rank(do: Callable[[], T], device: torch.device) -> T:
    """Return the result of ``do`` if it succeeds on every rank; collective over the default group.

    If it fails on some rank, that rank raises its own error, and every other rank raises a `ConfigError` that reports
    the rank and the error.
    """
    try:
        result, error = do(), None
    except Exception as caught:  # whatever the error, the other ranks must not wait for this one
        result, error = None, caught
    failure = first_failure(None if error is None else f"{type(error).__name__}: {error}", device)
    if error is not None:
        raise error
    if failure is not None:
        raise ConfigError(failure)
    return result  # type: ignore[return-value]
