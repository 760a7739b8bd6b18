"""Model directories whose weights are not what their config says, told by the headers of the files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from inflight.errors import ConfigError, UnsupportedError
from inflight.model.checkpoint_specs import tensor_specs_of
from inflight.model.checkpoints import check_weights
from inflight.model.untrusted import TRUST_VARIABLE
from tests.models import TRAINED_FAMILIES, make_model
from tests.zygote import python

NORM = "model.norm.weight"


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def in_parts(path: Path) -> Path:
    """Write a model in several files, with an index."""
    whole = make_model(path.with_name("whole"), tokenizer=False)
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(path, max_shard_size="50KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_whole_weights_pass(tmp_path: Path, family: str, tied: bool) -> None:
    check_weights(make_model(tmp_path / "model", family, tied=tied, tokenizer=False))


def test_weights_in_several_files_pass_beside_a_file_that_the_index_does_not_name(tmp_path: Path) -> None:
    path = in_parts(tmp_path / "parts")
    save_file({"other.name": torch.zeros(2)}, path / "consolidated.safetensors")
    check_weights(path)


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def spoil_the_header(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as out:
        out.seek(8)
        out.write(b"not json")


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, r"model\.safetensors' cannot be read: it ends within model\.\S+, 100 bytes before"),
    "empty": (lambda path: (path / "model.safetensors").write_bytes(b""), r"model\.safetensors' cannot be read"),
    "spoilt header": (spoil_the_header, r"model\.safetensors' cannot be read"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), r"has no \*\.safetensors"),
    "missing tensor": (
        lambda path: rewritten(path, lambda t: t.pop(NORM)),
        rf"missing tensors: '{NORM}'",
    ),
    "unknown tensor": (
        lambda path: rewritten(path, lambda t: t.update(other=torch.zeros(2))),
        r"unknown tensors: 'other'",
    ),
    "other shape": (
        lambda path: rewritten(path, lambda t: t.update({NORM: torch.zeros(31)})),
        rf"{NORM} in model\.safetensors has shape \(31,\), expected \(32,\)",
    ),
    "other dtype": (
        lambda path: rewritten(path, lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int8)})),
        rf"tensors with a dtype that cannot be trained: '{NORM} in model\.safetensors'",
    ),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_weights_are_named_by_file_and_tensor(tmp_path: Path, breakage: str) -> None:
    path = make_model(tmp_path / "model", tokenizer=False)
    break_it, says = BREAKAGES[breakage]
    break_it(path)
    with pytest.raises(ConfigError, match=says) as caught:
        check_weights(path)
    assert str(path) in str(caught.value)


def test_a_file_that_the_index_names_and_that_is_gone_is_said_with_its_tensors(tmp_path: Path) -> None:
    path = in_parts(tmp_path / "parts")
    gone = sorted(path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=rf"{re.escape(gone.name)}' is missing; .* lists \d+ tensors in it: '"):
        check_weights(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["x"]}))
    with pytest.raises(ConfigError, match=r"index\.json' cannot be read"):
        check_weights(path)


def test_no_weights_are_read(tmp_path: Path) -> None:
    """A checkpoint of 40 GB, all of it a hole in the file, is checked in no time."""
    path = make_model(tmp_path / "model", tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 160_000_000}))
    header = {}
    end = 0
    for name, tensor in load_file(path / "model.safetensors").items():
        shape = [160_000_000, 32] if tensor.shape[0] == 258 else list(tensor.shape)
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path / "model.safetensors", 8 + len(text) + end)
    assert end > 40e9
    started = time.monotonic()
    check_weights(path)
    assert time.monotonic() - started < 20


def test_gpt2_is_told_what_it_lacks_and_which_models_do_not(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=258)).save_pretrained(tmp_path / "gpt2")
    says = r"contains a GPT2LMHeadModel, .* its attention ignores where sequences end.*Qwen3ForCausalLM"
    with pytest.raises(UnsupportedError, match=says):
        check_weights(tmp_path / "gpt2")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/part.safetensors", ".."])
def test_an_index_that_leaves_its_directory_is_refused(tmp_path: Path, name: str) -> None:
    path = in_parts(tmp_path / "parts")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: name}}))
    for read in (check_weights, lambda it: tensor_specs_of(it, "float32")):
        with pytest.raises(
            ConfigError, match=re.escape(f"it lists {name!r}, which is not the name of a file next to it")
        ):
            read(path)


def test_code_of_a_model_directory_runs_only_if_the_user_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a prompt: standard input answers yes to everything."""
    path = make_model(tmp_path / "model")
    (path / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaConfig\nclass Own(LlamaConfig): pass\n"
    )
    config = json.loads((path / "config.json").read_text())
    own = {**config, "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (path / "config.json").write_text(json.dumps(own))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    code = f"""
import os, sys
from pathlib import Path
from inflight.errors import ConfigError
from inflight.model.checkpoints import load_config
try:
    load_config(Path(sys.argv[1]))
except ConfigError as error:
    print(error)
print("ran:", Path(sys.argv[2]).exists())
os.environ[{TRUST_VARIABLE!r}] = "1"
load_config(Path(sys.argv[1]))
"""
    (tmp_path / "program.py").write_text(code)
    ended = subprocess.run(
        [python(), str(tmp_path / "program.py"), str(path), str(tmp_path / "ran")],
        input="y\n" * 9,
        text=True,
        capture_output=True,
        timeout=120,
    )
    refusal, ran = ended.stdout.splitlines()
    assert (TRUST_VARIABLE in refusal, ran) == (True, "ran: False"), ended.stderr
    assert (tmp_path / "ran").exists(), ended.stderr
