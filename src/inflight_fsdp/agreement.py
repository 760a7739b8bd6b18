"""How ranks agree that something failed, so that none of them waits for one that has given up. Nothing is pickled."""

from __future__ import annotations

import torch
import torch.distributed as dist

_MESSAGE_BYTES = 2048


def first_failure(failure: str | None, device: torch.device) -> str | None:
    """Return the failure of the lowest rank that has one, the same on every rank; collective over the default group.

    Messages of other ranks say which rank they come from. ``device`` is one that the group can communicate from.
    """
    if dist.get_world_size() == 1:
        return failure
    text = (failure or "").encode()[:_MESSAGE_BYTES]
    mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    mine = mine.to(device)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for rank, message in enumerate(everyone):
        if message[0]:
            words = bytes(message.tolist()).rstrip(b"\0").decode(errors="ignore")
            return words if rank == dist.get_rank() else f"rank {rank}: {words}"
    return None
