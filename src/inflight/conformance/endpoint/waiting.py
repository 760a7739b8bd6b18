"""Waiting for calls and conditions, always with a limit."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

from inflight.base.tasks import start
from inflight.conformance.checks import require

T = TypeVar("T")

SLOWNESS: ContextVar[float] = ContextVar("SLOWNESS", default=1.0)
"""Factor for every limit in this module, and for short leases and timeouts of checks: how slow the endpoint is (see
`inflight.conformance.endpoint.pace`), times the user's ``--deadline-scale``."""
SLACK_S = 4.0
"""How much later than its own deadline a call or a lease may end, since machines may be slow and errors take time to
arrive."""
GRACE_S = 0.3
"""Time for answers that left the endpoint before a call returned and are still in transit."""
SERVED_S = 15.0
"""Time limit for a few hundred tokens of a few requests, on any engine."""


async def within(seconds: float, call: Awaitable[T], what: str) -> T:
    """Return what ``call`` returns, or raise what it raises. Fail the check if the call takes too long."""
    seconds *= SLOWNESS.get()
    task = start(call)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    require(done, f"{what} had not ended after {seconds:g} s")
    return task.result()


async def until(
    holds: Callable[[], object], seconds: float, what: str, tasks: Iterable[asyncio.Future[Any]] = ()
) -> None:
    """Return once ``holds()`` is true. Fail the check if that takes too long; raise the error of a task that fails."""
    seconds *= SLOWNESS.get()
    deadline, watched = time.monotonic() + seconds, list(tasks)
    while not holds():
        for task in watched:
            if task.done():
                task.result()
        require(time.monotonic() < deadline, f"{what} within {seconds:g} s")
        await asyncio.sleep(0.005)


def task_stacks() -> str:
    """Return where every task of the running loop is waiting."""
    parts = []
    for task in asyncio.all_tasks():
        frames = task.get_stack(limit=12)
        if task is asyncio.current_task() or not frames:
            continue
        summary = [traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
        parts.append(f"task {task.get_name()} ({task.get_coro()}):\n{''.join(traceback.format_list(summary))}")
    return "\n".join(parts) or "no task is waiting"
