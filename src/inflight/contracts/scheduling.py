"""What a scheduler of rollouts is told and what it answers: values, without I/O.

All times are seconds on one clock, whose zero means nothing. An item is one prompt of the task, by its index; its
completions are numbered from 0. A request is some completions of one item on one endpoint.

    Offered -> Issue -> Finished, for each completion -> Scored -> Settled
                 ^         |
                 +---- Returned: aborted or lost; it may be issued again, and continues from ``num_tokens``

An item may be withdrawn at any time; nothing more is said about it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# ---------------------------------------------------------------------------------------------------------------
# Events


@dataclass(frozen=True, slots=True)
class Joined:
    """An endpoint may be given work: up to ``capacity`` completions at a time."""

    time_s: float
    endpoint: str
    capacity: int
    keeps_partials: bool = False
    """Whether what was sampled of an aborted completion is kept. Elsewhere it starts again."""


@dataclass(frozen=True, slots=True)
class Left:
    """An endpoint may be given no more work. What runs there either ends as usual or is returned."""

    time_s: float
    endpoint: str


@dataclass(frozen=True, slots=True)
class Offered:
    """An item may be issued. It counts as outstanding from now on."""

    time_s: float
    item: int
    prompt: str
    """Identifies the prompt: the same text, at any time, has the same one."""
    num_prompt_tokens: int
    num_tokens: tuple[int, ...]
    """Tokens that each of its completions already has from an earlier life of the run; one entry per completion."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A completion ended by itself, with ``num_tokens`` tokens in all."""

    time_s: float
    item: int
    completion: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A completion was aborted or lost. ``num_tokens`` of it are kept, and it may be issued again."""

    time_s: float
    item: int
    completion: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An item is no longer the scheduler's: it was dropped, or will be offered again later."""

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
    """A scored item was trained on, or dropped without being trained on."""

    time_s: float
    item: int
    is_trained: bool


@dataclass(frozen=True, slots=True)
class StepWanted:
    """The run collects groups for the step that starts from ``version``: by its estimate, ``num_groups`` of them.

    In conventional mode these are the groups of a whole phase.
    """

    time_s: float
    version: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class StepReady:
    """The run has enough groups for the step that it wanted. In conventional mode sampling must come to an end now."""

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
    """End these running completions, which are returned with their tokens so far."""

    item: int
    completions: tuple[int, ...]


Decision = Issue | Abort
Decisions = Sequence[Decision]
