"""Tasks that belong together: none is left running, and no failure is lost when several fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def running(*calls: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run calls while the body runs. The first exception ends all of them and is raised once they have ended.

    What fails while they end is a note of that exception, as `first_of` says.
    """
    failures: Sequence[Exception] = ()
    of_body: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
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
        raise first_of(sorted(failures, key=lambda failure: failure is not of_body))


async def run_together(*calls: Coroutine[Any, Any, T]) -> list[T]:
    """Return what the calls return. The first exception ends the others and is raised once they have ended."""
    failures: Sequence[Exception] = ()
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(call) for call in calls]
    except ExceptionGroup as raised:
        failures = raised.exceptions
    if failures:
        raise first_of(failures)
    return [task.result() for task in tasks]


async def finish_all(*calls: Coroutine[Any, Any, object]) -> None:
    """Run calls until each has returned or failed, and then raise the first exception, if there is one."""
    ends = await asyncio.gather(*calls, return_exceptions=True)
    if failures := [end for end in ends if isinstance(end, Exception)]:
        raise first_of(failures)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and return once they have ended. Their results and exceptions are for whoever holds them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def also_failing(first: BaseException) -> Iterator[None]:
    """Make whatever fails in the body a note of an earlier failure, which the caller raises."""
    try:
        yield
    except Exception as other:  # reported with the first
        _add_note(first, other)


def first_of(failures: Sequence[Exception]) -> Exception:
    """Return the first of several failures; each of the others is one of its notes."""
    first, *others = failures
    for other in others:
        _add_note(first, other)
    return first


def _add_note(first: BaseException, other: Exception) -> None:
    first.add_note(f"also failed: {type(other).__name__}: {other}")


def text_of(error: BaseException) -> str:
    """Return the message of an error and its notes, one on each line."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
