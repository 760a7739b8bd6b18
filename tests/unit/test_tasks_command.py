"""``inflight tasks``: which tasks a model can learn, in figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.cli import main
from inflight.rollouts.tasks import reasoning_gym_names


def test_tasks_are_sampled_and_listed_with_those_first_that_have_a_signal(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--items", "3", "--group-size", "4", "--max-tokens", "8", "--threads", "1", "--examples"]
    words += ["--json", str(tmp_path / "tasks.json")]
    names = ["nonsense", "spell_backward", "tests.run.tasks:count_letters"]
    assert main(["tasks", "--model", str(model_dir), *names, *words]) == 0
    out, err = capsys.readouterr()
    assert "3/3" in err
    assert "problem: '00000000'" in out
    *sampled, unknown = json.loads((tmp_path / "tasks.json").read_text())
    assert unknown["problem"].startswith("unknown task 'nonsense'")
    assert [line.split()[0] for line in out.splitlines()[1:4]] == [it["name"] for it in (*sampled, unknown)]
    assert sampled[0]["signal_share"] >= sampled[1]["signal_share"]
    spelling, letters = sorted(sampled, key=lambda it: it["name"])
    assert 0 < letters["signal_share"] <= 1
    assert letters["num_answer_tokens"] == 8
    assert letters["cut_share"] == 1.0
    assert letters["step_s"] > 0
    assert 0 <= spelling["reward"] < 0.2
    assert letters["num_prompt_tokens"] < spelling["num_prompt_tokens"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--params", "{"], "--params '{' is not JSON"),
        (["--params", "[]"], "--params must be a JSON object"),
        (["--group-size", "1"], "--group-size must be at least 2"),
        (["--prompt-template", "?"], "does not contain {question}"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_the_model_is_read(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "--model", "absent", *words]) == 1
    assert problem in capsys.readouterr().err


def test_all_datasets_are_sampled_where_none_is_named() -> None:
    assert {"chain_sum", "spell_backward", "word_sorting"} <= set(reasoning_gym_names())
