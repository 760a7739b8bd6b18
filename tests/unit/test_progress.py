"""What a run prints while it continues."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from inflight.run.record import console
from inflight.run.record.console import Progress


def test_what_is_waited_for_is_said_after_a_silence_and_with_its_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
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


def test_a_line_is_never_broken(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(6).note("one line, " * 30 + "however long")
    assert capsys.readouterr().out == "inflight: " + "one line, " * 30 + "however long\n"


def test_the_line_of_a_step_says_how_much_of_the_drafts_was_accepted_where_there_are_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {
        **{"version": 6, "reward": 0.5, "lag_mean": 1.0, "lag_max": 2, "paused_share": 0.01, "time_s": 3.0},
        **{"completion_tokens_per_s": 10.0, "trained_tokens_per_s": 9.0, "completion_length": 40.0},
    }
    for accepted, is_said in ((None, False), (3.14, True)):
        Progress(6).step(row | {"accepted_per_verification": accepted})
        assert ("accepted 3.1 tokens per draft" in capsys.readouterr().out) == is_said


def test_a_step_without_finished_groups_shows_no_reward(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        **{"lag_mean": 1.0, "lag_max": 2, "paused_share": 0.01, "time_s": 3.0, "accepted_per_verification": None},
        **{"completion_tokens_per_s": 10.0, "trained_tokens_per_s": 9.0, "completion_length": None},
    }
    shown = Progress(2)
    shown.step(row | {"version": 1, "reward": 0.25})
    shown.step(row | {"version": 2, "reward": None})
    first, second = capsys.readouterr().out.splitlines()
    assert "reward 0.250" in first
    assert "reward -" in second


def test_a_line_shows_the_mean_of_the_steps_since_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        **{"lag_mean": 1.0, "lag_max": 2, "paused_share": 0.01, "time_s": 3.0, "accepted_per_verification": None},
        **{"completion_tokens_per_s": 10.0, "trained_tokens_per_s": 9.0},
    }
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    shown = Progress(9)
    for version, (reward, length) in enumerate(((0.5, 10.0), (0.25, 20.0), (0.75, 40.0), (None, None)), 1):
        shown.step(row | {"version": version, "reward": reward, "completion_length": length})
        now += 2.0
    now += 9.0
    shown.step(row | {"version": 5, "reward": None, "completion_length": None})
    first, second, third = capsys.readouterr().out.splitlines()
    assert "reward 0.500" in first
    assert "step 4/9  reward 0.500" in second
    assert "length 30" in second
    assert "reward -" in third


@pytest.mark.parametrize(
    ("paused_share", "shown"), [(0.0011, "paused 0.11 %"), (0.0, "paused 0.00 %"), (None, "paused -")]
)
def test_a_pause_that_no_server_reports_is_not_shown_as_none(
    paused_share: float | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        **{"version": 1, "reward": 0.5, "lag_mean": 1.0, "lag_max": 2, "paused_share": paused_share, "time_s": 3.0},
        **{"completion_tokens_per_s": 10.0, "trained_tokens_per_s": 9.0, "completion_length": 40.0},
    }
    Progress(6).step(row | {"accepted_per_verification": None})
    assert f"  {shown}  " in capsys.readouterr().out
    summary = {
        **{"version": 6, "first_reward": 0.1, "last_reward": 0.5, "num_steps_per_reward": 1, "elapsed_s": 3.0},
        **{"num_samples": 9, "trained_tokens_per_s": 9.0, "share_with_two_or_more_versions": 0.5},
        **{"ledger": {"dropped": {}}, "paused_share": paused_share},
    }
    Progress(6).summary(summary, Path("runs/one"))
    assert ("servers were paused" in capsys.readouterr().out) == (paused_share is not None)
