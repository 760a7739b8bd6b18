"""``inflight serve``: what it refuses, in one line, and how it stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from transformers import BertConfig, BertModel, Gemma2Config, MistralConfig, T5Config

from inflight.cli import main
from tests.gates import SOON_S
from tests.models import make_model
from tests.servers import TOKEN, ServerProcess
from tests.zygote import python

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``inflight serve`` with these arguments, which must fail with one line; return the line."""

    def run(*arguments: object) -> str:
        status = main(["serve", *map(str, arguments), *([] if "--port" in arguments else ["--port", "0"])])
        captured = capsys.readouterr()
        assert status == 1, captured
        assert captured.out == ""
        assert captured.err.startswith("inflight: ")
        assert captured.err.count("\n") == 1, captured.err
        assert len(captured.err) < 500
        return captured.err

    return run


def copied(model: Path, to: Path) -> Path:
    shutil.copytree(model, to)
    return to


def with_config(path: Path, **fields: object) -> Path:
    """Change fields of a checkpoint's config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return path


# ---------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_missing_directory_is_named(fails: Callable[..., str], tmp_path: Path) -> None:
    assert f"{str(tmp_path / 'nowhere')!r} does not exist" in fails(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert f"{str(tmp_path / 'file')!r}" in fails(tmp_path / "file")


def test_a_directory_without_config_is_named(fails: Callable[..., str], tmp_path: Path) -> None:
    assert "has no config.json" in fails(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"text"', "{}", '{"model_type": "nonsense"}', '{"model_type": "llama"}', "\xff"],
)
def test_a_config_that_cannot_be_read_is_named(fails: Callable[..., str], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert str(tmp_path) in fails(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "many"},
        {"hidden_size": -32},
        {"num_attention_heads": 0},
        {"num_hidden_layers": None},
        {"rope_parameters": {"rope_type": "unheard of", "rope_theta": 1.0}},
        {"hidden_act": "unheard of"},
        {"dtype": "unheard of"},
    ],
    ids=str,
)
def test_a_config_of_nonsense_values_is_refused(
    fails: Callable[..., str], model_dir: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    assert str(tmp_path) in fails(with_config(copied(model_dir, tmp_path / "model"), **fields))


def test_a_model_that_is_no_causal_lm_is_refused(fails: Callable[..., str], tmp_path: Path) -> None:
    sizes = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    BertModel(BertConfig(num_attention_heads=2, **sizes)).save_pretrained(tmp_path / "bert")
    line = fails(tmp_path / "bert")
    assert "is not a causal language model" in line
    assert "BertModel" in line
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    assert "is not a causal language model" in fails(tmp_path / "t5")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(**SMALL, sliding_window=32, architectures=["MistralForCausalLM"]), ("sliding window", "32")),
        (Gemma2Config(**SMALL, sliding_window=None, architectures=["Gemma2ForCausalLM"]), ("gemma2",)),
    ],
    ids=["sliding-window", "softcap"],
)
def test_a_model_whose_attention_is_not_supported_is_refused(
    fails: Callable[..., str], tmp_path: Path, config: object, words: tuple[str, ...]
) -> None:
    config.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    line = fails(tmp_path)
    for word in (*words, "support"):
        assert word in line


def test_weights_in_another_format_are_not_read(fails: Callable[..., str], model_dir: Path, tmp_path: Path) -> None:
    path = copied(model_dir, tmp_path / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "has no *.safetensors" in fails(path)


@pytest.mark.parametrize("size_bytes", [0, 4, 100, 20_000])
def test_truncated_weights_are_refused(
    fails: Callable[..., str], model_dir: Path, tmp_path: Path, size_bytes: int
) -> None:
    path = copied(model_dir, tmp_path / "model")
    os.truncate(path / "model.safetensors", size_bytes)
    assert f"the weights in {str(path)!r} cannot be loaded" in fails(path)


def test_weights_that_do_not_fit_their_config_are_refused(
    fails: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    deeper = with_config(copied(model_dir, tmp_path / "deeper"), num_hidden_layers=3, layer_types=None)
    assert "does not fit its config: missing_keys 'model.layers.2" in fails(deeper)
    shallower = with_config(copied(model_dir, tmp_path / "shallower"), num_hidden_layers=1, layer_types=None)
    assert "does not fit its config: unexpected_keys 'model.layers.1" in fails(shallower)
    wider = with_config(copied(model_dir, tmp_path / "wider"), vocab_size=300)
    assert str(wider) in fails(wider)


def test_a_broken_tokenizer_is_refused(fails: Callable[..., str], model_dir: Path, tmp_path: Path) -> None:
    path = copied(model_dir, tmp_path / "model")
    (path / "tokenizer.json").write_text("{")
    assert f"the tokenizer in {str(path)!r} cannot be loaded" in fails(path)


def test_a_port_that_is_taken_is_named(fails: Callable[..., str], model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fails(model_dir, "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "70000"), ("70000", "--port")),
        (("--port", "-1"), ("-1", "--port")),
        (("--host", "no.such.host.invalid"), ("no.such.host.invalid",)),
        (("--max-model-len", "1"), ("max_model_len 1", "range 2 to 1024")),
        (("--max-model-len", "1025"), ("max_model_len 1025", "range 2 to 1024")),
        (("--max-model-len", "-5"), ("max_model_len -5", "range 2 to 1024")),
        (("--max-concurrent", "0"), ("max_concurrent", "0")),
        (("--device", "toaster"), ("toaster",)),
        (("--device", "cuda:99"), ("cuda:99",)),
        (("--threads", "0"), ("threads", "0")),
        (("--compile", "--engine", "vllm"), ("--compile", "does not apply to engine 'vllm'")),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_an_argument_that_cannot_be_used_is_named(
    fails: Callable[..., str], model_dir: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = fails(model_dir, *arguments)
    for word in words:
        assert word in line


def test_a_token_file_that_cannot_be_used_is_named(fails: Callable[..., str], model_dir: Path, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    assert "token file" in fails(model_dir, "--token-file", token_file)
    assert "token file" in fails(model_dir, "--token-file", tmp_path)
    for content in (b"", b" \n", b"\xff\xfe", b"two\nlines", "schlüssel".encode()):
        token_file.write_bytes(content)
        line = fails(model_dir, "--token-file", token_file)
        assert str(token_file) in line
        assert "lines" not in line


def test_a_ready_file_that_cannot_be_written_is_named(
    fails: Callable[..., str], model_dir: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "nowhere" / "ready.json"
    assert str(ready_file) in fails(model_dir, "--ready-file", ready_file)


# ---------------------------------------------------------------------------------------------------------------
# How it stops


def start(
    model: Path, directory: Path, *arguments: str, token: str | None = None, interpreter: str | None = None
) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "INFLIGHT_TOKEN"}
    if token is not None:
        environment["INFLIGHT_TOKEN"] = token
    directory.mkdir()
    command = [interpreter or python(), "-m", "inflight", "serve", str(model), "--port", "0", "--threads", "1"]
    command += ["--ready-file", str(directory / "ready.json"), *arguments]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def test_a_server_stops_by_signals_and_with_its_standard_input_while_it_generates(
    model_dir: Path, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("from-a-file\n")
    servers = {
        "sigterm": start(model_dir, tmp_path / "sigterm", token=TOKEN, interpreter=sys.executable),
        "sigint": start(model_dir, tmp_path / "sigint", "--exit-with-stdin"),
        "stdin": start(model_dir, tmp_path / "stdin", "--exit-with-stdin", "--token-file", str(token_file)),
    }
    # This one's input ends before it serves: it stops all the same. Nor does it have a tokenizer.
    early = start(make_model(tmp_path / "bare", tokenizer=False), tmp_path / "early", "--exit-with-stdin", token=TOKEN)
    assert early.stdin is not None
    early.stdin.close()
    body = {"request_id": "r", "prompt_token_ids": [1], "sampling": {"n": 20, "ignore_eos": True}, "stream": True}
    try:
        logs, answers = {}, {}
        for name, server in servers.items():
            ready = tmp_path / name / "ready.json"
            deadline = time.monotonic() + 90
            while not ready.exists():
                assert server.poll() is None, (tmp_path / name / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            found = json.loads(ready.read_text())
            assert found["pid"] == server.pid or name != "sigterm"  # the others are forked, and have another id
            with httpx.stream("POST", f"{found['url']}/v1/generate", json=body, timeout=30, trust_env=False) as stream:
                events = (line for line in stream.iter_lines() if line)
                next(events)
                if name == "sigterm":
                    server.terminate()
                elif name == "sigint":
                    server.send_signal(signal.SIGINT)
                else:
                    assert server.stdin is not None
                    server.stdin.close()
                answers[name] = list(events)
            server.wait(SOON_S)
            logs[name] = (tmp_path / name / "log").read_text()
            assert "Traceback" not in logs[name], logs[name]
            assert f"serving {model_dir.name} at {found['url']}" in logs[name]
            assert "inflight: attention while decoding in float32 on cpu: torch's" in logs[name]
        assert early.wait(timeout=60) == 0
        assert "Traceback" not in (tmp_path / "early" / "log").read_text()
    finally:
        for server in (*servers.values(), early):
            server.kill()
            server.wait(timeout=10)
            if server.stdin is not None:
                server.stdin.close()
    assert servers["sigterm"].returncode in (0, -signal.SIGTERM)
    assert servers["sigint"].returncode in (0, 130, -signal.SIGINT)
    assert servers["stdin"].returncode == 0
    for name, events in answers.items():
        # What ran was aborted and answered, not cut off.
        assert events[-1] == "data: [DONE]", name
        assert sum('"finish_reason":"abort"' in event for event in events) == 20, name
    # A token is shown only when nobody chose it.
    assert "control token" in logs["sigint"]
    for name in ("sigterm", "stdin"):
        assert "token" not in logs[name]
        assert TOKEN not in logs[name]


@pytest.mark.exhaustive
@pytest.mark.timeout(420)  # compiling takes half a minute of one core
def test_a_server_with_a_compiled_decode_step_answers(
    model_dir: Path, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(model_dir, "--compile")
    body = {"request_id": "r", "prompt_token_ids": [1] * 5, "sampling": {"max_tokens": 20, "ignore_eos": True}}
    answer = httpx.post(f"{server.url}/v1/generate", json=body, trust_env=False, timeout=60.0)
    assert len(answer.json()["completions"][0]["token_ids"]) == 20


def test_a_server_with_little_memory_for_keys_and_values_says_how_long_a_sequence_may_be(
    model_dir: Path, start_server: Callable[..., ServerProcess]
) -> None:
    # 256 bytes a token: 2 layers, keys and values of 2 heads of 8 dimensions in float32.
    server = start_server(model_dir, "--kv-cache", "50kB")
    capabilities = httpx.get(f"{server.url}/capabilities", trust_env=False).json()
    assert capabilities["max_model_len"] == 50_000 // 256
    body = {"request_id": "r", "prompt_token_ids": [1] * 195, "sampling": {"max_tokens": 1}}
    refused = httpx.post(f"{server.url}/v1/generate", json=body, trust_env=False)
    assert refused.status_code == 400
    assert "the number that fits in 50000 bytes of KV cache" in refused.json()["error"]["message"]
