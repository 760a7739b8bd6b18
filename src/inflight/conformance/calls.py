"""Blocking calls that run alongside a check, each in a daemon thread. They may end late or never."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from inflight.conformance.judge import Hung

T = TypeVar("T")

SLACK_S = 2.5
"""By how much a call may exceed its timeout on a busy machine."""


@dataclass(frozen=True, slots=True)
class Ending(Generic[T]):
    """How a call ended: with ``value`` or ``error``, and after how many seconds."""

    seconds: float
    value: T | None = None
    error: BaseException | None = None

    @property
    def words(self) -> str:
        if self.error is None:
            return f"returned after {self.seconds:.2f} s"
        return f"{type(self.error).__name__} after {self.seconds:.2f} s: {self.error}"


class PendingCall(Generic[T]):
    """A call that was started. ``what`` describes the call, as in "the sender's join"."""

    def __init__(self, call: Callable[[], T], what: str) -> None:
        self.what = what
        self._call = call
        self._started = time.monotonic()
        self._ending: Ending[T] | None = None
        self._thread = threading.Thread(target=self._work, name=what, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            value = self._call()
        except BaseException as error:  # passed to the thread that waits, whatever it is
            self._ending = Ending(time.monotonic() - self._started, error=error)
        else:
            self._ending = Ending(time.monotonic() - self._started, value=value)

    @property
    def seconds(self) -> float:
        """How long ago the call was started."""
        return time.monotonic() - self._started

    def has_ended(self, within_s: float = 0.0) -> bool:
        self._thread.join(within_s)
        return self._ending is not None

    def ending(self, within_s: float) -> Ending[T]:
        """Return how the call ended. Raises `Hung` if it does not end within this time."""
        self._thread.join(within_s)
        if self._ending is None:
            raise Hung(f"{self.what} did not end: it has been running for {self.seconds:.1f} s", self._stack())
        return self._ending

    def result(self, within_s: float) -> T:
        """Return what the call returned, or raise what it raised. Also raises `Hung`."""
        ending = self.ending(within_s)
        if ending.error is not None:
            raise ending.error
        return ending.value  # type: ignore[return-value]

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return f"--- {self.what}\n" + "".join(traceback.format_stack(frame) if frame else [])


def results(calls: Sequence[PendingCall[Any]], within_s: float) -> list[Any]:
    """Return the results of these calls, or immediately raise the error of the first one to fail. Raises `Hung`."""
    deadline = time.monotonic() + within_s
    while not all(call.has_ended() for call in calls) and time.monotonic() < deadline:
        for call in calls:
            if call.has_ended(0.002):
                call.result(0.0)
    return [call.result(0.0) for call in calls]
