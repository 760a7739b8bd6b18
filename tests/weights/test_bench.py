"""The commands that measure how weights travel on this machine, and how fast a server samples."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from inflight.cli import main
from inflight.planning.plan import GenerationSection
from tests.servers import TOKEN, ServerProcess

pytestmark = pytest.mark.usefixtures("forks")


def test_bench_measures_the_transports_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    words = ["--sizes", "4MB", "--transports", "gloo,shm+delta", "--rounds", "1", "--requests", "1"]
    assert main(["bench", "weights", *words, "--directory", str(tmp_path), "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())
    assert [row["transport"] for row in rows] == ["gloo", "shm+delta"]
    assert all(row["size_bytes"] > 3_000_000 for row in rows)
    assert "\ngloo " in capsys.readouterr().out


def test_bench_measures_the_token_times_that_a_plan_takes(
    shared_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    words = ["--batches", "1,4", "--tokens", "16", "--prompt-tokens", "4", "--rounds", "1"]
    assert main(["bench", "engine", shared_server.url, *words]) == 0
    section = GenerationSection.model_validate(tomllib.loads(capsys.readouterr().out)["generation"])
    assert [size for size, _ in section.token_s] == [1, 4]
    assert section.max_concurrent == 4
    assert main(["bench", "engine", shared_server.url, "--batches", "many"]) == 1
    assert "--batches must be numbers" in capsys.readouterr().err
