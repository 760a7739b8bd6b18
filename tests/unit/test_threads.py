"""Event loops in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from inflight.base.threads import start_portal


@pytest.mark.timeout(20)
def test_a_loop_that_does_not_start_raises_its_error_instead_of_keeping_its_caller_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(call: Callable[[], Any]) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(anyio, "run", fails)
    with pytest.raises(OSError, match="too many open files"):
        start_portal("test")


def test_the_thread_of_a_portal_ends_once_it_is_stopped() -> None:
    portal, thread = start_portal("test")
    assert portal.call(lambda: "answer") == "answer"
    portal.call(portal.stop)
    thread.join(10.0)
    assert not thread.is_alive()
