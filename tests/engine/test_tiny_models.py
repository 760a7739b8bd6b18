"""Tiny models for tasks of any length: bounded demonstrations, bounded steps, and a word now and then."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

import inflight.base.progress
from inflight.base.progress import ProgressLines
from inflight.cli import main
from inflight.engines.embedded.tiny import TinyShape, context_of, create_tiny_model, demonstration, warm_start
from inflight.errors import ConfigError
from inflight.rollouts.tasks import load_task
from tests.zygote import python

ROOT = Path(__file__).parents[2]
SMALL = TinyShape(hidden_size=24, num_layers=1, num_heads=1, max_model_len=1024)
LONG_TASKS = ("word_sorting", "number_sorting", "caesar_cipher", "mini_sudoku")


def test_ends_of_a_short_answer_grow_by_one_character() -> None:
    assert demonstration("sun", "grown") == "<think>n un sun</think><answer>sun</answer>"
    assert demonstration("", "grown") == "<think></think><answer></answer>"


@pytest.mark.parametrize("length", [1, 16, 17, 54, 92, 160, 161, 3000])
def test_a_demonstration_is_at_most_a_few_lines_longer_than_its_answer(length: int) -> None:
    answer = "".join(chr(ord("a") + i % 26) for i in range(length))
    text = demonstration(answer, "grown")
    assert text.endswith(f"</think><answer>{answer}</answer>")
    assert len(text) <= len(answer) + 192
    ends = text.removeprefix("<think>").partition("</think>")[0].split()
    assert all(answer.endswith(end) for end in ends)
    assert [len(end) for end in ends] == sorted({len(end) for end in ends})
    assert length > 16 or len(ends) == length


@pytest.mark.parametrize("name", LONG_TASKS)
def test_a_step_on_long_problems_is_no_larger_than_one_on_short_ones(name: str) -> None:
    sizes: list[torch.Size] = []
    model = create_tiny_model(SMALL, seed=0)
    model.base_model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    seen: list[int] = []
    warm_start(model, load_task(name, {}, 0), num_steps=6, seed=0, on_progress=lambda step, loss: seen.append(step))
    assert seen == [1, 2, 3, 4, 5, 6]
    assert all(rows * length <= 3072 and length <= 1024 for rows, length in sizes)
    assert max(rows for rows, _ in sizes) > 1


def test_the_context_is_large_enough_for_the_task_and_no_larger_than_it_was_for_a_short_one() -> None:
    assert context_of(load_task("spell_backward", {}, 0), "grown") == 512
    assert context_of(load_task("word_sorting", {}, 0), "grown") == 1024


def test_problems_that_do_not_fit_into_the_context_are_refused_with_both_numbers() -> None:
    model = create_tiny_model(TinyShape(hidden_size=24, num_layers=1, num_heads=1, max_model_len=128), seed=0)
    with pytest.raises(ConfigError, match=r"of the first \d+ problems of word_sorting do not fit into 128 tokens"):
        warm_start(model, load_task("word_sorting", {}, 0), num_steps=6, seed=0)


def test_lines_come_every_few_seconds_with_the_time_that_is_left() -> None:
    now, said = 0.0, list[str]()
    lines = ProgressLines("steps", 1000, said.append, clock=lambda: now)
    for step in range(1, 1001):
        now += 0.125
        lines.update(step, "loss 1.5")
    assert len(said) == 25
    assert said[0] == "steps: 40 of 1,000 in 5 s, about 120 s left, loss 1.5"
    assert said[-1] == "steps: 1,000 of 1,000 in 125 s, loss 1.5"


def test_a_warm_start_prints_lines_where_nobody_looks_at_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inflight.base.progress, "LINE_EVERY_S", 0.0)
    small = ["--steps", "4", "--hidden-size", "24", "--layers", "1", "--heads", "1"]
    assert main(["tiny-model", str(tmp_path / "model"), "--task", "word_sorting", *small]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "inflight: warm start on word_sorting, 4 steps, a context of 1,024 tokens"
    assert [line.split(" in ")[0] for line in said[1:-1]] == [f"inflight: steps: {i} of 4" for i in (1, 2, 3, 4)]
    assert "s left, loss" in said[1]
    assert said[-1].startswith("inflight: wrote ")


def test_lines_of_a_warm_start_are_not_held_back_by_a_pipe(tmp_path: Path) -> None:
    small = ["--steps", "100000", "--hidden-size", "24", "--layers", "1", "--heads", "1", "--task", "word_sorting"]
    command = [python(), "-m", "inflight", "tiny-model", str(tmp_path / "model"), *small]
    (tmp_path / "sitecustomize.py").write_text(  # lines are further apart, and the process computes until the second
        "from inflight.base import progress\nprogress.LINE_EVERY_S = 0.2\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT)))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert (
                process.stdout.readline()
                == "inflight: warm start on word_sorting, 100,000 steps, a context of 1,024 tokens\n"
            )
            line = process.stdout.readline()
            assert line.startswith("inflight: steps: ")
            assert " s left, loss " in line
        finally:
            process.kill()
