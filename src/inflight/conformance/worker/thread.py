"""A thread that runs checks, so that the process can report where a check that does not return is waiting."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from inflight.conformance.judge import Hung

_POLL_S = 0.05
_GRACE_S = 5.0
"""How long a rank may keep running after another one has ended early."""


class CheckThread:
    """Calls functions one after another in the same thread, because each thread has its own device and thread count."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="checks", daemon=True).start()

    def call(self, function: Callable[[], Any], deadline_s: float, abandoned: Callable[[], str | None]) -> Any:
        """Return what the function returns. Raises what it raises, and `Hung` if it does not end in time.

        Once ``abandoned`` returns a reason, waiting is pointless, so the function gets only a few more seconds. After
        `Hung`, the function is still running, and no other call is allowed.
        """
        future: Future[Any] = Future()
        self._calls.put((future, function))
        deadline, reason = time.monotonic() + deadline_s, f"it did not end within {deadline_s:g} s"
        is_abandoned = False
        while not wait([future], _POLL_S).done:
            if not is_abandoned and (why := abandoned()) is not None:
                is_abandoned = True
                if time.monotonic() + _GRACE_S < deadline:
                    deadline = time.monotonic() + _GRACE_S
                    reason = f"it did not end within {_GRACE_S:g} s after another rank had ended early ({why})"
            if time.monotonic() > deadline:
                raise Hung(reason, stacks_of_other_threads())
        return future.result()

    def end(self) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # raised again in the thread that called
                future.set_exception(error)


def stacks_of_other_threads() -> str:
    """Return where every thread but this one is, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
        if number != threading.get_ident()
    )
