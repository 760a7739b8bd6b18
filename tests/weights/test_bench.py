"""The command that measures how weights travel on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.cli import main

pytestmark = pytest.mark.usefixtures("forks")


def test_bench_measures_the_transports_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    words = ["--sizes", "4MB", "--transports", "gloo,shm+delta", "--rounds", "1", "--requests", "1"]
    assert main(["bench", "weights", *words, "--directory", str(tmp_path), "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())
    assert [row["transport"] for row in rows] == ["gloo", "shm+delta"]
    assert all(row["size_bytes"] > 3_000_000 for row in rows)
    assert "\ngloo " in capsys.readouterr().out
