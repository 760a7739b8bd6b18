"""Workers whose layers torch's compiler makes graphs of, beside workers without, and what they need for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch._inductor.config
import torch.distributed as dist

from inflight.errors import ConfigError
from inflight_fsdp import create_worker
from tests.models import make_model
from tests.worker.worker_cases import settings


@pytest.mark.exhaustive
@pytest.mark.timeout(420)  # compiling a dozen small graphs takes a minute of one core
@pytest.mark.parametrize(
    ("trainer", "activations"),
    [("inflight_fsdp", "recompute"), ("inflight_fsdp.torchtitan", "keep")],
)
def test_compiled_layers_give_the_same_numbers_and_are_not_compiled_for_each_length(tmp_path, trainer, activations):
    command = [sys.executable, "-m", "tests.worker.compile_program", str(tmp_path), trainer, activations]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["logprobs"] < 1e-4, seen  # float32, logits near 10; 1e-6 was seen
    assert seen["gradients"] < 1e-4, seen  # float32 beside the largest of all; 2e-6 was seen
    assert 0 < seen["graphs"] < 12, seen  # that many whatever the number of layers
    assert seen["graphs of twelve more lengths"] == 0, seen
    assert len(seen["breaks"]) == 1, seen
    assert "segments differ from batch to batch" in seen["breaks"][0]
    assert seen["same names"]


def test_a_compiler_that_is_missing_is_named(tmp_path, monkeypatch):
    make_model(tmp_path / "model", tokenizer=False)
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "no-such-compiler"))
    with pytest.raises(ConfigError, match=r"compile = true needs a C\+\+ compiler.*no-such-compiler.*install g\+\+"):
        create_worker(settings(tmp_path / "model", compile=True))
    assert not dist.is_initialized()
