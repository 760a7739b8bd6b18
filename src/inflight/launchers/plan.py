"""The processes of a run as a plan: what a scheduler of jobs needs to know to start them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

JOIN_PORT = 8100
"""Where servers join the controller of an emitted run."""
MEET_PORT = 8101
"""Where its ranks meet it."""


@dataclass(frozen=True, slots=True)
class Gang:
    """Processes that are alike. ``{head}`` in a command is the host of the controller."""

    name: str
    num: int
    command: Sequence[str]
    num_cpus: int
    num_gpus: int
    """Of each process."""
    are_ranks: bool = False
    """Whether they are the ranks of one trainer, numbered from 0."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One run: a controller, and the gangs that come to it."""

    name: str
    controller: Gang
    gangs: tuple[Gang, ...]
