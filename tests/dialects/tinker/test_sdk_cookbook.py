"""Two steps of four training loops of tinker-cookbook 0.6.1, on a tiny model with the tokenizer of a real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dialects.tinker.server import KEY, TinkerServer
from tests.environments.apart import need
from tests.models import make_model

need("tinker_cookbook")

ROOT = Path(__file__).parents[3]
SMOLLM2 = ROOT / "models" / "smollm2"
RECIPE = (
    *("renderer_name=qwen3_instruct", "group_size=2", "learning_rate=1e-2", "max_steps=2", "max_tokens=8"),
    *("eval_every=0", "save_every=0"),
)
RECIPES = "tinker_cookbook.recipes"
PROGRAMS = {
    "arithmetic": (
        *("-m", f"{RECIPES}.math_rl.train", "env=arithmetic", "loss_fn=importance_sampling", "groups_per_batch=2"),
        *("model_name={model}", "log_path={log}", *RECIPE),
    ),
    "guess_number": (
        *("-m", f"{RECIPES}.multiplayer_rl.guess_number.train", "batch_size=2", "model_name={model}", "log_path={log}"),
        *RECIPE,
    ),
    "dpo": (str(Path(__file__).with_name("cookbook_programs.py")), "dpo", "{model}", "{log}"),
    "distillation": (str(Path(__file__).with_name("cookbook_programs.py")), "distillation", "{model}", "{log}"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    directory = tmp_path_factory.mktemp("cookbook")
    model = make_model(directory / "model", "llama", vocab_size=49152, max_model_len=4096, tokenizer=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SMOLLM2 / name, model)
    server = TinkerServer(model, directory / "served", "--samplers", "2", "--models", "4", name=str(model))
    yield server
    server.end()


def metrics_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_loops_of_the_cookbook_run(server: TinkerServer, tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    words = [word.format(model=server.model, log=log) for word in PROGRAMS[name]]
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stderr[-4000:]
    rows = metrics_of(log)
    match name:
        case "dpo":
            first, second = (row for row in rows if "dpo_loss" in row)
            # The reference is the model itself at first: ln 2.
            assert first["dpo_loss"] == pytest.approx(0.6931, abs=1e-3)
            assert second["dpo_loss"] < first["dpo_loss"]
        case "distillation":
            first, second = (row["teacher_kl"] for row in rows if "teacher_kl" in row)
            assert abs(first) < 1e-4  # the student is the teacher
            assert abs(second) < 10
        case _:
            assert [row["env/all/reward/total"] <= 1.0 for row in rows if "env/all/reward/total" in row] == [True, True]
