"""Ranks of test programs: processes of their own, joined by gloo. Every wait has a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.zygote import python


def apart(name: str) -> dict[str, str]:
    """Return variables with which a process finds a package that make installs apart, in a folder of the name."""
    folder = Path(sys.prefix) / name
    assert folder.is_dir(), f"{folder} is missing: make installs {name} there"
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def run_ranks(
    path: Path,
    program: str = "rank_program",
    num_ranks: int = 2,
    deadline_s: float = 100.0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a program of this folder on so many ranks; fail with their output unless all end well in time."""
    command = [python(), "-W", "error", "-m", f"tests.worker.{program}", str(path)]
    root = Path(__file__).parents[2]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    logs = [path / f"{num_ranks}-rank{rank}.log" for rank in range(num_ranks)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("wb") as out:
            arguments = [*command, str(rank), str(num_ranks)]
            ranks.append(subprocess.Popen(arguments, cwd=root, env=variables, stdout=out, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + deadline_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.poll() not in (None, 0) for rank in ranks):
            deadline = min(deadline, time.monotonic() + 5)  # The others may wait for it without effect.
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
        rank.wait(10)
    report = "\n".join(f"--- rank {i}\n{log.read_text()[-4000:]}" for i, log in enumerate(logs))
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, report
