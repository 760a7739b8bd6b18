"""The environments of the examples are made as the project installs them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from inflight.contracts import Environment
from inflight.rollouts import load_task
from inflight.run.config import load_config
from tests.environments.apart import need

ROOT = Path(__file__).parents[2]
INSTALLED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inflight.tasks"]


@pytest.mark.parametrize(
    ("example", "first", "turn_tokens"),
    [
        ("textarena", "TicTacToe-v0, start 0", 4),
        ("retry", "Spell this word backward", 6),
        ("trl_environment", "0-9?", 70),
    ],
)
def test_an_example_names_an_environment_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, example: str, first: str, turn_tokens: int
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    config = load_config(ROOT / "examples" / f"{example}.toml", [])
    if config.task.name == "textarena":
        need("textarena")
    environment = load_task(INSTALLED[config.task.name], config.task.params, 0)
    assert isinstance(environment, Environment)
    assert first in environment.item(0).prompt
    assert config.sampling.max_tokens >= turn_tokens
