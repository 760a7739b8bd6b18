"""How long publishes, steps and saves may take: as configured, or grown with the bytes of the model's headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.run.config import load_config
from inflight.run.machines.time_limits import TimeLimits, time_limits
from tests.headers import LLAMA_70B, write_headers

SETTINGS = '[run]\ndirectory = "runs/x"\n[task]\nname = "spell_backward"\n[model]\ndtype = "bfloat16"\npath = '


@pytest.fixture(scope="module")
def run_of_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration for a model of 70 B parameters, whose files hold headers and no tensors."""
    directory = tmp_path_factory.mktemp("large")
    path = directory / "run.toml"
    path.write_text(f'{SETTINGS}"{write_headers(directory / "model", LLAMA_70B)}"\n')
    return path


def test_limits_grow_with_the_bytes_that_have_to_be_moved(run_of_70b: Path) -> None:
    limits = time_limits(load_config(run_of_70b))
    num_parameters = 70_553_706_496
    assert limits.publish_s == 60 + 2 * num_parameters / 0.5e9  # 342 s for 141 GB
    assert limits.step_s == 900 + 2 * num_parameters / 0.5e9
    assert limits.save_s == 900 + 12 * num_parameters / 0.5e9  # parameters and two moments in float32
    assert limits.collective_s == limits.save_s


def test_configured_limits_win(run_of_70b: Path) -> None:
    overrides = ("--updates.deadline_s", "20", "--run.step_timeout_s", "30", "--run.save_timeout_s", "40")
    limits = time_limits(load_config(run_of_70b, overrides))
    assert limits == TimeLimits(publish_s=20.0, step_s=30.0, save_s=40.0)
    assert limits.collective_s == 1800.0


def test_limits_of_a_small_model_are_those_that_they_were(model_dir: Path, run_of_70b: Path) -> None:
    limits = time_limits(load_config(run_of_70b, ("--model.path", str(model_dir))))
    assert (round(limits.publish_s), round(limits.step_s), round(limits.save_s)) == (60, 900, 900)


def test_half_precision_of_the_masters_halves_what_is_saved(run_of_70b: Path) -> None:
    whole = time_limits(load_config(run_of_70b))
    half = time_limits(load_config(run_of_70b, ("--train.master_dtype", "bfloat16")))
    assert half.save_s - 900 == pytest.approx((whole.save_s - 900) / 2)
    assert half.publish_s == whole.publish_s
