"""Runs a program of the tests where it finds torchao: processes that do not need it load it slowly."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.worker.ranks import apart
from tests.zygote import python


def seen_with_torchao(program: str, directory: Path) -> dict[str, Any]:
    """Run ``tests.worker.PROGRAM`` and return what it wrote to seen.json."""
    environment = {**os.environ, **apart("torchao")}
    command = [python(), "-m", f"tests.worker.{program}", str(directory)]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    seen: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    return seen
