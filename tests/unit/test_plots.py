"""The plots of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from inflight.run.record import plots


@pytest.mark.parametrize(("num_running_at_the_update", "middle"), [(4, 20.0), (0, 50.0)])
def test_the_timeline_is_centred_on_an_update_that_met_running_groups(
    num_running_at_the_update: int, middle: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = [
        {"kind": "running_groups", "start_s": 1.0, "end_s": 1.0, "num_groups": num_running_at_the_update},
        {"kind": "train", "start_s": 8.0, "end_s": 10.0},
        {"kind": "publish", "start_s": 19.0, "end_s": 20.0},
        {"kind": "running_groups", "start_s": 40.0, "end_s": 40.0, "num_groups": 0},
        {"kind": "train", "start_s": 48.0, "end_s": 50.0},
        {"kind": "publish", "start_s": 59.0, "end_s": 60.0},
        {"kind": "train", "start_s": 88.0, "end_s": 90.0},
    ]

    def read(_: Path, kinds: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        return (event for event in events if kinds is None or event["kind"] in kinds)

    monkeypatch.setattr(plots, "read_events", read)
    low, high = plots._draw_timeline(tmp_path).axes[1].get_xlim()
    assert (low + high) / 2 == pytest.approx(middle)
