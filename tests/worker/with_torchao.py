"""Runs a program of the tests where it finds torchao: processes that do not need it load it slowly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.zygote import python


def seen_with_torchao(program: str, directory: Path) -> dict[str, Any]:
    """Run ``tests.worker.PROGRAM`` and return what it wrote to seen.json."""
    torchao = Path(sys.prefix) / "torchao"
    assert torchao.is_dir(), f"{torchao} is missing: make installs torchao there"
    environment = {**os.environ, "PYTHONPATH": f"{torchao}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [python(), "-m", f"tests.worker.{program}", str(directory)]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    seen: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    return seen
