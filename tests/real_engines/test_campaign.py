"""A few disturbed runs with a server of a real engine: attached to, and started by the run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.campaigns import places
from tests.campaigns.campaign import play_all
from tests.campaigns.engine import EngineChoice
from tests.real_engines.servers import ENGINES, python_of

SEEDS = {"vllm": (1, 16, 9), "sglang": (10, 13, 9)}
"""Runs whose connections to the engine are cut, whose engine is stopped for a while, and whose engine is killed."""


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_disturbed_runs_with_an_engine_hold(engine: str) -> None:
    if reason := places.can_cut():
        pytest.skip(reason)
    choice = EngineChoice(engine, Path(python_of(engine)), None)
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="runs-", dir="/tmp") as short:  # vLLM binds sockets in it
        played = play_all(SEEDS[engine], Path(short), num_jobs=1, engine=choice, tell=said.append)
    assert not any(run["problems"] or run["skipped"] for run in played), "\n".join(said)
    assert sum(incarnation["engine_groups"] for run in played for incarnation in run["incarnations"]) > 0
