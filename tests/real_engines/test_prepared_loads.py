"""Weights that are prepared before the pause are bit for bit those that vLLM's own reload loads."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from inflight.engines.embedded.tiny import byte_tokenizer
from tests.real_engines.servers import ROOT, python_of

PROGRAM = Path(__file__).parent / "loading_program.py"
SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {  # the first has biases, the second norms of heads; one head is tied to the embedding
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}


def loads(model: Path) -> list[dict[str, Any]]:
    """Return what the program prints for a model."""
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [python_of("vllm"), str(PROGRAM), str(model)],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_prepared_load_leaves_what_vllms_own_reload_leaves(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    started, traced, second, first, prepared_second, prepared_first = loads(tmp_path)
    assert traced["held"] == started["held"], "tracing changes nothing"
    assert {name for name in first["held"] if first["held"][name] != started["held"][name]} == {"model.norm.weight"}
    assert all(second["held"][name] != digest for name, digest in first["held"].items()), "each value is seen to change"
    assert prepared_second["left"] == prepared_first["left"] == ["model.norm.weight"], "its loader does not only copy"
    assert prepared_second["held"] == second["held"]
    assert prepared_first["held"] == first["held"]
