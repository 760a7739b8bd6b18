"""A thread with its own event loop for users' coroutines, so that a blocking coroutine does not stop the run.

A heartbeat detects a coroutine that blocks its thread. This coroutine fails, the thread is abandoned, and all other
coroutines in the thread are cancelled so that they can be run again elsewhere. Code that never releases the
interpreter's lock cannot be detected.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from inflight.base.tasks import cancel_and_wait, start

T = TypeVar("T")

_BLOCKED_S = 10.0
"""How long a coroutine may hold the thread without an await."""
_POLL_S = 0.2
_GRACE_S = 5.0
"""How long a cancelled coroutine may take to end."""


class BlockedError(Exception):
    """A coroutine did not let other coroutines run; the message states where it was blocked."""


class OverdueError(Exception):
    """A coroutine did not end in time, although it was cancelled."""


class PlayLoop:
    """Runs coroutines in threads; used from one event loop, and closed there.

    All coroutines share one thread until one of them blocks it; from then on, each runs in its own thread.
    """

    def __init__(self, blocked_s: float = _BLOCKED_S, grace_s: float = _GRACE_S) -> None:
        self._blocked_s = blocked_s
        self._grace_s = grace_s
        self._shared: _Thread | None = None
        self._has_blocked = False
        self._watched: set[_Thread] = set()
        self._left: set[_Thread] = set()
        """The threads that have been asked to end."""
        self._watching: asyncio.Task[None] | None = None

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Return a coroutine's result. The coroutine is cancelled after ``timeout_s``, or when this call is cancelled.

        Raises `OverdueError` if the coroutine does not end soon after its cancellation, and `BlockedError` if it blocks
        its thread. If another coroutine blocks the thread, this call is cancelled.
        """
        thread = self._thread()
        played: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        thread.begin(call, played)
        try:
            done, _ = await asyncio.wait({played}, timeout=timeout_s)
            if not done:
                thread.cancel(played)
                done, _ = await asyncio.wait({played}, timeout=self._grace_s)
            if not done:
                raise OverdueError(f"it did not end within {self._grace_s:g} s of its cancellation")
            return played.result()
        finally:
            thread.cancel(played)
            if thread is not self._shared:
                self._leave(thread)

    async def aclose(self) -> None:
        """Cancel everything and end the threads; threads that do not end in time are abandoned."""
        watching, self._watching, self._shared = self._watching, None, None
        if watching is not None:
            await cancel_and_wait(watching)
        for thread in list(self._watched):
            self._leave(thread)
        await asyncio.to_thread(_join, list(self._left), self._grace_s)

    def _thread(self) -> _Thread:
        if self._watching is None:
            self._watching = start(self._watch())
        if self._shared is not None:
            return self._shared
        thread = _Thread()
        self._watched.add(thread)
        if not self._has_blocked:
            self._shared = thread
        return thread

    def _leave(self, thread: _Thread) -> None:
        if thread in self._watched:
            self._watched.discard(thread)
            self._left = {left for left in self._left if left.is_alive} | {thread}
            thread.leave()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._blocked_s / 4))
            for thread in list(self._watched):
                if thread.silent_s() >= self._blocked_s:
                    self._has_blocked, self._shared = True, None
                    thread.fail(self._blocked_s)
                    self._watched.discard(thread)
                    thread.leave()


class _Thread:
    """One thread and the episodes that it runs.

    Unless noted, methods are called from the event loop in which the object was created.
    """

    def __init__(self) -> None:
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._running: dict[asyncio.Future[Any], asyncio.Task[Any] | None] = {}
        """The result of each requested call, and its task in the thread once it has begun."""
        self._ticked_s = time.monotonic()
        self._is_asked = False
        self._is_left = False
        self._thread = threading.Thread(target=self._serve, name="inflight-episodes", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_left:
            # A task that users' code began may end with SystemExit, which ends the loop.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        self._loop.close()

    def begin(self, call: Callable[[], Coroutine[Any, Any, T]], played: asyncio.Future[T]) -> None:
        self._running[played] = None

        def begin() -> None:
            task = self._loop.create_task(call())
            self._running[played] = task
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the run has ended, and its loop is closed
                self._home.call_soon_threadsafe(self._ended, played, task)

        self._loop.call_soon_threadsafe(begin)

    def _ended(self, played: asyncio.Future[T], task: asyncio.Task[T]) -> None:
        self._running.pop(played, None)
        if task.cancelled() and task.cancelling():
            played.cancel()
        elif task.cancelled():
            if not played.done():
                played.set_exception(RuntimeError("it raised CancelledError, although nothing cancelled it"))
        elif (error := task.exception()) is not None:
            if not played.done():
                played.set_exception(error if isinstance(error, Exception) else RuntimeError(f"it raised {error!r}"))
                played.exception()  # marks it as retrieved; it is used only if the call ended in time
        elif not played.done():
            played.set_result(task.result())

    def cancel(self, played: asyncio.Future[Any]) -> None:
        """Cancel a requested call if it has not ended."""
        if played in self._running:

            def cancel() -> None:
                task = self._running.get(played)
                if task is not None:
                    task.cancel()

            self._loop.call_soon_threadsafe(cancel)

    def join(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for the thread to end."""
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def silent_s(self) -> float:
        """Return for how many seconds the thread has not responded, and send the next heartbeat."""
        if not self._is_asked:
            self._is_asked, self._ticked_s = True, time.monotonic()
            self._loop.call_soon_threadsafe(self._tick)
        return time.monotonic() - self._ticked_s

    def _tick(self) -> None:
        """Record that the thread responds. Runs in the thread."""
        self._ticked_s, self._is_asked = time.monotonic(), False

    def fail(self, blocked_s: float) -> None:
        """Fail the call that blocks the thread, and cancel all other calls."""
        culprit = asyncio.current_task(self._loop)
        where = self._where()
        for played, task in list(self._running.items()):
            if task is not None and task is culprit and not played.done():
                played.set_exception(
                    BlockedError(f"it blocked its thread for {blocked_s:g} s, which stops every episode: {where}")
                )
            else:
                played.cancel()
        self._running.clear()

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        lines = traceback.extract_stack(frame) if frame is not None else []
        return (
            f"{lines[-1].filename}, line {lines[-1].lineno}, in {lines[-1].name}"
            if lines
            else ("at an unknown location")
        )

    def leave(self) -> None:
        """Cancel all calls, and let the thread end after the last one."""

        def stop() -> None:
            running = asyncio.all_tasks(self._loop)
            for task in running:
                task.cancel()
            if running:
                self._loop.call_later(_POLL_S, stop)
            else:
                self._is_left = True
                self._loop.stop()

        self._loop.call_soon_threadsafe(stop)


def _join(threads: Sequence[_Thread], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
