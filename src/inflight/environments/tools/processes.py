"""Processes whose output and time are bounded, for tools."""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import ByteReceiveStream, Process

from inflight.base.tasks import run_to_end
from inflight.errors import TaskError

FLOOD = 100
"""A process is ended when it has written this many times its ``max_bytes`` of output."""


@dataclass(frozen=True)
class CommandResult:
    """How a process ended: ``exit_code`` is None if it was ended, for the reason in ``note``."""

    exit_code: int | None
    output: str
    note: str = ""

    def text(self) -> str:
        """Return the output, and a last line in brackets where there is more to say, for a model."""
        note = self.note or (f"exit status {self.exit_code}" if self.exit_code else "" if self.output else "no output")
        gap = "" if not self.output or self.output.endswith("\n") else "\n"
        return f"{self.output}{gap}[{note}]" if note else self.output


async def run_bounded(
    command: Sequence[str],
    *,
    timeout_s: float,
    max_output_bytes: int,
    end: Callable[[Process], Awaitable[None]],
    env: Mapping[str, str] | None = None,
    watch: Callable[[], Awaitable[str | None]] = anyio.sleep_forever,
) -> CommandResult:
    """Run a command, whose input is empty, to its end or a limit.

    ``watch`` runs meanwhile and returns why the process must be ended. ``end`` ends the process and everything that it
    started; it is called, and awaited to its end, whether the process ended, hit a limit, or this call is cancelled.
    Raises `TaskError` if the command cannot be started.
    """
    output = BoundedOutput(max_output_bytes)
    note = ""
    try:
        process = await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, cwd="/", env=env, start_new_session=True
        )
    except OSError as error:
        raise TaskError(f"{command[0]} cannot be started: {error}") from error

    async def watching() -> None:
        nonlocal note
        note = await watch() or ""
        group.cancel_scope.cancel()

    try:
        with anyio.move_on_after(timeout_s) as deadline:
            async with anyio.create_task_group() as group:
                group.start_soon(watching)
                assert process.stdout is not None
                if await output.read(process.stdout):
                    await process.wait()
                group.cancel_scope.cancel()
    finally:
        exit_code = process.returncode
        await run_to_end(_end_and_close(process, end))
    if deadline.cancelled_caught:
        note = f"ended after {timeout_s:g} s"
    elif output.is_flood:
        note = f"ended: it wrote more than {FLOOD * max_output_bytes} bytes"
    return CommandResult(None if note else exit_code, output.text(), note)


async def _end_and_close(process: Process, end: Callable[[Process], Awaitable[None]]) -> None:
    try:
        await end(process)
    finally:
        await process.aclose()


class BoundedOutput:
    """The first and the last bytes of what a process wrote."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._size_bytes = 0
        self.is_flood = False

    async def read(self, stream: ByteReceiveStream) -> bool:
        """Read until the end and return True, or return False as soon as the limit is exceeded."""
        async for chunk in stream:
            self._size_bytes += len(chunk)
            if self._size_bytes > FLOOD * self._max_bytes:
                self.is_flood = True
                return False
            room = self._max_bytes - self._max_bytes // 2 - len(self._head)
            self._head += chunk[:room]
            self._tail += chunk[room:]
            if len(self._tail) > 2 * self._max_bytes:
                del self._tail[: -self._max_bytes]
        return True

    def text(self) -> str:
        """Return the output as text; bytes that are not UTF-8 are replaced."""
        tail = self._tail[-(self._max_bytes // 2) :] if self._max_bytes > 1 else b""
        num_cut = self._size_bytes - len(self._head) - len(tail)
        if num_cut <= 0:
            return (self._head + self._tail).decode(errors="replace")
        return f"{self._head.decode(errors='replace')}\n[{num_cut} bytes cut]\n{tail.decode(errors='replace')}"
