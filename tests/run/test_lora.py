"""Runs that train a LoRA: a run and its resumption, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inflight.errors import ConfigError
from inflight.run.config import load_config
from inflight.run.dry_run import planned_update
from inflight.run.preflight import Hosts, Machine, preflight
from inflight.run.servers.checks import needs_of
from inflight.wire import Capabilities
from tests.run.runs import CONFIG, RunProcess
from tests.weights.test_publisher_machine import DECLARED

LORA = ("--train.lora.rank", "4", "--train.lora.alpha", "8", "--train.lora.targets", '["q_proj", "down_proj"]')
MACHINE = Machine(Hosts("127.0.0.1", 0, None, can_outlive=True), devices=lambda: ())


def test_a_run_trains_and_publishes_a_lora_alone(model_dir: Path, tmp_path: Path) -> None:
    run = RunProcess(tmp_path, model_dir, *LORA, "--run.num_steps", "2")
    assert run.wait() == 0, run.output()
    rows, adapter = rows_of(run), adapter_of(run, 2)
    assert [row["publish"]["version"] for row in rows] == [1, 2]
    assert {row["publish"]["sent_bytes"] for row in rows} == {sum(t.nbytes for t in adapter.values())}
    base = load_file(model_dir / "model.safetensors")
    merged = load_file(run.directory / "checkpoints" / "version-000002" / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name].float(), merged[name])}
    assert changed and all("q_proj" in name or "down_proj" in name for name in changed)


@pytest.mark.exhaustive
def test_a_run_resumes_its_lora(model_dir: Path, tmp_path: Path) -> None:
    run = RunProcess(tmp_path, model_dir, *LORA, "--run.num_steps", "2")
    assert run.wait() == 0, run.output()
    before = adapter_of(run, 2)
    resumed = RunProcess(tmp_path, model_dir, *LORA, "--run.num_steps", "3", "--resume")
    assert resumed.wait() == 0, resumed.output()
    assert [row["publish"]["version"] for row in rows_of(run)] == [1, 2, 3]
    after = adapter_of(run, 3)
    assert all(float((after[name] - before[name]).abs().max()) <= 1.1e-3 for name in before)  # one step of AdamW
    assert any(not torch.equal(after[name], before[name]) for name in before)


def rows_of(run: RunProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def adapter_of(run: RunProcess, version: int) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "checkpoints" / f"version-{version:06}" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--train.lora.targets", '["w_q"]'], "is named 'w_q'; their names end with down_proj"),
        (["--train.lora.rank", "0"], r"train\.lora\.rank: Input should be greater than or equal to 1"),
        (["--train.trainer", "torchtitan"], "train.lora needs a trainer that supports LoRA"),
        (["--train.trainer", "deepspeed"], "train.lora needs a trainer that supports LoRA"),
        (["--train.trainer", "json:dumps"], "worker 'json:dumps' is a function, not a WorkerKind"),
        (["--train.trainer_options", "{ lora = { rank = 1 } }"], r"trainer_options\.lora .* write train\.lora instead"),
        (["--train.lora.rang", "3"], r"unknown key 'train\.lora\.rang'; did you mean train\.lora\.rank"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(
    model_dir: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    with pytest.raises(ConfigError, match=says):
        preflight(load_config(file, [*LORA, *words]), MACHINE)
    assert list(tmp_path.iterdir()) == [file]


def test_the_planned_update_is_that_of_the_lora(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    whole, lora = (planned_update(preflight(load_config(file, words), MACHINE)) for words in ((), LORA))
    assert lora.size_bytes < whole.size_bytes / 4


@pytest.mark.parametrize(
    ("declared", "is_refused"), [({"lora": True}, False), ({"partial_updates": True}, False), ({}, True)], ids=str
)
def test_a_server_that_takes_neither_loras_nor_partial_updates_is_refused(
    model_dir: Path, tmp_path: Path, declared: dict[str, Any], is_refused: bool
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(directory=tmp_path / "run", model=model_dir))
    config = load_config(file, LORA)
    bare = {"lora": False, "partial_updates": False, "dtype": config.model.dtype, "transports": ("gloo",)}
    can: Capabilities = DECLARED.model_copy(update={**bare, **declared})
    assert bool(can.missing(needs_of(config, can.vocab_size))) == is_refused
