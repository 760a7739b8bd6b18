"""The page of a run, which ``inflight watch`` serves in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from inflight.http.tokens import TOKEN_VARIABLE

_PARTING_S = 5.0


async def serve_page(directory: Path, logs: Path, note: Callable[[str], None]) -> None:
    """Serve the page until cancelled, and report its address. If the page's process ends, the run continues."""
    environment = {
        name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE
    }  # the page has its own token
    command = [sys.executable, "-m", "inflight", "watch", str(directory), "--port", "0", "--exit-with-stdin"]
    log = logs / "page.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the run only
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        async for line in process.stdout:
            note(line.decode(errors="replace").strip().removeprefix("inflight: "))
        note(
            f"the process that serves the run's page has ended; its output is in {log}. Run inflight watch "
            f"{directory} to serve the page again"
        )
        await process.wait()
    finally:
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_PARTING_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
