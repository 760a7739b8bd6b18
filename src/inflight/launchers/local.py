"""Runs processes as children of this process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from inflight.errors import ConfigError
from inflight.launchers.launcher import ADDRESS_VARIABLE, Launched, Launcher, ProcessEnd, Program
from inflight.launchers.watcher import Watcher

_LOOPBACK = "127.0.0.1"


class LocalLauncher(Launcher):
    """Starts child processes, which communicate over loopback."""

    @property
    def address(self) -> str:
        return _LOOPBACK

    @property
    def num_gpus(self) -> int | None:
        return None

    @property
    def can_outlive(self) -> bool:
        return True

    async def start(self, programs: Sequence[Program], timeout_s: float) -> Sequence[Launched]:
        """Start the programs immediately. ``num_cpus`` is ignored: all processes share the CPUs of this machine."""
        launched: list[_Child] = []
        try:
            for program in programs:
                launched.append(await _started(program))
        except BaseException:
            for child in launched:
                await child.stop(0.0)
            raise
        return launched

    def close(self) -> None:
        """Do nothing, because no resources are held."""


class _Child(Launched):
    def __init__(self, watcher: Watcher, pid: int) -> None:
        self._watcher = watcher
        self._pid = pid

    @property
    def address(self) -> str:
        return _LOOPBACK

    @property
    def ended(self) -> ProcessEnd | None:
        status = self._watcher.status
        return None if status is None else ProcessEnd(status, self._watcher.tail())

    async def wait(self) -> ProcessEnd:
        return ProcessEnd(*await self._watcher.wait())

    async def ready(self) -> str | None:
        return await self._watcher.ready()

    def send_signal(self, number: signal.Signals) -> None:
        if self._watcher.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    async def stop(self, patience_s: float) -> None:
        await self._watcher.stop(patience_s)


async def _started(program: Program) -> _Child:
    if program.place is not None:
        raise ConfigError(
            f"{program.name} must run on {program.place!r}, but launcher 'local' supports only this machine: leave out "
            "place, or choose a launcher for several hosts, such as run.launcher = 'ray'"
        )
    watcher = Watcher()
    try:
        pid = await watcher.start(
            program.command,
            {ADDRESS_VARIABLE: _LOOPBACK, **program.environment},
            str(program.log),
            "" if program.ready_file is None else str(program.ready_file),
            appends=program.appends,
            inherits=program.inherits,
        )
    except OSError as error:
        raise ConfigError(f"{program.name} cannot be started: {error.filename}: {error.strerror}") from error
    return _Child(watcher, pid)
