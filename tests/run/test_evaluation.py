"""The evaluation of a run: the same problems before the first step and after the last one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.cli import main
from tests.run.runs import CONFIG, RunProcess

WORDS = ("--evaluation.num_items", "5", "--evaluation.num_shown", "2")


def answers(run: RunProcess) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.directory / "evaluation.jsonl").read_text().splitlines()]


def test_the_same_problems_are_answered_before_and_after_and_shown_side_by_side(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run(*WORDS)
    assert run.wait() == 0, run.output()
    found = answers(run)
    assert [it["version"] for it in found] == [0] * 5 + [6] * 5
    assert [it["item"] for it in found[:5]] == [it["item"] for it in found[5:]]
    assert min(int(str(it["item"])) for it in found) > 10**8
    summary = run.summary()["evaluation"]
    before, after = (sum(float(str(it["reward"])) for it in part) / 5 for part in (found[:5], found[5:]))
    assert summary == pytest.approx({"0": before, "6": after})
    assert re.search(rf"mean reward {before:.3f} \(version 0\) -> {after:.3f} \(version 6\)", run.output())
    assert run.output().count("problem: ") == 2


def test_a_resumed_run_keeps_the_answers_of_its_beginning(
    start_run: Callable[..., RunProcess],
) -> None:
    assert start_run(*WORDS, "--run.num_steps", "3").wait() == 0
    resumed = start_run(*WORDS, "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert [it["version"] for it in answers(resumed)] == [0] * 5 + [3] * 5 + [6] * 5
    assert "(version 0) ->" in resumed.output()


def test_an_evaluation_that_fails_is_shown_and_the_run_trains(
    start_run: Callable[..., RunProcess],
) -> None:
    run = start_run(*WORDS, "--task.params", "{ fail_from = 1000 }")
    assert run.wait() == 0, run.output()
    assert "5 of 5 problems of the evaluation failed; the first: the reward of task 'count_letters'" in run.output()
    assert run.summary()["evaluation"] == {}
    assert len(run.rows()) == 6


def test_an_evaluation_of_an_environment_is_refused(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    words = ["--task.name", "tests.environments.places:three_turns", "--evaluation.num_items", "2"]
    assert main(["train", str(file), "--dry-run", *words]) == 1
    assert "evaluation.num_items is for tasks" in capsys.readouterr().err
