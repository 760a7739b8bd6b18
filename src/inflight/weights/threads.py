"""Blocking calls that can be left behind: each runs in a daemon thread, which is abandoned when nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from inflight.errors import TransferError

T = TypeVar("T")


async def run_abandonable(call: Callable[[], T], name: str) -> T:
    """Return what ``call`` returns or raise what it raises.

    If the awaiting task is cancelled, the thread goes on by itself and its result is dropped: the call must end on its
    own (every collective carries a timeout), and a process may end without waiting for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        try:
            result, error = call(), None
        except BaseException as raised:  # handed to the awaiting task, whatever it is
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the result any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future


def run_unless(given_up: Future[str], call: Callable[[], T], name: str, timeout_s: float | None = None) -> T:
    """Return what ``call`` returns or raise what it raises, unless ``given_up`` or the timeout comes first.

    Raises `TransferError` then; the call goes on by itself and its result is dropped.
    """
    return result_unless(given_up, started(call, name), name, timeout_s)


def started(call: Callable[[], T], name: str) -> Future[T]:
    """Return what will be the result of ``call``, which runs in a thread of its own from now on."""
    result: Future[T] = Future()
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
        del result, waited_for  # the error's traceback holds this frame: it would keep itself and the group alive


def run_all(calls: Sequence[Callable[[], None]], name: str, timeout_s: float) -> None:
    """Return when every call has returned, or raise what the first one that raises does.

    Raises `TransferError` after the timeout; calls that have not ended then, or when one raised, go on by themselves.
    """
    results: list[Future[None]] = [Future() for _ in calls]
    for i, call in enumerate(calls):
        threading.Thread(target=_settle, args=(results[i], call), name=name, daemon=True).start()
    each: Future[None] | None = None
    ended, pending = wait(results, timeout_s, return_when=FIRST_EXCEPTION)
    try:
        for each in ended:
            each.result()
        if pending:
            raise TransferError(f"{name} failed: not done after {timeout_s:g} s")
    finally:
        del results, each, ended, pending  # as above


def _settle(result: Future[T], call: Callable[[], T]) -> None:
    try:
        result.set_result(call())
    except BaseException as raised:  # handed to the caller, whatever it is
        result.set_exception(raised)
        del result, call  # as above
