"""Ctrl-C and other signals: the first ends a run after its current step, and the second ends it immediately."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

from inflight.base.tasks import result_unless

T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """The user has asked the run to end."""


class Interrupt:
    """Records whether signals have asked the run to end. ``note`` shows a line; ``kill`` ends the run's processes."""

    def __init__(self, note: Callable[[str], None], kill: Callable[[], None]) -> None:
        self._note = note
        self._kill = kill
        self._event = asyncio.Event()
        self.is_immediate = False
        """Whether the user has asked twice, so that the run's processes were killed."""

    def listen(self) -> None:
        """Handle the signals in the running event loop. If SIGHUP is ignored, as under ``nohup``, it stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self._event.is_set():
            self._event.set()
            self._note("stopping after this step; press Ctrl-C again to stop at once")
            return
        if not self.is_immediate:
            self._note(
                "stopping at once: the run's processes are being killed, and steps since the last checkpoint are lost"
            )
        self.is_immediate = True
        self._kill()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def unless(self, call: Awaitable[T]) -> T:
        """Await a call. Cancels it and raises `Interrupted` as soon as the run is asked to end."""
        return await result_unless(call, self._event.wait(), Interrupted)
