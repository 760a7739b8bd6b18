"""Every kind of run is recorded, and trained again to the same bits."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from inflight.cli import main
from inflight.observe.trace.digests import weights_digest
from inflight.observe.trace.records import read_manifest, read_steps
from inflight.types import Sample
from tests.models import make_model
from tests.pictures import make_image_model
from tests.run.runs import RunProcess
from tests.run.test_lora import LORA
from tests.run.test_router_replay import make_mixture
from tests.servers import TOKEN, ServerProcess

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forks")]

NUM_STEPS = 3
TURNS = ("--task.name", "tests.environments.places:three_turns", "--sampling.max_tokens", "12")
PICTURES = ("--task.name", "tests.replay.parts:Pictures", "--sampling.max_tokens", "8")


@dataclass(frozen=True)
class Kind:
    """A kind of run, by what it sets."""

    name: str
    words: tuple[str, ...]
    has: Callable[[Sample], bool] = lambda sample: True
    """What every sample must have, or the case means nothing."""
    model: Callable[[Path], Path] = make_model
    resumed_with: tuple[str, ...] | None = None
    """Killed in its second or third step, and continued with this as well; None: it runs through."""
    is_long: bool = False


def composer(name: str, **params: object) -> tuple[str, ...]:
    return ("--rollouts.composer", name, "--rollouts.composer_params", toml(params))


def options(**values: object) -> tuple[str, ...]:
    return ("--train.trainer_options", toml(values))


def toml(values: dict[str, object]) -> str:
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + " }"


def _image_model(path: Path) -> Path:
    return make_image_model(path, max_model_len=512)


KINDS = (
    # What carries more than tokens into a step.
    Kind("images", PICTURES, has=lambda it: len(it.rollout.images) == 2, model=_image_model),
    Kind("turns_with_credit", (*TURNS, "--rollouts.credit", "turn"), has=lambda it: len(it.rollout.turns) == 3),
    Kind("reference_of_a_lora", (*LORA, "--loss.reference_kl", "0.1")),
    Kind("a_composer_that_makes_rollouts", composer("tests.replay.parts:Remade")),
    Kind("resumed_with_other_settings", (), resumed_with=("--train.learning_rate", "5e-4", "--train.num_ranks", "2")),
    Kind(
        "router_replay_on_two_ranks",
        ("--train.router_replay", "true", "--train.num_ranks", "2"),
        has=lambda it: it.rollout.routed_experts is not None,
        model=make_mixture,
    ),
    Kind("resumed_lora_with_dropout", (*LORA, "--train.lora.dropout", "0.1"), resumed_with=(), is_long=True),
    Kind("turns", TURNS, is_long=True),
    Kind("turns_with_returns", (*TURNS, "--rollouts.credit", "return", "--rollouts.discount", "0.9"), is_long=True),
    Kind("resumed_critic", (*TURNS, "--rollouts.credit", "critic"), resumed_with=(), is_long=True),
    # Losses that need more than the trainer's own logprobs, and composers.
    Kind("reference_in_a_preset", ("--loss.preset", "deepseek_v32"), is_long=True),
    Kind("first_forward", ("--loss.preset", "m2po"), is_long=True),
    Kind("many_micro_batches", ("--loss.preset", "a3po", "--train.max_tokens_per_micro_batch", "128"), is_long=True),
    Kind("constant_tokens", composer("constant_tokens"), is_long=True),
    Kind("resumed_shuffled_pairs", composer("shuffled_pairs", keep=0.5), resumed_with=(), is_long=True),
    Kind("solvable_only", composer("solvable_only", success=0.01), is_long=True),
    Kind("equal_rewards", ("--train.train_on_equal_rewards", "true", "--sampling.group_size", "2"), is_long=True),
    Kind("temperature", ("--sampling.temperature", "0.7"), has=lambda it: it.rollout.temperature == 0.7, is_long=True),
    # Ways to run.
    Kind("resumed_on_three_ranks", ("--train.num_ranks", "3", "--loss.preset", "dapo"), resumed_with=(), is_long=True),
    Kind("context_parallel", ("--train.num_ranks", "2", *options(context_parallel=2)), is_long=True),
    Kind("no_lag", ("--rollouts.max_lag", "0"), is_long=True),
    Kind("conventional", ("--run.mode", "conventional", "--run.conventional_steps", "2"), is_long=True),
    Kind("two_servers", ("--servers.count", "2", "--rollouts.scheduler", "over_provision"), is_long=True),
    Kind("bfloat16", ("--model.dtype", "bfloat16"), is_long=True),
    Kind(
        "resumed_bfloat16_masters",
        ("--model.dtype", "bfloat16", "--train.master_dtype", "bfloat16"),
        resumed_with=(),
        is_long=True,
    ),
    Kind(
        "resumed_schedule", ("--train.schedule", "cosine", "--train.warmup_steps", "1"), resumed_with=(), is_long=True
    ),
    Kind("background_saves", ("--run.background_saves", "true"), is_long=True),
    Kind("resumed_torchtitan", ("--train.trainer", "torchtitan"), resumed_with=(), is_long=True),
)


@pytest.mark.parametrize(
    "kind", [pytest.param(it, id=it.name, marks=[pytest.mark.exhaustive] if it.is_long else []) for it in KINDS]
)
def test_a_run_is_trained_again_to_the_same_bits(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(kind, tmp_path)
    assert all(kind.has(sample) for step in read_steps(run.directory / "record") for sample in step.samples)
    file, again = tmp_path / "replay.json", tmp_path / "again"
    status = main(["replay", str(run.directory), "--to", str(again), "--json", str(file)])
    told, report = capsys.readouterr().out, json.loads(file.read_text())
    assert len(report["steps"]) == NUM_STEPS
    for step in report["steps"]:
        assert step["gradient_norm"] == step["recorded_gradient_norm"] > 0, told
        assert step["logprobs"]["num_equal"] == step["logprobs"]["num_targets"] > 0, told
        assert not step["figures"], told
    final = run.directory / "checkpoints" / f"version-{NUM_STEPS:06}"
    assert weights_digest(again / "weights") == weights_digest(final), told
    assert (status, report["is_bit_equal"]) == (0, True)


def recorded_run(kind: Kind, directory: Path) -> RunProcess:
    model = kind.model(directory / "model")
    often = () if kind.resumed_with is None else ("--run.checkpoint_every_steps", "1")
    words = ("--run.record", "true", "--run.num_steps", str(NUM_STEPS), *often, *kind.words)
    run = RunProcess(directory, model, *words)
    if kind.resumed_with is not None:
        run.wait_until((run.directory / "record" / "step-000002.safetensors").exists)
        os.kill(run.processes()["controller"], signal.SIGKILL)
        run.wait()
        run = RunProcess(directory, model, *words, *kind.resumed_with, "--resume")
    assert run.wait() == 0, run.output()
    incarnations = read_manifest(run.directory / "record").earlier
    assert len(incarnations) == (kind.resumed_with is not None), "the case means nothing"
    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Kind("lora", (*LORA, "--sampling.temperature", "0.7")), " 0 diverge from them"),
        (Kind("router_replay", ("--train.router_replay", "true"), model=make_mixture), " 0 diverge from them"),
        (Kind("resumed_at_another_temperature", (), resumed_with=("--sampling.temperature", "0.5")), " 0 diverge from"),
        (Kind("images", PICTURES, model=_image_model), "which excludes turns of environments"),
        (Kind("turns", TURNS), "completions scored: logprobs of their"),
    ],
    ids=lambda it: it.name if isinstance(it, Kind) else "",
)
def test_what_a_run_sampled_is_sampled_again_or_refused(
    kind: Kind, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(kind, tmp_path)
    server = ServerProcess(tmp_path / "model", tmp_path / "server")
    try:
        server.wait_until_ready()
        status = main(["replay", str(run.directory), "--engine", server.url, "--groups", "4"])
        captured = capsys.readouterr()
        assert says in captured.out + captured.err
        assert status == int("environments" in says)
    finally:
        server.kill()


@pytest.mark.exhaustive
def test_a_server_that_another_run_has_updated_is_refused(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerProcess(model_dir, tmp_path / "server")
    try:
        server.wait_until_ready()
        words = ("--run.record", "true", "--run.num_steps", "3", "--servers.attach.urls", f'["{server.url}"]')
        run = RunProcess(tmp_path, model_dir, *words, environment={"INFLIGHT_TOKEN": TOKEN})
        assert run.wait() == 0, run.output()
        assert main(["replay", str(run.directory), "--engine", server.url, "--groups", "2"]) == 1
        assert "serves version 3, which a run published to it" in capsys.readouterr().err
    finally:
        server.kill()
