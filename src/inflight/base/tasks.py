"""Tasks with owners: a task always ends before its owner returns, and no failure is lost when several tasks fail.

When several tasks fail, the first failure is raised, and the later ones are added to it as notes. The event loop
reports the failure of a task that nobody awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_MAX_MESSAGE = 20_000
"""The maximum number of characters that `text_of` keeps of a message or a note."""
_END_S = 30.0
"""How long the cancelled tasks of a `TaskOwner` may take to end."""


# ------------------------------------------------------------------------------------- tasks that end with one call


@contextlib.asynccontextmanager
async def run_in_background(*calls: Awaitable[object]) -> AsyncIterator[None]:
    """Run calls while the body runs, and cancel them when the body ends.

    The first exception, from a call or from the body, cancels the rest and is raised once they have ended. Failures
    that occur in the meantime become notes on that exception, as in `combine_failures`.
    """
    failures: Sequence[Exception] = ()
    of_body: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_coroutine_of(call)) for call in calls]
            try:
                yield
            except Exception as error:
                is_first = not any(task.done() and not task.cancelled() and task.exception() for task in tasks)
                of_body = error if is_first else None
                raise
            for task in tasks:
                task.cancel()
    except ExceptionGroup as raised:
        failures = raised.exceptions
    if failures:
        raise combine_failures(sorted(failures, key=lambda failure: failure is not of_body))


async def run_together(*calls: Awaitable[T]) -> list[T]:
    """Return the results of all calls. The first exception cancels the others and is raised once they have ended."""
    failures: ExceptionGroup | None = None
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(_coroutine_of(call)) for call in calls]
    except ExceptionGroup as raised:
        failures = raised
    if failures is not None:
        raise combine_failures(failures.exceptions)
    return [task.result() for task in tasks]


async def finish_all(*calls: Coroutine[Any, Any, T]) -> list[T]:
    """Run calls until each has returned or failed; return their results, or raise the first exception."""
    ends = await asyncio.gather(*calls, return_exceptions=True)
    if failures := [end for end in ends if isinstance(end, Exception)]:
        raise combine_failures(failures)
    results: list[T] = []
    for end in ends:
        if isinstance(end, BaseException):  # this call alone was cancelled
            raise end
        results.append(end)
    return results


async def any_of(*calls: Awaitable[T]) -> tuple[int, T]:
    """Return the index and result of the first call that ends. The others have been cancelled, and have ended too."""
    tasks = [start(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        number = next(number for number, task in enumerate(tasks) if task.done())
        return number, tasks[number].result()
    finally:
        await cancel_and_wait(*tasks)


async def result_unless(
    call: Awaitable[T], end: Awaitable[object], error: Callable[[], Exception], grace_s: float = 0.0
) -> T:
    """Return what ``call`` returns, or raise ``error()`` if it is not done ``grace_s`` seconds after ``end`` finishes.

    Whichever of the two is still running is cancelled, and has ended when this returns or raises. A failure of ``end``
    is raised.
    """
    calling, ending = start(call), start(end)
    try:
        await asyncio.wait({calling, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done() and grace_s:
            await asyncio.wait({calling}, timeout=grace_s)
        if calling.done():
            return calling.result()
        ending.result()
        raise error()
    except Exception as raised:
        await cancel_and_wait(calling, ending)
        others = [task.exception() for task in (calling, ending) if not task.cancelled()]
        combine_failures([raised, *(other for other in others if isinstance(other, Exception) and other is not raised)])
        raise
    finally:
        await cancel_and_wait(calling, ending)


# ---------------------------------------------------------------------------------- tasks that outlive their callers


class EndedByOwnerError(Exception):
    """The owner of a call has ended it."""


class TaskOwner:
    """Tasks that outlive the calls that started them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __bool__(self) -> bool:
        """Return whether a task is running."""
        return bool(self._tasks)

    def start(self, call: Awaitable[T]) -> asyncio.Task[T]:
        """Begin a call and return its task."""
        task = start(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self, call: Awaitable[T]) -> T:
        """Run a call and return its result. Raises `EndedByOwnerError` if `cancel` cancelled it."""
        task = self.start(call)
        try:
            await asyncio.wait({task})
        finally:
            await cancel_and_wait(task)
        if task.cancelled():
            raise EndedByOwnerError
        return task.result()

    def cancel(self) -> None:
        """Cancel all tasks. They may take a while to end."""
        for task in self._tasks:
            task.cancel()

    async def aclose(self, wait_s: float | None = 0.0) -> None:
        """Wait for the tasks, at most ``wait_s`` seconds if given, then cancel the rest and wait until they have ended.

        Tasks that do not end soon after they are cancelled are logged, and keep running.
        """
        try:
            if self._tasks and wait_s != 0:
                await asyncio.wait(self._tasks, timeout=wait_s)
        finally:
            await cancel_and_wait(*self._tasks, timeout_s=_END_S)


def start(call: Awaitable[T]) -> asyncio.Task[T]:
    """Return a task that runs ``call``. The caller owns the task: it must keep a reference and await the task's end."""
    return asyncio.create_task(_coroutine_of(call))


async def cancel_and_wait(*tasks: asyncio.Future[Any], timeout_s: float = math.inf) -> None:
    """Cancel tasks and return once they have ended, even if the caller is cancelled in the meantime.

    Their results and exceptions remain in the tasks. Tasks that have not ended after ``timeout_s`` seconds are logged,
    and keep running.
    """
    for task in tasks:
        task.cancel()
    deadline = time.monotonic() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    while waiting := [task for task in tasks if not task.done()]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            names = "; ".join(map(repr, waiting))
            _LOG.warning("these tasks have not ended %g s after they were cancelled: %s", timeout_s, names)
            break
        try:
            await asyncio.wait(waiting, timeout=None if left_s == math.inf else left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _coroutine_of(call: Awaitable[T]) -> Coroutine[Any, Any, T]:
    # Not wrapped: a wrapper would never await the coroutine if the task is cancelled before it begins.
    return call if isinstance(call, Coroutine) else _await_call(call)


async def _await_call(call: Awaitable[T]) -> T:
    return await call


# ------------------------------------------------------------------------------------------------- several failures


@contextlib.contextmanager
def add_failures_to(first: BaseException) -> Iterator[None]:
    """Add failures of the body as notes to an earlier failure, which the caller raises."""
    try:
        yield
    except Exception as other:  # reported with the first
        _add_note(first, other)


def combine_failures(failures: Sequence[Exception]) -> Exception:
    """Return the first of several failures, with each of the others added as a note."""
    first, *others = failures
    for other in others:
        _add_note(first, other)
    return first


def _add_note(first: BaseException, other: Exception) -> None:
    first.add_note(f"also failed: {type(other).__name__}: {other}")


def text_of(error: BaseException) -> str:
    """Return an error's message and notes, one per line; very long ones are shortened."""
    return "\n".join(shortened(text, _MAX_MESSAGE) for text in (str(error), *getattr(error, "__notes__", ())))


def shortened(text: str, max_length: int = 2000) -> str:
    """Return a text with its middle left out if it has more characters than ``max_length``."""
    if len(text) <= max_length:
        return text
    half = max_length // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"
