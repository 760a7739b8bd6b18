"""Processes whose output and time are bounded, for tools."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from inflight.base.tasks import run_in_background
from inflight.errors import TaskError

FLOOD = 100
"""A process is killed when it has written this many times its ``max_output_bytes``."""


_HELD = ("sh", "-c", 'read -r _ && exec "$@"', "sh")
"""Holds a command back until it is released: if the start is cancelled, asyncio kills this process but not its
children.
"""
_END_S, _RETRY_S = 30.0, 0.1


@dataclass(frozen=True)
class CommandResult:
    """How a process ended: ``exit_code`` is None if it was killed for the reason in ``note``."""

    exit_code: int | None
    output: str
    note: str = ""

    def text(self) -> str:
        """Return the output for a model, with a last line in brackets if the process did not end normally."""
        note = self.note or (f"exit status {self.exit_code}" if self.exit_code else "" if self.output else "no output")
        gap = "" if not self.output or self.output.endswith("\n") else "\n"
        return f"{self.output}{gap}[{note}]" if note else self.output


async def run_bounded(
    command: Sequence[str],
    timeout_s: float,
    max_output_bytes: int,
    kill: Callable[[int], None],
    watch: Callable[[], Awaitable[None]] | None = None,
) -> CommandResult:
    """Run a command with empty input until it ends or reaches a limit.

    ``watch`` runs at the same time; an error in it ends the process and is raised. ``kill`` kills a process and
    everything that it started; it is called as soon as a limit is hit or this call is cancelled. Raises `TaskError` if
    the command cannot be started or does not end although it was killed.
    """
    output = BoundedOutput(max_output_bytes)
    try:
        held = [*_HELD, *command]
        process = await anyio.open_process(held, stderr=subprocess.STDOUT, cwd="/", start_new_session=True)
    except OSError as error:
        raise TaskError(f"{command[0]} cannot be started: {error}") from error

    try:
        async with asyncio.timeout(timeout_s) as limit, run_in_background(*(() if watch is None else (watch(),))):
            assert process.stdin is not None and process.stdout is not None
            await send_all(process.stdin, b"\n")
            if await output.read(process.stdout):
                await process.wait()
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        exit_code = process.returncode
        if exit_code is None:
            kill(process.pid)  # at once: what is awaited below can be cancelled
        await _end(process, kill)
    note = ""
    if limit.expired():
        note = f"ended after {timeout_s:g} s"
    elif output.is_flood:
        note = f"ended: it wrote more than {FLOOD * max_output_bytes} bytes"
    return CommandResult(None if note else exit_code, output.text(), note)


async def _end(process: Process, kill: Callable[[int], None]) -> None:
    assert process.stdout is not None
    with anyio.move_on_after(_END_S):
        while process.returncode is None:
            kill(process.pid)
            with anyio.move_on_after(_RETRY_S):
                async for _ in process.stdout:  # asyncio sees the end of a process only when its output is read
                    pass
                await process.wait()
        await process.aclose()
        return
    raise TaskError(f"a process did not end within {_END_S:g} s after it was killed")


async def send_all(stream: ByteSendStream, content: bytes) -> None:
    """Write all of a process's input and close the stream, unless the process has ended without reading the input."""
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await stream.send(content)
        await stream.aclose()


class BoundedOutput:
    """Keeps the first and the last bytes of a process's output."""

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
