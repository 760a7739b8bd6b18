"""The interface between the actor and the contents of groups: completions of a task, or episodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from inflight.environments.recording import PlayedEpisode
from inflight.rollouts.driver_commands import ScoredGroup
from inflight.run.sampling.sampling_endpoint import SamplingEndpoint
from inflight.types import TaskItem
from inflight.wire import Completion

Sampled = Completion | PlayedEpisode
"""One completion, complete or partial, or one episode. Both have ``num_tokens`` and ``is_whole``."""


@dataclass(frozen=True, slots=True)
class Order:
    """The completions of one item to sample in one request, or the episodes to play, given by number."""

    request_id: str
    item: TaskItem
    prompt_token_ids: tuple[int, ...]
    numbers: tuple[int, ...]
    seed: int
    partial: Completion | None = None
    """The partial result to continue, if the order has a single number."""


class Work(Protocol):
    """Makes items, prompts, requests and rewards. It calls user code, whose exceptions become `TaskError`."""

    is_one_request: ClassVar[bool]
    """Whether all completions of an order run as one request. If not, each completion has its own order."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name for reports."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Return the number of completions or episodes in a group."""

    @abstractmethod
    async def item(self, index: int) -> TaskItem:
        """Return an item, which is made outside the event loop.

        Raises `TaskError`, including when that takes too long.
        """

    @abstractmethod
    def prompt_of(self, item: TaskItem) -> tuple[int, ...]:
        """Return the prompt as token ids; for an environment, ids of its start state.

        Raises `UnusableItem` if it cannot be encoded.
        """

    @abstractmethod
    def too_long(self, prompt_token_ids: Sequence[int]) -> str | None:
        """Return the reason why an item can never be trained on; None if it can."""

    @abstractmethod
    async def sample(self, endpoint: SamplingEndpoint, order: Order) -> Sequence[Sampled]:
        """Return one result for each number of an order, in the same sequence.

        Raises the same errors as `SamplingEndpoint.sample`.
        """

    def first_version(self, index: int, number: int) -> int | None:
        """Return the version that sampled the first token of an episode in progress; None if there is none."""
        return None

    def forget(self, index: int) -> None:
        """End what is still running for an item, and discard its stored state."""
        return

    @abstractmethod
    def is_enough(self, sampled: Sequence[Sampled | None]) -> bool:
        """Return whether a group can be scored."""

    @abstractmethod
    async def score(self, item: TaskItem, prompt_token_ids: Sequence[int], sampled: Sequence[Sampled]) -> ScoredGroup:
        """Return the rewards of a group and its rollouts. Raises `TaskError`."""

    @abstractmethod
    def parse(self, saved: Any) -> Sampled:
        """Return a sampled result from its JSON value. Raises ``ValueError``."""

    async def open(self) -> None:
        """Start the processes that run user code. Raises `TaskError`."""
        return

    async def aclose(self) -> None:
        """End all user code that is still running."""
        return
