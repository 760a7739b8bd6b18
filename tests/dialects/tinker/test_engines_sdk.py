"""The program of docs/tinker.md, unchanged, on other engines and trainers: ``make test-tinker-engines``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dialects.tinker.server import KEY, TinkerServer
from tests.environments.apart import need
from tests.models import make_model

need("tinker")

PROGRAM = Path(__file__).parents[3] / "examples" / "tinker_program.py"
ENGINE = os.environ["INFLIGHT_TESTS_VLLM_PYTHON"]
VLLM = ("--engine", "vllm", "--servers.python", ENGINE, "--run.start_timeout_s", "600")
SERVERS = {
    "vllm and fsdp": VLLM,
    "vllm and torchtitan": (*VLLM, "--trainer", "torchtitan"),
    "embedded and torchtitan": ("--trainer", "torchtitan"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SERVERS)
def test_the_same_program_learns_on_every_engine_and_trainer(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", hidden_size=128, max_model_len=1024)  # vLLM has no smaller heads
    rank = "0" if "torchtitan" in SERVERS[name] else "8"  # TorchTitan trains no LoRA
    server = TinkerServer(model, tmp_path / "served", *SERVERS[name], start_s=600.0)
    try:
        environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
        command = [sys.executable, str(PROGRAM), "tiny", "letters", "--steps", "10", "--rank", rank]
        command += ["--learning-rate", "1e-2"]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert answer.returncode == 0, answer.stderr[-3000:] + server.log()[-3000:]
        *rows, last = answer.stdout.splitlines()
        rewards = [json.loads(row)["reward"] for row in rows]
        assert len(rewards) == 10
        assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
        assert last.endswith("/weights/final")
    finally:
        server.end()
