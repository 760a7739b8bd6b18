"""The commands that a dispatcher gives its driver, and the values that the driver reports to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from inflight.contracts import Scheduler
from inflight.contracts.scheduling import Event
from inflight.types import Group, Rollout


class SampledTokens(Protocol):
    """The sampled tokens of one completion or episode, as a dispatcher sees them."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Return the number of sampled tokens."""

    @property
    @abstractmethod
    def first_version(self) -> int | None:
        """Return the version that sampled the first token; None if there is none."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Return whether the completion or episode ended normally; otherwise it was aborted and may be continued."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The outcome of scoring a group. Failed episodes are omitted, so ``rollouts`` may be empty."""

    rollouts: Sequence[Rollout]
    lengths: tuple[int, ...]
    """The number of sampled tokens in each completion or episode."""
    rewards: tuple[float, ...]
    completions: Sequence[Sequence[int]] = ()
    """Token ids that later completions of the same prompt may be drafted from."""
    failures: Sequence[tuple[str, str]] = ()
    """For each failed episode, the kind under which it is counted, and a description."""
    num_rewritten: int = 0
    """Number of conversations that continued after their history had been rendered differently."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed, and what is at fault: its endpoint, only the request, the item, or the driver itself."""

    fault: Literal["endpoint", "request", "item", "driver"]
    message: str


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send one request that samples these completions of an item, given by number."""

    request_id: str
    item: int
    content: Any
    """The content with which the item was offered."""
    numbers: tuple[int, ...]
    endpoint: str
    partial: SampledTokens | None = None
    """The tokens that the completion already has, if the request continues it; there is then no other completion."""


@dataclass(frozen=True, slots=True)
class StopRequests:
    """End running requests of one endpoint.

    With ``keeps_partials``, each request returns what it has sampled so far.
    """

    endpoint: str
    request_ids: tuple[str, ...]
    keeps_partials: bool


@dataclass(frozen=True, slots=True)
class ScoreGroup:
    """Compute the rewards of a group."""

    item: int
    content: Any
    sampled: Sequence[Any]
    """The sampled tokens of each completion that has finished."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A group has received its rewards. It waits for a step, or else `DroppedGroup` follows."""

    group: Group
    is_waiting: bool
    num_rewritten: int = 0
    is_new: bool = True
    """Whether the group finished for the first time. A group that waited for a step when the run was saved finishes
    again after the run is resumed."""


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A finished group will not be trained on. The ledger counts it as ``equal rewards``, ``filtered`` or ``stale``."""

    group: Group
    reason: str


@dataclass(frozen=True, slots=True)
class DroppedItem:
    """An item was dropped before it received its rewards."""

    item: int
    reason: str
    """The reason under which the ledger counts the item: ``unusable``, ``failed``, ``failed episodes`` or ``stale``."""
    what_happened: str
    lengths: tuple[int, ...] = ()
    """Number of tokens of each of its completions; empty unless known for all of them."""


@dataclass(frozen=True, slots=True)
class RequeuedItem:
    """An item was returned to the ledger, and will be offered again."""

    item: int


@dataclass(frozen=True, slots=True)
class ComposedStep:
    """The groups of the step that starts from ``version``."""

    version: int
    groups: Sequence[Group]


@dataclass(frozen=True, slots=True)
class ComposedPhase:
    """The groups of each step of a conventional phase; nothing is running anymore."""

    steps: Sequence[Sequence[Group]]


@dataclass(frozen=True, slots=True)
class IdleEndpoint:
    """A retired endpoint has no requests left, and is removed."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run cannot succeed: none of the first items can be used."""

    why: str


Command = (
    SendRequest
    | StopRequests
    | ScoreGroup
    | FinishedGroup
    | DroppedGroup
    | DroppedItem
    | RequeuedItem
    | ComposedStep
    | ComposedPhase
    | IdleEndpoint
    | EndRun
)


@dataclass(slots=True, eq=False)
class Outbox:
    """Events for the scheduler, delivered immediately, and commands for the driver, which collects them later."""

    scheduler: Scheduler
    commands: list[Command] = field(default_factory=list)
    has_news: bool = True
    """Whether something has happened since the scheduler was last called."""

    def notify(self, event: Event) -> None:
        self.has_news = True
        self.scheduler.observe(event)

    def command(self, command: Command) -> None:
        self.commands.append(command)
