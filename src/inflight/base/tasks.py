"""Tasks with owners: each is awaited before its owner returns, and no error of one is lost.

An error that cannot be raised, because another one already is, becomes a note of that one. For tasks that end together
in one block, use `asyncio.TaskGroup`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def start(call: Awaitable[T]) -> asyncio.Task[T]:
    """Return a task that runs ``call``. The caller owns it: it keeps a reference, and awaits the task's end."""
    return asyncio.create_task(_awaited(call))


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel these tasks and return once they have ended, also if the caller is cancelled meanwhile."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while waiting := [task for task in ending if not task.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of calls that run at the same time.

    The first failure, or a cancellation, cancels the others, and is raised once they have ended.
    """
    failure: BaseException
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(call)) for call in calls]
        return [task.result() for task in tasks]
    except BaseExceptionGroup as failures:
        failure = _noted(failures.exceptions[0], failures.exceptions)
    raise failure


@contextlib.asynccontextmanager
async def beside(*calls: Awaitable[None]) -> AsyncIterator[None]:
    """Run calls while the body runs, and cancel them after it.

    The first failure, of a call or of the body, ends all of them, and is raised once they have ended.
    """
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(call)) for call in calls]
            try:
                yield
            except Exception as error:
                if not any(task.done() and not task.cancelled() and task.exception() for task in tasks):
                    failure = error  # the group lists it last
                raise
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        failure = (
            _noted(failures.exceptions[0], failures.exceptions)
            if failure is None
            else _noted(failure, failures.exceptions)
        )
    if failure is not None:
        raise failure


async def result_unless(
    call: Awaitable[T], end: Awaitable[object], error: Callable[[], Exception], grace_s: float = 0.0
) -> T:
    """Return what ``call`` returns, or raise ``error()`` if it is not done ``grace_s`` seconds after ``end`` is.

    What is left of either is cancelled, and has ended when this returns or raises. A failure of ``end`` is raised.
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
    except BaseException as raised:
        await cancel([calling, ending])
        _noted(raised, [task.exception() for task in (calling, ending) if not task.cancelled()])
        raise
    finally:
        await cancel([calling, ending])


class EndedByOwnerError(Exception):
    """The owner of a call has ended it."""


class TaskOwner:
    """Tasks that go on when the calls that started them have returned. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __bool__(self) -> bool:
        """Return whether a task is running."""
        return bool(self._tasks)

    def start(self, call: Awaitable[T]) -> asyncio.Task[T]:
        """Begin a call and return its task. The event loop reports a failure that nobody awaits."""
        task = start(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self, call: Awaitable[T]) -> T:
        """Return what a call returns, once it has ended. Raises `EndedByOwnerError` if it was cancelled by `cancel`."""
        task = self.start(call)
        try:
            await asyncio.wait({task})
        finally:
            await cancel([task])
        if task.cancelled():
            raise EndedByOwnerError
        return task.result()

    def cancel(self) -> None:
        """Cancel all tasks, which may take a while to end."""
        for task in self._tasks:
            task.cancel()

    async def aclose(self, wait_s: float = 0.0) -> None:
        """Wait up to ``wait_s`` seconds for the tasks, then cancel the rest; return once all have ended."""
        if self._tasks and wait_s:
            await asyncio.wait(self._tasks, timeout=wait_s)
        await cancel(self._tasks)


async def _awaited(call: Awaitable[T]) -> T:
    return await call


def _noted(raised: BaseException, failures: Iterable[BaseException | None]) -> BaseException:
    """Return an error, with notes of those of ``failures`` that are others."""
    for failure in failures:
        if failure is not None and failure is not raised:
            raised.add_note(f"At the same time: {type(failure).__name__}: {failure}")
    return raised
