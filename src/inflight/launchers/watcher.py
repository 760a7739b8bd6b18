"""Starts, watches and stops one child process.

A launcher for other hosts runs `Watcher` there, in any available Python, so this file uses only the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import IO

NUM_LINES = 24
"""Number of log lines that are quoted."""
_MAX_TAIL_BYTES = 1 << 16


class Watcher:
    """Starts one process and reports how it ended. An instance belongs to one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._log = ""
        self._ready_file = ""

    async def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: str,
        ready_file: str = "",
        *,
        appends: bool = False,
        inherits: tuple[int, ...] = (),
        directory: str | None = None,
        hides: str | None = None,
    ) -> int:
        """Start the command, in ``directory`` if that exists, and return its process id.

        Environment variables that begin with ``hides`` are removed.

        Raises `OSError` if the command or the log cannot be opened.
        """
        self._log, self._ready_file = log, ready_file
        inherited = {name: value for name, value in os.environ.items() if hides is None or not name.startswith(hides)}
        with self._opened(appends) as output:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**inherited, **environment},
                cwd=_if_there(directory),
                pass_fds=inherits,
                start_new_session=True,  # Ctrl-C reaches the run only, which then stops the process
            )
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while the process is running."""
        return None if self._process is None else self._process.returncode

    async def wait(self) -> tuple[int, tuple[str, ...]]:
        """Wait for the process to end; return its status and the last lines of its log."""
        assert self._process is not None
        status = await self._process.wait()
        return status, self.tail()

    def tail(self) -> tuple[str, ...]:
        """Return the last lines of the log."""
        try:
            with open(self._log, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _MAX_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ()
        return tuple(text.strip().splitlines()[-NUM_LINES:])

    async def ready(self) -> str | None:
        """Return the contents of the ready file, or None if it does not exist yet."""
        return self._contents()

    def _opened(self, appends: bool) -> IO[bytes]:
        """Open the log, and remove the ready file of an earlier incarnation."""
        os.makedirs(os.path.dirname(self._log) or ".", exist_ok=True)
        if self._ready_file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._ready_file)
        return open(self._log, "ab" if appends else "wb")

    def _contents(self) -> str | None:
        try:
            with open(self._ready_file) as file:
                return file.read()
        except FileNotFoundError:
            return None

    async def send_signal(self, number: int) -> None:
        """Send a signal; does nothing once the process has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, patience_s: float) -> None:
        """Close the process's standard input and wait for it to end; kill it after ``patience_s``."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _if_there(directory: str | None) -> str | None:
    return directory if directory is not None and os.path.isdir(directory) else None
