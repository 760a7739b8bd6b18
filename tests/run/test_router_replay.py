"""Router replay in a run: the experts that sampled a token reach the trainer, and what cannot take part is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.engines.embedded.tiny import TinyShape, create_tiny_model, save_tiny_model
from inflight.run.config import RunConfig
from inflight.run.servers.checks import needs_of
from tests.run.runs import RunProcess
from tests.weights.test_publisher_machine import DECLARED

REPLAY = ("--train.router_replay", "true")


def make_mixture(path: Path) -> Path:
    save_tiny_model(create_tiny_model(TinyShape("qwen3_moe", hidden_size=48, num_layers=2, num_heads=3), 0), path)
    return path


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks")
def test_two_ranks_train_with_the_experts_of_the_server(tmp_path: Path) -> None:
    run = RunProcess(
        tmp_path,
        make_mixture(tmp_path / "model"),
        *REPLAY,
        *("--train.num_ranks", "2", "--run.num_steps", "3", "--run.mode", "conventional"),
    )
    assert run.wait() == 0, run.output()
    rows = run.rows()
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch_k3"] < 1e-8 for row in rows)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks")
def test_a_model_without_experts_is_refused(tmp_path: Path, model_dir: Path) -> None:
    run = RunProcess(tmp_path, model_dir, *REPLAY)
    assert run.wait() != 0
    assert "train.router_replay" in run.output()


def test_servers_that_do_not_say_their_experts_are_refused(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"directory": tmp_path},
            "model": {"path": tmp_path, "dtype": DECLARED.dtype},
            "task": {"name": "t"},
            "train": {"router_replay": True},
        }
    )
    can = DECLARED.model_copy(update={"transports": ("gloo",)})
    needs = needs_of(config, can.vocab_size)
    assert can.missing(needs) == {"routed_experts": "routed_experts"}
    assert not can.model_copy(update={"routed_experts": True}).missing(needs)
