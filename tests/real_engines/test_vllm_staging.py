"""Calls that stage weights do not wait for a step of vLLM's model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from inflight_vllm.updates import COMMIT, STAGE, STATUS
from tests.real_engines.servers import ROOT, python_of

PROGRAM = Path(__file__).parent / "staging_program.py"


def test_staging_is_answered_while_the_model_is_sampling() -> None:
    done = subprocess.run(
        [python_of("vllm"), str(PROGRAM)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    lines = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
    found = {line["case"]: (line["answered"], line["waiting"]) for line in lines}
    later, every = [COMMIT, "get_model"], [STATUS, STAGE, COMMIT, "get_model"]
    assert found == {
        "a worker in this process": ([[STATUS, [{"phase": "busy"}]]], later),
        "its bucket is staged": ([[STAGE, [{"phase": "done"}]]], later),
        "a worker that must not be disturbed": ([], every),
        "workers in other processes": ([], every),
    }
