"""What is known of the tensors that the engine has loaded: read from the checkpoint, kept, or lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inflight.errors import UpdateRefusedError
from inflight.weights.receive.base_weights import BaseWeights


def test_tensors_are_the_checkpoints_until_an_update_brings_others_and_lost_unless_it_kept_them(tmp_path: Path) -> None:
    stored = {name: torch.randn(3, 2) for name in ("a", "b", "c")}
    save_file({"a": stored["a"], "b": stored["b"]}, tmp_path / "1.safetensors")
    save_file({"c": stored["c"]}, tmp_path / "2.safetensors")
    base = BaseWeights(str(tmp_path), torch.bfloat16)
    assert dict(base.shapes()) == dict.fromkeys("abc", (3, 2))
    base.require("abc")
    assert all(torch.equal(base.tensor(name), stored[name].bfloat16()) for name in "abc")
    base.note_loaded([("a", torch.zeros(3, 2))], keep=False)
    base.note_loaded([("b", torch.ones(3, 2))], keep=True)
    base.require("bc")
    assert torch.equal(base.tensor("b"), torch.ones(3, 2))
    with pytest.raises(UpdateRefusedError, match=r"keep_base=True: .* 1 tensors .*'a'"):
        base.require("abc")
    base.note_loaded([("a", torch.zeros(3, 2)), ("b", torch.zeros(3, 2))], keep=True)
    base.require("abc")


def test_an_engine_whose_checkpoint_is_no_directory_here_takes_complete_updates_only(tmp_path: Path) -> None:
    base = BaseWeights("someone/model-of-a-hub", torch.float32)
    with pytest.raises(UpdateRefusedError, match="needs the engine's checkpoint: model directory 'someone/model-of-a"):
        base.shapes()
