"""The interface of a launcher: start processes, report where they run and how they ended, and stop them."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

ADDRESS_VARIABLE = "INFLIGHT_ADDRESS"
"""Environment variable with the address at which the run's other processes can reach a process's host."""


@dataclass(frozen=True, slots=True)
class Program:
    """One process to start. It must end when its standard input is closed."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """Environment variables in addition to those of the process's host."""
    log: Path
    """File for the process's output. This and ``ready_file`` are paths on the host where the process runs."""
    ready_file: Path | None = None
    """A file that the process writes once it is ready."""
    num_cpus: float = 1.0
    num_gpus: int = 0
    """Number of GPUs that the launcher chooses; 0 if the environment already lists them."""
    place: str | None = None
    """Where the process must run, in a form that depends on the launcher; None means anywhere."""
    appends: bool = False
    """Whether the log keeps the output of an earlier incarnation."""
    inherits: tuple[int, ...] = field(default=(), kw_only=True)
    """File descriptors, such as the lock of the run directory, that the process inherits if it runs on this machine."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended."""

    status: int | None
    """Exit status, or the negative number of the signal that killed the process; None if the launcher lost contact."""
    lines: tuple[str, ...] = ()
    """The last lines of the process's log, if they could be read."""
    cause: str = ""
    """Why the launcher lost contact with the process."""

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
        """Address at which the calling process reaches the host where the launched process runs."""

    @property
    @abstractmethod
    def ended(self) -> ProcessEnd | None:
        """How the process ended, or None while it is running as far as the launcher knows."""

    @abstractmethod
    async def wait(self) -> ProcessEnd:
        """Wait until the process has ended or its host is lost."""

    @abstractmethod
    async def ready(self) -> str | None:
        """Return the contents of the process's ready file, or None if it has not been written yet."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal, and return without waiting. Does nothing once it has ended."""

    @abstractmethod
    async def stop(self, patience_s: float) -> None:
        """Close the process's standard input and wait for it to end; kill it after ``patience_s``. Idempotent."""


@runtime_checkable
class Launcher(Protocol):
    """Starts the processes of one run. A run constructs it with ``factory(**launcher_options)``."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Address at which the started processes reach this process's host."""

    @property
    def port(self) -> int:
        """Port at which ranks connect to the run; 0 means any free port.

        Ranks that `start` does not start need a fixed port.
        """
        return 0

    @property
    @abstractmethod
    def num_gpus(self) -> int | None:
        """Number of GPUs on all hosts; None if the run itself chooses among the GPUs of this machine."""

    @property
    @abstractmethod
    def can_outlive(self) -> bool:
        """Whether a process that ignores the end of its standard input may outlive this process."""

    @abstractmethod
    async def start(self, programs: Sequence[Program], timeout_s: float) -> Sequence[Launched]:
        """Start all programs or none, and return them in order. Each environment contains `ADDRESS_VARIABLE`.

        If a program cannot be placed within ``timeout_s``, raises a `ConfigError` that states its requirements.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources. The processes have already been stopped. Idempotent."""
