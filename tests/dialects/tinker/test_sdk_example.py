"""The program of docs/tinker.md runs as the page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dialects.tinker.server import KEY, TinkerServer
from tests.environments.apart import need

need("tinker")

PROGRAM = Path(__file__).parents[3] / "examples" / "tinker_program.py"


@pytest.mark.parametrize("task", ["letters", "sums"])
def test_the_example_trains_while_it_samples_and_saves_its_model(sdk_server: TinkerServer, task: str) -> None:
    environment = {**os.environ, "TINKER_BASE_URL": sdk_server.url, "TINKER_API_KEY": KEY}
    command = [sys.executable, str(PROGRAM), str(sdk_server.model), task, "--steps", "3", "--rank", "4"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    *rows, last = answer.stdout.splitlines()
    if task == "sums":  # an untrained model solves none
        assert rows == ["every completion of 8 groups has the same reward: nothing is left to learn"]
    else:
        assert [json.loads(row)["step"] for row in rows] == [0, 1, 2]
        assert all(json.loads(row)["reward"] > 0 for row in rows)
    assert last.startswith("tinker://") and last.endswith("/weights/final")
