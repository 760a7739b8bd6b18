"""A certificate takes minutes, and says all the while what it does, also where nobody sees a terminal."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from inflight.conformance.endpoint.catalogue import CHECKS
from inflight.conformance.report import terminal


def test_a_check_that_takes_long_is_named_off_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", 0.1)
    output = io.StringIO()
    with terminal.progress(Console(file=output, width=200), CHECKS[:2]):
        deadline = time.monotonic() + 20.0
        while not output.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert re.search(rf"running for \d s: 1 of 2  {CHECKS[0].id} ", output.getvalue())


def test_nothing_is_said_once_all_checks_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", 0.0)
    output = io.StringIO()
    with terminal.progress(Console(file=output, width=200), ()):
        time.sleep(1.2)
    assert not output.getvalue()
