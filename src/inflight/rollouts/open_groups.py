"""A group from its offer to its rewards: the tokens of each completion so far, and the running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.rollouts.driver_commands import SampledTokens, SendRequest


@dataclass(slots=True, eq=False)
class OpenGroup:
    """An item that was offered and has no rewards yet. Lists have one entry per completion or episode."""

    item: int
    serial: int
    """The group's place in the order of offers."""
    offered_at: float
    """When the group was offered, in the driver's time."""
    prompt: str
    """Identifies the prompt to schedulers."""
    num_prompt_tokens: int
    content: Any
    """The content from which the driver makes requests."""
    sampled: list[SampledTokens | None]
    """The sampled tokens of each completion or episode, complete or partial."""
    sent_version: list[int | None]
    """For each running completion without tokens, the oldest version that may sample its first token."""
    requests: dict[str, SendRequest] = field(default_factory=dict)
    endpoints: list[str] = field(default_factory=list)
    num_requests: int = 0
    is_withdrawn: bool = False
    """Whether the requests are being stopped because the group seems too old; the scheduler no longer tracks it."""
    is_scoring: bool = False

    @property
    def has_part(self) -> bool:
        """Whether any part of the group has been sampled or is being sampled."""
        return bool(self.requests) or any(one is not None for one in self.sampled)

    @property
    def whole(self) -> list[tuple[int, SampledTokens]]:
        """The completions that have finished, with their numbers."""
        return [(i, one) for i, one in enumerate(self.sampled) if one is not None and one.is_whole]

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Number of tokens sampled so far for each completion."""
        return tuple([0 if one is None else one.num_tokens for one in self.sampled])

    @property
    def first_versions(self) -> list[int | None]:
        """The version of the first token of each completion, or a lower bound for it; None until the completion is
        sent.
        """
        pairs = zip(self.sampled, self.sent_version, strict=True)
        return [sent if one is None else one.first_version for one, sent in pairs]

    def is_stale(self, can_train: Callable[[int], bool]) -> bool:
        """Return whether no completion can be trained on, regardless of its further tokens."""
        return not any(version is None or can_train(version) for version in self.first_versions)


def all_whole(sampled: Sequence[SampledTokens | None]) -> bool:
    """Return whether every completion of a group has ended normally."""
    return all(one is not None and one.is_whole for one in sampled)
