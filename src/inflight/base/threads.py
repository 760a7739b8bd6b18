"""Daemon threads: blocking calls whose callers may stop waiting, and an event loop for callers in other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from inflight.errors import TransferError

T = TypeVar("T")


async def run_abandonable(call: Callable[[], T], name: str) -> T:
    """Return what ``call`` returns or raise what it raises.

    If the awaiting task is cancelled, the thread keeps running and its result is dropped. The call must therefore end
    by itself (every collective has a timeout), and a process may exit without waiting for it.
    """
    return await asyncio.wrap_future(start_in_thread(call, name))


def run_unless_abandoned(abandoned: Future[str], call: Callable[[], T], name: str, timeout_s: float | None = None) -> T:
    """Return what ``call`` returns or raise what it raises, unless ``abandoned`` is set or the timeout expires first.

    In both of these cases, `TransferError` is raised; the call keeps running, and its result is dropped.
    """
    return result_unless_abandoned(abandoned, start_in_thread(call, name), name, timeout_s)


def start_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Start ``call`` in its own thread, and return its future."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
    threading.Thread(target=_settle, args=(result, call), name=name, daemon=True).start()
    return result


def result_unless_abandoned(abandoned: Future[str], result: Future[T], name: str, timeout_s: float | None = None) -> T:
    """Return the result of a call that `start_in_thread` started. Raises the same errors as `run_unless_abandoned`."""
    waited_for: list[Future[Any]] = [result, abandoned]
    wait(waited_for, timeout_s, return_when=FIRST_COMPLETED)
    if not result.done():
        raise TransferError(
            abandoned.result() if abandoned.done() else f"{name} failed: not done after {timeout_s:g} s"
        )
    try:
        return result.result()
    finally:
        del result, waited_for  # the error's traceback holds this frame, which would keep the group alive


def start_portal(name: str) -> tuple[BlockingPortal, threading.Thread]:
    """Start an event loop in a thread. Return its portal, and the thread, which ends once the portal is stopped.

    Unlike `anyio.from_thread.start_blocking_portal`, nothing has to be closed before the process exits. If the loop
    does not start, for example because no file can be opened, the error that prevented this is raised.
    """
    started: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    def run() -> None:
        try:
            anyio.run(serve)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return started.result(), thread


def _settle(result: Future[T], call: Callable[[], T]) -> None:
    try:
        result.set_result(call())
    except BaseException as raised:  # raised in the caller
        # A future cannot hold a StopIteration; exceptions such as SystemExit would end the caller's task or loop.
        is_control = isinstance(raised, StopIteration) or not isinstance(raised, Exception)
        result.set_exception(RuntimeError(f"the call raised {raised!r}") if is_control else raised)
        del result, call  # as above
