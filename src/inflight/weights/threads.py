"""Blocking calls that can be left behind: each runs in a daemon thread, which is abandoned on cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

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
