"""The events that a rollout scheduler receives and the decisions that it returns, as plain values.

All times are seconds on one clock with an arbitrary zero. An item is one prompt of the task, identified by its index;
its completions are numbered from 0. A request samples some completions of one item on one endpoint.

    Offered -> Issue -> Finished, for each completion -> Scored -> Settled
                 ^         |
                 +---- Returned: aborted or lost; may be issued again, and continues from ``num_tokens``

An item may be withdrawn at any time; no further event mentions it, unless it is offered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# ---------------------------------------------------------------------------------------------------------------
# Events


@dataclass(frozen=True, slots=True)
class Joined:
    """An endpoint accepts work: up to ``capacity`` completions at a time."""

    time_s: float
    endpoint: str
    capacity: int
    keeps_partials: bool = False
    """Whether an aborted completion keeps the tokens sampled so far. If not, it starts again from the prompt."""


@dataclass(frozen=True, slots=True)
class Left:
    """An endpoint accepts no more work. Each completion that is running there either finishes or is returned."""

    time_s: float
    endpoint: str


@dataclass(frozen=True, slots=True)
class Offered:
    """An item may be issued. It counts as outstanding from now on."""

    time_s: float
    item: int
    prompt: str
    """An identifier of the prompt: equal prompts always have equal identifiers."""
    num_prompt_tokens: int
    num_tokens: tuple[int, ...]
    """The number of tokens that each completion already has from an earlier process of the run."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A completion finished without being aborted, with ``num_tokens`` tokens in total."""

    time_s: float
    item: int
    completion: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A completion was aborted or lost. Its first ``num_tokens`` tokens are kept, and it may be issued again."""

    time_s: float
    item: int
    completion: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An item was withdrawn from the scheduler: it was dropped, or will be offered again later."""

    time_s: float
    item: int


@dataclass(frozen=True, slots=True)
class Scored:
    """All completions of an item have finished and have their rewards."""

    time_s: float
    item: int
    prompt: str
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Settled:
    """A scored item was trained on, or was dropped instead."""

    time_s: float
    item: int
    is_trained: bool


@dataclass(frozen=True, slots=True)
class StepWanted:
    """The run begins to collect groups for the step that starts from ``version``.

    ``num_groups`` estimates how many groups the step needs. In conventional mode the estimate covers a whole phase.
    """

    time_s: float
    version: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class StepReady:
    """The run has enough groups for the step that `StepWanted` announced.

    In conventional mode, sampling must now end.
    """

    time_s: float
    version: int


@dataclass(frozen=True, slots=True)
class Published:
    """Endpoints serve ``version`` from now on."""

    time_s: float
    version: int


Event = (
    Joined | Left | Offered | Finished | Returned | Withdrawn | Scored | Settled | StepWanted | StepReady | Published
)


# ---------------------------------------------------------------------------------------------------------------
# Decisions


@dataclass(frozen=True, slots=True)
class Issue:
    """Sample these completions of an item on an endpoint. None of them may be running or finished."""

    endpoint: str
    item: int
    completions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort these running completions. They are returned with the tokens sampled so far."""

    item: int
    completions: tuple[int, ...]


Decision = Issue | Abort
Decisions = Sequence[Decision]
