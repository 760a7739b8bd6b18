"""The processes of a run, in the form that job schedulers need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

JOIN_PORT = 8100
"""Port at which servers join the controller of a run whose manifest was emitted."""
MEET_PORT = 8101
"""Port at which ranks connect to the controller."""


@dataclass(frozen=True, slots=True)
class Gang:
    """A group of identical processes. ``{head}`` in a command is the host of the controller."""

    name: str
    num: int
    command: Sequence[str]
    num_cpus: int
    num_gpus: int
    """Number of GPUs of each process."""
    are_ranks: bool = False
    """Whether the processes are the ranks of one trainer, numbered from 0."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One run: a controller and the gangs that connect to it."""

    name: str
    controller: Gang
    gangs: tuple[Gang, ...]
