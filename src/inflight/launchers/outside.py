"""A launcher for processes that Slurm, Kubernetes or another system starts; the run only waits for them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from inflight.launchers.launcher import Launched, Launcher, ProcessEnd, Program


class OutsideLauncher(Launcher):
    """Starts nothing: ranks connect to ``address:port``, and servers to ``servers.attach.join``, on their own."""

    def __init__(self, port: int, address: str = "0.0.0.0") -> None:
        self._port = port
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    @property
    def port(self) -> int:
        return self._port

    @property
    def num_gpus(self) -> int | None:
        return 0

    @property
    def can_outlive(self) -> bool:
        return False

    async def start(self, programs: Sequence[Program], timeout_s: float) -> Sequence[Launched]:
        return [_Elsewhere() for _ in programs]

    def close(self) -> None:
        """Do nothing, because no resources are held."""


class _Elsewhere(Launched):
    """A process that the launcher did not start and can observe only through its connections."""

    @property
    def address(self) -> str:
        return ""

    @property
    def ended(self) -> ProcessEnd | None:
        return None

    async def wait(self) -> ProcessEnd:
        await asyncio.Event().wait()
        raise AssertionError("unreachable: the wait never ends")

    async def ready(self) -> str | None:
        return None

    def send_signal(self, number: signal.Signals) -> None:
        """Do nothing, because the process ends when its connection to the run does."""

    async def stop(self, patience_s: float) -> None:
        """Do nothing, because the process ends when its connection to the run does."""
