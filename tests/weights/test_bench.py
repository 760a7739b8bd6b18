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


def test_bench_publishes_a_checkpoint_that_is_given(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, words = tmp_path / "figures.json", ["--transports", "shm", "--rounds", "1", "--requests", "1"]
    assert main(["bench", "weights", "--model", str(model_dir), *words, "--json", str(figures)]) == 0
    (row,) = json.loads(figures.read_text())
    assert row["size_bytes"] == row["sent_bytes"] <= (model_dir / "model.safetensors").stat().st_size
    assert row["grown_bytes"] >= row["size_bytes"]  # memory that it shares with the server is counted
    assert "memory" in capsys.readouterr().out
    assert main(["bench", "weights", "--model", str(tmp_path / "nowhere"), *words]) == 1
    assert f"{tmp_path / 'nowhere'} has no model that can be loaded" in capsys.readouterr().err


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
