"""Defaults that depend on the size of the model, and settings that take precedence over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.run.config import RunConfig
from inflight.run.model_defaults import with_model_defaults


def config_of(train: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"directory": "run", "num_steps": 1},
            "model": {"path": str(Path("model"))},
            "task": {"name": "chain_sum"},
            "train": train,
        }
    )


@pytest.mark.parametrize(
    ("num_parameters", "size", "learning_rate", "warmup_steps"),
    [
        (3_000_000, "3 million", 1e-4, 0),
        (134_515_008, "135 million", 3e-5, 2),
        (7_000_000_000, "7.0 billion", 1e-6, 5),
    ],
)
def test_larger_models_learn_more_slowly_and_warm_up(
    num_parameters: int, size: str, learning_rate: float, warmup_steps: int
) -> None:
    config, notes = with_model_defaults(config_of({}), num_parameters)
    assert (config.train.learning_rate, config.train.warmup_steps) == (learning_rate, warmup_steps)
    assert all(f"{size} parameters" in note for note in notes) and notes


def test_what_is_configured_stays_and_is_not_noted() -> None:
    config, notes = with_model_defaults(config_of({"learning_rate": 5e-6, "warmup_steps": 0}), 134_515_008)
    assert (config.train.learning_rate, config.train.warmup_steps) == (5e-6, 0)
    assert notes == ()


def test_a_configuration_that_a_run_has_written_keeps_its_values() -> None:
    begun, _ = with_model_defaults(config_of({}), 134_515_008)
    resumed, notes = with_model_defaults(RunConfig.model_validate_json(begun.model_dump_json()), 7_000_000_000)
    assert resumed.train == begun.train and notes == ()


def test_loras_learn_ten_times_as_fast() -> None:
    lora = {"rank": 4, "alpha": 8.0, "targets": "all-linear"}
    config, _ = with_model_defaults(config_of({"lora": lora}), 134_515_008)
    assert config.train.learning_rate == pytest.approx(3e-4)


def test_ranks_of_models_worth_it_use_the_cores_that_they_have() -> None:
    large, notes = with_model_defaults(config_of({}), 134_515_008, num_cores=6)
    small, _ = with_model_defaults(config_of({}), 3_000_000, num_cores=6)
    chosen, _ = with_model_defaults(config_of({"threads": 2}), 134_515_008, num_cores=6)
    assert (large.train.threads, small.train.threads, chosen.train.threads) == (6, 1, 2)
    assert any("train.threads = 6" in note for note in notes)
