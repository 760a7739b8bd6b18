"""A plan whose figures are short live runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.cli import main
from tests.run.runs import CONFIG


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_machine_measures_its_configurations_and_writes_the_fastest(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plan, figures = tmp_path / "run.toml", tmp_path / "plan.toml", tmp_path / "figures.json"
    source.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    plan.write_text('[search]\nmode = ["pipeline"]\nmax_lag = [2]\nmax_concurrent = [8, 32]\nnum_steps = 6\n')
    words = ["plan", str(plan), "--measure", str(source), "--json", str(figures), "--apply", str(source)]
    assert main(words) == 0, capsys.readouterr().err
    rows = json.loads(figures.read_text())
    assert [row["max_concurrent"] for row in rows] == [8, 32]
    assert all(row["tokens_per_s"] > 0 and 0 < row["slots_held"] <= 1 for row in rows)
    assert not (tmp_path / "run").exists()
    fastest = max(rows, key=lambda row: row["tokens_per_s"])
    assert f"max_concurrent = {fastest['max_concurrent']}\n" in (tmp_path / "run.planned.toml").read_text()


def test_measurements_are_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measure", str(tmp_path / "run.toml"), "--from", str(tmp_path)]) == 1
    assert "omit --from" in capsys.readouterr().err
