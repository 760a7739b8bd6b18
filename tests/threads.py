"""What other threads of a test are doing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FunctionType

from tests.gates import SOON_S


def wait_for_call(thread: threading.Thread, function: Callable[..., object], timeout_s: float = SOON_S) -> None:
    """Wait until a call of this function is under way in a thread."""
    assert isinstance(function, FunctionType)
    deadline = time.monotonic() + timeout_s
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None:
            if frame.f_code is function.__code__:
                return
            frame = frame.f_back
        assert time.monotonic() < deadline, f"{thread.name} does not call {function.__name__}"
        time.sleep(0.005)
