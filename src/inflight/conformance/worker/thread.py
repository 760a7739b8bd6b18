"""A thread that runs checks, so that the process can say where a check waits when it does not come back."""

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
"""For a rank that is still at work after another one ended early."""


class CheckThread:
    """Calls functions one after another in the same thread: each thread has its own device and thread count."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="checks", daemon=True).start()

    def call(self, function: Callable[[], Any], deadline_s: float, given_up: Callable[[], str | None]) -> Any:
        """Return what the function returns. Raises what it raises, and `Hung` if it does not end in time.

        Once ``given_up`` returns a reason, waiting is pointless and the function gets only a few more seconds. After
        `Hung` the function still runs, and nothing else may be called.
        """
        future: Future[Any] = Future()
        self._calls.put((future, function))
        deadline, reason = time.monotonic() + deadline_s, f"no end after {deadline_s:g} s"
        is_given_up = False
        while not wait([future], _POLL_S).done:
            if not is_given_up and (why := given_up()) is not None:
                is_given_up = True
                if time.monotonic() + _GRACE_S < deadline:
                    deadline = time.monotonic() + _GRACE_S
                    reason = f"no end {_GRACE_S:g} s after another rank had ended early ({why})"
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
