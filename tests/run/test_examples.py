"""The examples, executed as their readers would."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gates import reserved_port
from tests.servers import TOKEN, ServerProcess
from tests.zygote import python

ROOT = Path(__file__).parents[2]


def test_own_loop_example_publishes_every_step(model_dir: Path, start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(model_dir)
    done = subprocess.run(
        [python(), str(ROOT / "examples" / "own_loop.py"), str(model_dir), server.url],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"version (\d+):", done.stdout) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("transport", ["gloo", "shm", "file", "http"])
def test_weight_transports_example_sends_what_changed(
    model_dir: Path, start_server: Callable[..., ServerProcess], transport: str
) -> None:
    server = start_server(model_dir)
    done = subprocess.run(
        [python(), str(ROOT / "examples" / "weight_transports.py"), str(model_dir), server.url, transport],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    sent = [
        tuple(int(number.replace(",", "")) for number in found)
        for found in re.findall(r"version \d: ([\d,]+) of ([\d,]+) bytes sent", done.stdout)
    ]
    assert len(sent) == 3
    assert sent[0][0] == sent[0][1]  # nobody has a base yet
    assert all(small < full / 10 for small, full in sent[1:])


def test_every_rank_of_the_example_sends_what_it_holds(
    model_dir: Path, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(model_dir)
    command = [python(), str(ROOT / "examples" / "every_rank_sends.py"), str(model_dir), server.url]
    # As torchrun sets them.
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved_port())}
    variables = {**os.environ, "INFLIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **group}
    ranks = [
        subprocess.Popen(
            command, env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [line.partition(":")[0] for line in said[0].splitlines()] == ["version 0", "version 1", "version 2"]
