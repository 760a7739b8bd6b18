"""The configuration of a run: overrides, and errors that name the key, the value and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from inflight.contracts import Task
from inflight.errors import ConfigError, TaskError
from inflight.losses import PRESETS, Kl, PolicyLoss, Score
from inflight.rollouts import load_task
from inflight.rollouts.tasks import AnswerFormat
from inflight.run.config import RunConfig, load_config

ROOT = Path(__file__).parents[2]
MINIMAL = '[run]\ndirectory = "runs/x"\n[model]\npath = "models/x"\n[task]\nname = "spell_backward"\n'


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_every_kind_of_value_can_be_overridden(config_file: Path) -> None:
    overrides = """
        --train.learning_rate|3e-5|--run.mode=conventional|--servers.attach.urls|["http://a", "http://b"]
        |--task.params|{ max_word_len = 5 }|--train.train_on_equal_rewards|true
    """
    config = load_config(config_file, [word.strip() for word in overrides.split("|")])
    assert config.train.learning_rate == 3e-5
    assert config.run.mode == "conventional"
    assert config.servers.attach.urls == ("http://a", "http://b")
    assert config.task.params == {"max_word_len": 5}
    assert config.train.train_on_equal_rewards


def test_a_loss_may_be_put_together_in_the_configuration(config_file: Path) -> None:
    pieces = '{ gate = { kind = "score", high = 2.0 }, penalties = [{ kind = "kl", coefficient = 0.1 }] }'
    loss = load_config(config_file, ["--loss.policy", pieces]).loss
    assert loss.policy_loss() == PolicyLoss(gate=Score(high=2.0), penalties=(Kl(coefficient=0.1),))
    assert loss.estimator() == "leave_one_out"
    loss = load_config(config_file, ["--loss.policy", pieces, "--loss.reference_kl", "0.3"]).loss
    assert loss.policy_loss().penalties == (Kl(coefficient=0.3),)
    loss = load_config(config_file, ["--loss.preset", "scalerl"]).loss
    assert (loss.policy_loss(), loss.estimator()) == (PRESETS["scalerl"].loss, "batch_std")


def test_an_entropy_bonus_is_refused_in_a_run(config_file: Path) -> None:
    pieces = '{ gate = { kind = "score" }, penalties = [{ kind = "entropy", coefficient = 0.1 }] }'
    with pytest.raises(ConfigError, match="but no worker computes entropies"):
        load_config(config_file, ["--loss.policy", pieces]).loss.policy_loss()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--train.learning_rat", "1"], "unknown key 'train.learning_rat'; did you mean train.learning_rate?"),
        (["--trian.learning_rate", "1"], "unknown key 'trian'; did you mean train?"),
        (["--sampling.group_size", "1"], "sampling.group_size: Input should be greater than or equal to 2 (got 1)"),
        (
            ["--sampling.group_size", "1025"],
            "sampling.group_size: Input should be less than or equal to 1024 (got 1025)",
        ),
        (
            ["--sampling.temperature", "101"],
            "sampling.temperature: Input should be less than or equal to 100 (got 101)",
        ),
        (["--run.mode", "asynchronous"], "run.mode: Input should be 'pipeline' or 'conventional' (got 'asynchronous')"),
        (["--train.learning_rate", "fast"], "(got 'fast')"),
        (["--train.learning_rate"], "override --train.learning_rate has no value"),
        (["learning_rate=1"], "is not an override; write --section.field value"),
        (["--run.directory.name", "x"], "'directory' is a value, not a section"),
        (["--servers.transport", "shm"], "unknown key 'servers.transport'; did you mean updates.transport?"),
        (["--servers.join", "a:1"], "unknown key 'servers.join'; did you mean servers.attach.join?"),
        (["--updates.transport", "pigeon"], "updates.transport: unknown transport 'pigeon'; known: file, gloo, http"),
        (["--servers.max_concurrent", "4"], "a whole group could never run at the same time"),
        (
            ["--servers.drafts", "history", "--servers.compile", "true"],
            "servers.drafts and servers.compile cannot be combined",
        ),
        (["--run.mode", "conventional", "--run.conventional_steps", "16"], "rollouts.max_lag 8 masks them"),
        (
            ["--loss.preset", "dapo", "--loss.policy", '{ gate = { kind = "score" } }'],
            "both preset ('dapo') and policy are set",
        ),
        (["--task", "word_sorting"], "task: this is a group of keys, not one value; its keys: prompt_template, "),
        (["--loss.policy", '{ gate = { kind = "scroe" } }'], "loss.policy.gate: Input tag 'scroe'"),
        (["--train.trainer_options", '{ device = "cpu" }'], "trainer_options.device is a setting of [train]"),
    ],
)
def test_wrong_overrides_are_named_with_what_to_write_instead(
    config_file: Path, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(config_file, overrides)
    assert expected in str(refused.value)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(broken)
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    with pytest.raises(ConfigError, match="key 'run' is missing; key 'model' is missing; key 'task' is missing"):
        load_config(empty)


def test_reasoning_gym_tasks_are_deterministic_and_score_their_own_answers() -> None:
    task, again = (
        load_task("spell_backward", {"max_word_len": 5}, 3),
        load_task("spell_backward", {"max_word_len": 5}, 3),
    )
    for index in (0, 7, 1_000_000_000):
        item = task.item(index)
        assert item.prompt == again.item(index).prompt
        assert item.answer is not None
        assert task.score(item, item.answer) == 1.0
        assert task.score(item, f"<think>hm</think><answer>{item.answer}</answer>") == 1.0
        assert task.score(item, "<answer></answer>") == 0.0
    assert load_task("spell_backward", {}, 4).item(0).prompt != load_task("spell_backward", {}, 5).item(0).prompt


def test_an_answer_format_inserts_the_problem_and_reads_the_last_answer() -> None:
    answer_format = AnswerFormat(
        prompt_template="Think. {question} End with Answer: {word}.", answer_pattern=r"Answer: ?(\w+)"
    )
    plain = load_task("spell_backward", {"max_word_len": 5}, 3)
    task = load_task("spell_backward", {"max_word_len": 5}, 3, answer_format)
    item = task.item(4)
    assert item.prompt == f"Think. {plain.item(4).prompt} End with Answer: {{word}}."
    assert item.answer == plain.item(4).answer
    assert isinstance(task, Task)
    assert task.score(item, f"Answer: no, or\nAnswer: {item.answer}") == 1.0
    assert task.score(item, f"{item.answer}") == 0.0
    assert task.score(item, f"Answer: {item.answer} Answer: no") == plain.score(plain.item(4), "no") < 1.0
    whole = load_task("spell_backward", {"max_word_len": 5}, 3, AnswerFormat(answer_pattern=r"\w+$"))
    assert isinstance(whole, Task)
    assert whole.score(item, f"It is {item.answer}") == 1.0


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("prompt_template", "Answer it.", "does not contain {question}"),
        ("answer_pattern", "(", "is not a regular expression"),
        ("answer_pattern", "(a)(b)", "has 2 groups, but only one answer is read"),
    ],
)
def test_an_answer_format_that_cannot_work_is_refused(setting: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(ROOT / "examples/quickstart.toml", [f"--task.{setting}", value])


def test_unknown_tasks_and_parameters_are_named_with_the_nearest_known() -> None:
    with pytest.raises(
        TaskError, match=r"unknown task 'spel_backward'; nearest reasoning-gym datasets: spell_backward"
    ):
        load_task("spel_backward", {}, 0)
    with pytest.raises(TaskError, match="rejects its parameters"):
        load_task("spell_backward", {"word_size": 3}, 0)
    with pytest.raises(TaskError, match="'nowhere:task' cannot be imported"):
        load_task("nowhere:task", {}, 0)
    with pytest.raises(TaskError, match="not a Task or Environment: it needs item, name, score, or item, name, play"):
        load_task("builtins:dict", {}, 0)


def numeric_settings(kind: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every setting that may be a number and can be set alone, in sections of any depth."""
    for name, field in kind.model_fields.items():
        parts = {field.annotation, *get_args(field.annotation)}
        if parts & {int, float}:
            yield (*path, name)
        sections = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        if len(sections) == 1 and get_origin(field.annotation) is not tuple and name != "policy":
            yield from numeric_settings(sections[0], (*path, name))


NUMBERS = [".".join(path) for path in numeric_settings(RunConfig)]


def test_the_settings_that_are_numbers_are_found() -> None:
    assert {"train.learning_rate", "run.num_steps", "sampling.temperature", "train.lora.alpha"} <= {*NUMBERS}
    assert len(NUMBERS) > 40


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", ["1e308", "inf", "nan", "99999999999999999999", "-99999999999999999999"])
def test_a_number_that_no_run_can_use_is_refused_by_name(config_file: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{key}: ")):
        load_config(config_file, [f"--{key}", value])


def test_a_temperature_that_no_trainer_can_use_is_refused(config_file: Path) -> None:
    for value in ("1e-300", "101"):
        with pytest.raises(ConfigError, match=r"sampling\.temperature: Input should be"):
            load_config(config_file, ["--sampling.temperature", value])


def test_a_duration_that_no_message_can_carry_is_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="episode_timeout_s: Input should be at most 604800 seconds, a week"):
        load_config(config_file, ["--task.episode_timeout_s", "604801"])
