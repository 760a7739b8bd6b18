"""A group from its offer to its rewards, as the actor keeps it: what is there of it, and what runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inflight.run.sampling.seats import Seat
from inflight.run.sampling.work import Order, Sampled
from inflight.types import TaskItem


@dataclass(frozen=True, slots=True)
class DroppedItem:
    """An item that the actor gave up before it had all its completions."""

    index: int
    reason: str
    """``unusable``, ``failed``, ``failed episodes`` or ``stale``, as the ledger counts it."""
    what_happened: str
    lengths: tuple[int, ...] = ()
    """Tokens that its completions had; empty if that is not known of all of them."""
    first_version: int | None = None
    """Of its oldest token, if it is dropped as too old."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request of some completions of a group, or one of its episodes."""

    seat: Seat
    order: Order
    began_at: float
    """Seconds since 1970."""


@dataclass(slots=True, eq=False)
class OpenGroup:
    """An item that was offered and is not scored yet. Lists have one entry per completion or episode."""

    item: TaskItem
    serial: int
    prompt_token_ids: tuple[int, ...]
    prompt: str
    """Digest of the prompt, by which schedulers know it."""
    sampled: list[Sampled | None]
    """What is there of each, whole or in part."""
    begun: list[int | None]
    """Oldest version that its first token may have, if it has been issued and nothing of it is there."""
    is_given_up: bool = False
    """Whether its requests are being aborted because it seems to be too old; the scheduler knows it no more."""
    is_scoring: bool = False
    requests: dict[asyncio.Task[Any], Running] = field(default_factory=dict)
    endpoints: list[str] = field(default_factory=list)
    num_requests: int = 0

    @property
    def has_part(self) -> bool:
        """Whether something of it has been sampled or is being sampled."""
        return bool(self.requests) or any(one is not None for one in self.sampled)

    @property
    def whole(self) -> list[tuple[int, Sampled]]:
        """Those that have finished, with their numbers."""
        return [(i, one) for i, one in enumerate(self.sampled) if one is not None and one.is_whole]

    @property
    def first_versions(self) -> list[int | None]:
        """Version of the first token of each completion, or a bound below it; None before it is issued."""
        return [
            begun if one is None else one.first_version for one, begun in zip(self.sampled, self.begun, strict=True)
        ]

    def is_stale(self, can_train: Callable[[int], bool]) -> bool:
        """Return whether no completion can be trained on, whatever is sampled of it."""
        return not any(version is None or can_train(version) for version in self.first_versions)
