"""A thread that checks run in, so that the process can say where a check waits when it does not come back."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from inflight.conformance.judge import Hung

_POLL_S = 0.05
_GRACE_S = 5.0
"""For a rank that is still at work after another one has ended early."""


class CheckThread:
    """Calls functions one after another in one thread: devices and thread counts are a thread's own."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="checks", daemon=True).start()

    def call(self, function: Callable[[], Any], deadline_s: float, given_up: Callable[[], str | None]) -> Any:
        """Return what the function returns. Raises what it raises, and `Hung` if it does not end in time.

        ``given_up`` says why waiting has become pointless; the function then gets a few more seconds only. After
        `Hung` the function still runs, and nothing else may be called.
        """
        call = _Call(function)
        self._calls.put(call)
        deadline, reason = time.monotonic() + deadline_s, f"no end after {deadline_s:g} s"
        is_given_up = False
        while not call.done.wait(_POLL_S):
            if not is_given_up and (why := given_up()) is not None:
                is_given_up = True
                if time.monotonic() + _GRACE_S < deadline:
                    deadline = time.monotonic() + _GRACE_S
                    reason = f"no end {_GRACE_S:g} s after another rank had ended early ({why})"
            if time.monotonic() > deadline:
                raise Hung(reason, stacks_of_other_threads())
        if call.error is not None:
            raise call.error
        return call.value

    def end(self) -> None:
        """Let the thread end once its present function has."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # raised again in the thread that called
            self.error = error
        self.done.set()


def stacks_of_other_threads() -> str:
    """Return where every thread but this one is, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
        if number != threading.get_ident()
    )
