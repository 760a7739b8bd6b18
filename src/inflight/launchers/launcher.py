"""What a run asks of a launcher: start processes, say where they are and how they ended, and stop them."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

ADDRESS_VARIABLE = "INFLIGHT_ADDRESS"
"""Tells each process the address of its host, as the other processes of the run reach it."""


@dataclass(frozen=True, slots=True)
class Program:
    """One process to start. It must end when its standard input does."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables on top of those that processes have where it starts."""
    log: Path
    """Gets its output; a path of the host on which it runs, as ``ready_file`` is."""
    ready_file: Path | None = None
    """The process writes it once it is ready."""
    num_cpus: float = 1.0
    num_gpus: int = 0
    """GPUs that the launcher chooses; 0 also where the environment names them already."""
    place: str | None = None
    """Where it must run, as the launcher names places. None: anywhere."""
    appends: bool = False
    """Whether the log keeps what an earlier life wrote."""
    inherits: tuple[int, ...] = field(default=(), kw_only=True)
    """File descriptors that the process inherits if it runs on this machine, as the lock of the run directory."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended."""

    status: int | None
    """Exit status, or minus the number of the signal that killed it. None: the launcher lost sight of it."""
    lines: tuple[str, ...] = ()
    """The end of its log, as far as it could be read."""
    cause: str = ""
    """Why the launcher lost sight of it."""

    def __str__(self) -> str:
        if self.status is None:
            return f"was lost: {self.cause}"
        return f"was killed by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"


@runtime_checkable
class Launched(Protocol):
    """One process that a launcher has started."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Address of the host on which it runs, as this process reaches it."""

    @property
    @abstractmethod
    def ended(self) -> ProcessEnd | None:
        """How it ended; None while it runs, or as long as the launcher does not know otherwise."""

    @abstractmethod
    async def wait(self) -> ProcessEnd:
        """Wait until it has ended, or its host is lost."""

    @abstractmethod
    async def ready(self) -> str | None:
        """Return what it has written to its ready file; None before that."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, and return without waiting. Does nothing once it has ended."""

    @abstractmethod
    async def stop(self, patience_s: float) -> None:
        """End its standard input and wait; kill it after ``patience_s``. Idempotent."""


@runtime_checkable
class Launcher(Protocol):
    """Starts the processes of one run. A factory makes it: ``factory(**launcher_options)``."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Address of this process's host, as the processes that it starts reach it."""

    @property
    def port(self) -> int:
        """Port at which ranks find the run. 0: a free one; another where `start` starts nothing, and ranks come by
        themselves."""
        return 0

    @property
    @abstractmethod
    def num_gpus(self) -> int | None:
        """GPUs of all hosts; None: this machine's, of which the run itself chooses."""

    @property
    @abstractmethod
    def can_outlive(self) -> bool:
        """Whether a process may continue after this one has ended, if it does not end with its standard input."""

    @abstractmethod
    async def start(self, programs: Sequence[Program], timeout_s: float) -> Sequence[Launched]:
        """Start programs together, all or none, and return them in order. Their environment has `ADDRESS_VARIABLE`.

        Raises `ConfigError` if one cannot be placed within ``timeout_s``, and states what it needs.
        """

    @abstractmethod
    def close(self) -> None:
        """Abandon whatever is held. The processes have been stopped before. Idempotent."""
