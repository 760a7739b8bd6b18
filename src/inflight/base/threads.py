"""Blocking calls that can be abandoned: each runs in a daemon thread, which continues when nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from inflight.errors import TransferError

T = TypeVar("T")


async def run_abandonable(call: Callable[[], T], name: str) -> T:
    """Return what ``call`` returns or raise what it raises.

    If the awaiting task is cancelled, the thread keeps running on its own and its result is dropped: the call must end
    on its own (every collective carries a timeout), and a process may end without waiting for it.
    """
    return await asyncio.wrap_future(started(call, name))


def run_unless(given_up: Future[str], call: Callable[[], T], name: str, timeout_s: float | None = None) -> T:
    """Return what ``call`` returns or raise what it raises, unless ``given_up`` or the timeout comes first.

    In that case raises `TransferError`; the call keeps running on its own and its result is dropped.
    """
    return result_unless(given_up, started(call, name), name, timeout_s)


def started(call: Callable[[], T], name: str) -> Future[T]:
    """Start ``call`` in a thread of its own, and return its future."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
    threading.Thread(target=_settle, args=(result, call), name=name, daemon=True).start()
    return result


def result_unless(given_up: Future[str], result: Future[T], name: str, timeout_s: float | None = None) -> T:
    """Return the result of what was `started`, or raise as `run_unless` does."""
    waited_for: list[Future[Any]] = [result, given_up]
    wait(waited_for, timeout_s, return_when=FIRST_COMPLETED)
    if not result.done():
        raise TransferError(given_up.result() if given_up.done() else f"{name} failed: not done after {timeout_s:g} s")
    try:
        return result.result()
    finally:
        del result, waited_for  # the error's traceback holds this frame, which would keep the group alive


def _settle(result: Future[T], call: Callable[[], T]) -> None:
    try:
        result.set_result(call())
    except BaseException as raised:  # handed to the caller
        result.set_exception(raised)
        del result, call  # as above
