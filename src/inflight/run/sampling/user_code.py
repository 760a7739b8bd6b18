"""Calls a user's task, checks its results, and converts its exceptions to `TaskError`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from inflight.base.tasks import shortened
from inflight.base.threads import run_abandonable
from inflight.contracts import Environment, Task
from inflight.errors import InflightError, TaskError
from inflight.rollouts.curriculum import Curriculum
from inflight.types import TaskItem

T = TypeVar("T")


def item_of(task: Task | Environment, index: int, level: int = 0) -> TaskItem:
    """Return an item; if the task is a curriculum, one of this level. Raises `TaskError`."""
    kind = "environment" if isinstance(task, Environment) else "task"
    what = f"{kind} {task.name!r} failed to make item {index}"
    item = call_user(what, lambda: task.item_at(level, index) if isinstance(task, Curriculum) else task.item(index))
    if not isinstance(item, TaskItem) or not isinstance(item.prompt, str):
        raise TaskError(f"{what}: it returned {shortened(repr(item))}, not a TaskItem with a string as its prompt")
    if item.index != index:
        raise TaskError(f"{what}: it returned an item with index {item.index}, not with the requested one")
    return item


def rewards_of(task: Task, item: TaskItem, texts: Sequence[str]) -> list[float]:
    """Return the reward of each text. Raises `TaskError`."""
    what = f"the reward of task {task.name!r} raised on item {item.index}"
    return call_user(what, lambda: [float(task.score(item, text)) for text in texts])


def call_user(what: str, call: Callable[[], T]) -> T:
    """Return the result of ``call``, which runs a user's code.

    Raises a `TaskError` that begins with ``what`` for any exception except an `InflightError`, which propagates.

    Call this in a separate thread or process, where only the user's code can raise `SystemExit`, `KeyboardInterrupt` or
    `CancelledError`.
    """
    try:
        return call()
    except InflightError:
        raise
    except BaseException as error:
        raise TaskError(f"{what}: {describe_error(error)}") from error


async def in_thread(what: str, call: Callable[[], T], timeout_s: float) -> T:
    """Return the result of ``call``, run in its own thread.

    Raises `TaskError` like `call_user`, and also if the call takes too long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await run_abandonable(call, "inflight-task")
    except TimeoutError as error:
        raise TaskError(f"{what} took longer than {timeout_s:g} s") from error


def describe_error(error: BaseException) -> str:
    """Return the representation of a user's exception, shortened."""
    try:
        return shortened(repr(error))
    except Exception:  # a user's exception may fail even at that
        return type(error).__name__


def json_of(item: TaskItem) -> dict[str, Any]:
    """Return an item without the metadata that JSON cannot represent.

    That metadata stays in the process that computes the rewards.
    """
    kept = {key: value for key, value in item.metadata.items() if isinstance(value, (str, int, float, bool))}
    answer = None if item.answer is None else str(item.answer)
    return {"index": item.index, "prompt": str(item.prompt), "answer": answer, "metadata": kept}
