"""How ranks agree that something failed, so that none of them waits for one that has given up. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from inflight.errors import ConfigError

T = TypeVar("T")
_MESSAGE_BYTES = 2048


def first_failure(failure: str | None, device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the failure of the lowest rank that has one, the same on every rank; collective over a group of all ranks.

    Messages of other ranks say which rank they come from. ``device`` is one that the group can communicate from; a
    group of None is the default one.
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
    """Return what ``do`` returns, or raise on every rank what failed on one; collective over the default group.

    Where it failed elsewhere a `ConfigError` says on which rank and how.
    """
    try:
        result, error = do(), None
    except Exception as caught:  # whatever it is, the other ranks must not wait for this one
        result, error = None, caught
    failure = first_failure(None if error is None else f"{type(error).__name__}: {error}", device)
    if error is not None:
        raise error
    if failure is not None:
        raise ConfigError(failure)
    return result  # type: ignore[return-value]
