"""What a run says while it goes on, where its output is no terminal."""

from __future__ import annotations

import time

import pytest

from inflight.pipeline import progress
from inflight.pipeline.progress import Progress


def test_what_is_waited_for_is_said_after_a_silence_and_with_its_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = Progress(6)
    for _ in range(25):
        now += 1.0
        shown.waiting("step 1/6: 8 groups are running")
    assert capsys.readouterr().out.splitlines() == [
        "inflight: step 1/6: 8 groups are running (11 s)",
        "inflight: step 1/6: 8 groups are running (22 s)",
    ]
    shown.note("a server was started again")
    now += 9.0
    shown.waiting("step 1/6: 8 groups are running")
    assert capsys.readouterr().out == "inflight: a server was started again\n"


def test_a_line_is_never_broken_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(6).note("one line, " * 30 + "however long")
    assert capsys.readouterr().out == "inflight: " + "one line, " * 30 + "however long\n"
