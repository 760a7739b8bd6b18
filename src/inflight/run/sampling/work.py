"""The contents of a group, as the actor needs them: completions of a task, or episodes of an environment."""

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
"""One completion, whole or a part of it, or one episode; of either, ``num_tokens`` and ``is_whole``."""


@dataclass(frozen=True, slots=True)
class Order:
    """Completions of one item, by number, that are to be sampled in one request, or episodes to be played."""

    request_id: str
    item: TaskItem
    prompt_token_ids: tuple[int, ...]
    numbers: tuple[int, ...]
    seed: int
    partial: Completion | None = None
    """What is there of the only one; it is continued."""


class Work(Protocol):
    """Makes items, prompts, requests and rewards. Users' code is called in here; what it raises is a `TaskError`."""

    is_one_request: ClassVar[bool]
    """Whether those of an order run as one request. If not, each has an order of its own."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name for reports."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Return the number of completions or episodes of a group."""

    @abstractmethod
    def item(self, index: int) -> TaskItem:
        """Return an item. Raises `TaskError`."""

    @abstractmethod
    def prompt_of(self, item: TaskItem) -> tuple[int, ...]:
        """Return the prompt as token ids; for an environment, ids of its start state. Raises `TaskError`."""

    @abstractmethod
    def too_long(self, prompt_token_ids: Sequence[int]) -> str | None:
        """Return why an item can never be trained on, if so."""

    @abstractmethod
    async def sample(self, endpoint: SamplingEndpoint, order: Order) -> Sequence[Sampled]:
        """Return what was sampled for each number of an order, in their sequence.

        Raises as `SamplingEndpoint.sample`.
        """

    def first_version(self, index: int, number: int) -> int | None:
        """Return the oldest version of what is kept of an episode that waits for an endpoint; None if there is none."""
        return None

    def forget(self, index: int) -> None:
        """End what is kept of an item."""
        return

    @abstractmethod
    def is_enough(self, sampled: Sequence[Sampled | None]) -> bool:
        """Return whether a group can be scored."""

    @abstractmethod
    async def score(self, item: TaskItem, prompt_token_ids: Sequence[int], sampled: Sequence[Sampled]) -> ScoredGroup:
        """Return the rewards of a group and its rollouts. Raises `TaskError`."""

    @abstractmethod
    def parse(self, saved: Any) -> Sampled:
        """Return what was sampled from its JSON value. Raises ``ValueError``."""

    async def aclose(self) -> None:
        """End what still runs of users' code."""
        return
