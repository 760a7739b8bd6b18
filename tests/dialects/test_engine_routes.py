"""Trainers of other projects drive our servers over vLLM's and SGLang's routes, through directories."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from inflight.cli import main
from tests.dialects.programs import Program
from tests.gates import BrakedServer, wait_until
from tests.models import make_model
from tests.servers import TOKEN, ServerProcess
from tests.weights.workers import PROMPT, assert_serves, checkpoint, logprobs, silenced, weight_version

UNIFORM = -math.log(258)  # every logit is 0
Start = Callable[..., "Client"]


class Client:
    """A client of the dialect, with its token."""

    def __init__(self, url: str, program: Program) -> None:
        self.url = url
        self.program = program

    def post(self, path: str, body: Any = None, *, token: str = TOKEN, status: int | None = 200, **query: Any) -> Any:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        answer = httpx.post(self.url + path, json=body, params=query, headers=headers, timeout=60)
        assert status is None or answer.status_code == status, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=60).raise_for_status().json()

    def sample(self, num: int = 4, **more: Any) -> Any:
        sampling = {"max_tokens": num, "ignore_eos": True, "logprobs": 1}
        body = {"token_ids": list(PROMPT), "sampling_params": sampling, "cache_salt": "7"} | more
        return self.post("/inference/v1/generate", body, token="")["choices"][0]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the dialect in front of servers; updates are read from ``tmp_path / "updates"``."""
    programs: list[Program] = []
    (tmp_path / "updates").mkdir()

    def start(model: Path, *servers: ServerProcess, protocol: str = "vllm", options: tuple[str, ...] = ()) -> Client:
        arguments = ["inflight", "dialect", protocol, *(server.url for server in servers), "--port", "0"]
        arguments += ["--directory", str(tmp_path / "updates"), "--model", str(model), *options]
        programs.append(Program(tmp_path / f"dialect-{len(programs)}.log", *arguments))
        line = programs[-1].line_with("routes at")
        return Client(line.split(" at ")[1].split(",")[0], programs[-1])

    yield start
    for program in programs:
        program.stop()


@pytest.fixture
def braked(model_dir: Path, tmp_path: Path) -> Iterator[BrakedServer]:
    server = BrakedServer(model_dir, tmp_path / "braked")
    server.wait_until_ready()
    yield server
    server.kill()


def written(model: Path, directory: Path, tensors: dict[str, torch.Tensor] | None = None) -> str:
    """Write a checkpoint of these tensors, by default one under which every token is equally likely."""
    directory.mkdir(parents=True)
    shutil.copy(model / "config.json", directory)
    save_file(tensors or silenced(checkpoint(model)), directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def test_prime_rl_updates_from_a_directory_between_pause_and_resume(
    start: Start, start_server: Callable[..., ServerProcess], model_dir: Path, tmp_path: Path
) -> None:
    servers = [start_server(model_dir) for _ in range(2)]
    client = start(model_dir, *servers)
    before = logprobs(servers[0])
    directory = written(model_dir, tmp_path / "updates" / "step_1")
    assert client.get("/v1/models")["data"][0]["id"] == "tiny"
    assert client.get("/weight_info") == {"weight_version": "default"}
    assert client.sample()["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]

    client.post("/pause", mode="keep", clear_cache="false")
    assert client.get("/is_paused") == {"is_paused": True}
    assert {weight_version(server).state for server in servers} == {"paused"}
    client.post("/update_weights", {"weight_dir": directory})
    client.post("/resume")
    assert client.get("/is_paused") == {"is_paused": False}
    for server in servers:
        assert_serves(server, 1)
        assert logprobs(server) == pytest.approx([UNIFORM] * 6)
    choice = client.sample()
    assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 4}]
    assert [it["logprob"] for it in choice["logprobs"]["content"]] == pytest.approx([UNIFORM] * 4)

    # A retried call does nothing; a directory that was written again is another update.
    assert client.post("/update_weights", {"weight_dir": directory})["weight_version"] == "1"
    assert_serves(servers[0], 1)
    shutil.rmtree(directory)
    written(model_dir, Path(directory), checkpoint(model_dir))
    assert client.post("/update_weights", {"weight_dir": directory, "weight_version": "step-2"})
    assert client.get("/weight_info") == {"weight_version": "step-2"}
    hello = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    (choice,) = client.post("/v1/chat/completions", hello, token="")["choices"]
    assert {it["version"] for it in choice["weight_versions"]} == {"step-2"}
    assert logprobs(servers[0]) == pytest.approx(before, abs=1e-5)


def test_a_pause_freezes_running_requests_and_its_update_arrives_within_their_tokens(
    start: Start, braked: BrakedServer, model_dir: Path, tmp_path: Path
) -> None:
    client = start(model_dir, braked)
    version = weight_version(braked).version + 1
    directory = written(model_dir, tmp_path / "updates" / "silent")
    with braked.brake, ThreadPoolExecutor() as pool:
        running = pool.submit(client.sample, 64)
        wait_until(lambda: weight_version(braked).num_running == 1)
        client.post("/pause", mode="keep")
        client.post("/start_weight_update", {"is_checkpoint_format": True})
        client.post("/update_weights", {"update_info": {"weight_dir": directory}})
        assert weight_version(braked).version < version  # nothing has changed before the last phase
        client.post("/finish_weight_update", {"weight_version": "seven"})
        client.post("/resume")
        braked.brake.release()
        choice = running.result(timeout=60)
    spans = choice["weight_versions"]
    assert spans[-1]["version"] == "seven" and len(spans) == 2
    logprobs_of = [it["logprob"] for it in choice["logprobs"]["content"]]
    assert logprobs_of[spans[-1]["start"] :] == pytest.approx([UNIFORM] * (64 - spans[-1]["start"]))


def test_the_four_phases_are_refused_out_of_order(
    start: Start, start_server: Callable[..., ServerProcess], model_dir: Path, tmp_path: Path
) -> None:
    server = start_server(model_dir)
    client = start(model_dir, server)
    directory = written(model_dir, tmp_path / "updates" / "silent")
    info = {"update_info": {"weight_dir": directory}}
    assert "start_weight_update" in client.post("/update_weights", info, status=400)["error"]["message"]
    assert "start_weight_update" in client.post("/finish_weight_update", status=400)["error"]["message"]
    client.post("/start_weight_update")
    assert "already" in client.post("/start_weight_update", status=409)["error"]["message"]
    assert "no directory" in client.post("/finish_weight_update", status=400)["error"]["message"]
    nccl = {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}
    assert "NCCL" in client.post("/update_weights", nccl, status=400)["error"]["message"]
    assert "NCCL" in client.post("/init_weight_transfer_engine", {"init_info": {}}, status=400)["error"]["message"]
    assert "pickles" in client.post("/collective_rpc", {"method": "x"}, status=400)["error"]["message"]
    assert_serves(server, 0)


def test_a_directory_is_checked_whole_before_a_server_is_asked(
    start: Start, start_server: Callable[..., ServerProcess], model_dir: Path, tmp_path: Path
) -> None:
    server = start_server(model_dir)
    client = start(model_dir, server)
    before, updates = logprobs(server), tmp_path / "updates"
    tensors = checkpoint(model_dir)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    faults: dict[str, str] = {
        written(model_dir, updates / "lacks", {k: v for k, v in tensors.items() if k != name}): "missing",
        written(model_dir, updates / "more", tensors | {"extra.weight": torch.zeros(1)}): "unknown",
        written(model_dir, updates / "shape", tensors | {name: torch.zeros(3)}): "shape",
        written(model_dir, updates / "nan", tensors | {name: tensors[name] * math.nan}): "not finite",
        str(updates / "absent"): "cannot be read",
        written(model_dir, tmp_path / "elsewhere"): "not a directory below",
        str(updates / ".." / "elsewhere"): "not a directory below",
    }
    (updates / "link").symlink_to(tmp_path / "elsewhere")
    faults[str(updates / "link")] = "not a directory below"
    cut = Path(written(model_dir, updates / "cut", tensors)) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-64])
    faults[str(cut.parent)] = "bytes before that tensor's end"
    client.post("/pause", mode="keep")
    for directory, why in faults.items():
        answer = client.post("/update_weights", {"weight_dir": directory}, status=400)
        assert why in answer["error"]["message"], (directory, answer)
    assert client.get("/is_paused") == {"is_paused": True}
    client.post("/resume")
    assert_serves(server, 0)
    assert logprobs(server) == pytest.approx(before)


def test_the_checkpoint_of_another_model_is_refused_at_the_start(
    shared_server: ServerProcess,
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFLIGHT_TOKEN", TOKEN)
    command = ["dialect", "vllm", shared_server.url, "--port", "0", "--directory", str(tmp_path), "--model"]
    other = make_model(tmp_path / "other", vocab_size=300)
    assert main([*command, str(other)]) == 1
    assert f"serves a model of 258 tokens, but {str(other)!r} has 300" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "absent")]) == 1
    assert "--model" in (said := capsys.readouterr().err) and "is not a directory" in said


def test_control_routes_need_the_token_unless_they_are_open_on_loopback(
    start: Start, start_server: Callable[..., ServerProcess], model_dir: Path, tmp_path: Path
) -> None:
    server = start_server(model_dir)
    client = start(model_dir, server)
    for path in ("/pause", "/resume", "/update_weights", "/v1/load_lora_adapter", "/abort_requests"):
        assert client.post(path, {}, token="", status=401)["error"]["code"] == "unauthorized"
        assert client.post(path, {}, token="wrong", status=401)
    assert weight_version(server).state == "ready"
    opened = start(model_dir, server, options=("--open",))
    opened.post("/pause", token="", mode="keep")
    opened.post("/resume", token="")
    refused = Program(
        tmp_path / "refused.log",
        "inflight",
        "dialect",
        "vllm",
        server.url,
        "--open",
        "--host",
        "0.0.0.0",
        "--port",
        "0",
    )
    assert refused.process.wait(timeout=60) == 1
    assert "--open is only allowed on a loopback address" in refused.log.read_text()
    refused.stop()


def test_a_pause_that_nothing_follows_ends_with_its_lease(
    start: Start, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    client = start(model_dir, server, options=("--pause-lease", "0.5"))
    client.post("/pause", mode="keep")
    assert "lease of 0.5 s" in client.program.line_with("sampling was resumed")
    assert weight_version(server).state == "ready"
    assert client.get("/is_paused") == {"is_paused": False}
    client.post("/resume")
    assert len(client.sample()["token_ids"]) == 4


def test_a_pause_ends_when_the_process_of_the_dialect_is_killed(
    start: Start, start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    client = start(model_dir, server, options=("--pause-lease", "0.5"))
    client.program.process.send_signal(signal.SIGSTOP)  # it neither resumes nor answers
    client.program.process.send_signal(signal.SIGCONT)
    client.post("/pause", mode="keep")
    client.program.process.kill()
    wait_until(lambda: weight_version(server).state == "ready")
    assert len(logprobs(server)) == 6


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_new_requests_are_refused_while_running_ones_end(
    mode: str, start: Start, braked: BrakedServer, model_dir: Path
) -> None:
    client = start(model_dir, braked)
    with braked.brake, ThreadPoolExecutor() as pool:
        running = pool.submit(client.sample, 32)
        wait_until(lambda: weight_version(braked).num_running == 1)
        if mode == "wait":
            braked.brake.release()
        client.post("/pause", mode=mode)
        choice = running.result(timeout=60)
        assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
        body = {"token_ids": list(PROMPT), "sampling_params": {"max_tokens": 2}}
        refused = client.post("/inference/v1/generate", body, status=503)
        assert refused["error"]["type"] == "ServiceUnavailableError"
        client.post("/resume")
        braked.brake.release()
        assert client.sample(2)


def test_requests_are_aborted_by_their_names(start: Start, braked: BrakedServer, model_dir: Path) -> None:
    client = start(model_dir, braked)
    with braked.brake, ThreadPoolExecutor() as pool:
        running = pool.submit(client.sample, 64, request_id="mine")
        wait_until(lambda: weight_version(braked).num_running == 1)
        client.post("/abort_requests", {"request_ids": ["other"]})
        client.post("/abort_requests", {"request_ids": ["mine"]})
        braked.brake.release()
        assert running.result(timeout=60)["finish_reason"] == "abort"


def test_completions_and_prompt_logprobs_are_those_of_the_endpoint(
    start: Start, shared_server: ServerProcess, model_dir: Path
) -> None:
    client = start(model_dir, shared_server)
    body = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    body |= {"repetition_penalty": 1.0, "n": 2, "return_token_ids": True, "logprobs": 0, "seed": 3, "ignore_eos": True}
    answer = client.post("/v1/completions", body, token="")
    again = client.post("/v1/completions", body, token="")["choices"]
    assert [choice["token_ids"] for choice in again] == [choice["token_ids"] for choice in answer["choices"]]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [4, 4]
    assert answer["choices"][0]["token_ids"] != answer["choices"][1]["token_ids"]
    token_ids = list(PROMPT) + answer["choices"][0]["token_ids"]
    sampling = {"max_tokens": 1, "prompt_logprobs": 2}
    scored = client.post("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": sampling}, token="")
    rows = scored["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(token_ids)
    found = [row[str(token)]["logprob"] for row, token in zip(rows[-4:], token_ids[-4:], strict=True)]
    assert found == pytest.approx(answer["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4)
    assert all(len(row) in (2, 3) for row in rows[1:])

    as_text = client.post("/v1/completions", body | {"prompt": bytes(PROMPT).decode()}, token="")
    assert as_text["choices"][0]["prompt_token_ids"] == list(PROMPT)
    assert as_text["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    assert "not served" in client.post("/v1/completions", body | {"model": "gpt"}, status=400)["error"]["message"]
    for odd in (
        {"repetition_penalty": 1.2},
        {"echo": True},
        {"stream": True},
        {"guided_json": {}},
        {"prompt": ["a", "b"]},
        {"logprobs": 2},
        {"temperature": -1.0},
        {"max_tokens": 0},
        {"logprobs": -1},
        {"top_k": -2},
    ):
        message = client.post("/v1/completions", body | odd, status=400)["error"]["message"]
        assert next(iter(odd)) in message
        assert "pydantic" not in message
    for number in (-1, 2):
        sampling = {"max_tokens": 1, "logprobs": number}
        refused = client.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": sampling}, status=400)
        assert "logprobs" in refused["error"]["message"]


def adapter_of(model: Path, directory: Path, factor: float) -> str:
    """Write a LoRA as PEFT does, of one layer."""
    name = "base_model.model.model.layers.0.mlp.down_proj"
    out, into = checkpoint(model)["model.layers.0.mlp.down_proj.weight"].shape
    a, b = torch.randn(2, into, generator=torch.Generator().manual_seed(0)), torch.full((out, 2), factor)
    directory.mkdir(parents=True)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["down_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def test_adapters_are_served_under_their_names(
    start: Start, start_server: Callable[..., ServerProcess], model_dir: Path, tmp_path: Path
) -> None:
    server = start_server(model_dir)
    client = start(model_dir, server)
    before = logprobs(server)
    info = client.get("/server_info?config_format=json")["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.float32" and info["lora_config"]["max_lora_rank"] >= 64
    assert info["parallel_config"]["data_parallel_size"] == 1
    first = {"lora_name": "policy-v1", "lora_path": adapter_of(model_dir, tmp_path / "updates" / "a", 0.5)}
    second = {"lora_name": "policy-v2", "lora_path": adapter_of(model_dir, tmp_path / "updates" / "b", 0.0)}
    client.post("/v1/load_lora_adapter", first | {"load_inplace": False})
    assert logprobs(server) != pytest.approx(before, abs=1e-3)
    assert client.sample(model="policy-v1")["weight_versions"][0]["version"] == "policy-v1"
    assert "already" in client.post("/load_lora_adapter", first, status=400)["error"]["message"]
    refused = client.post("/inference/v1/generate", {"token_ids": [1], "model": "tiny"}, status=400)
    assert "no longer served" in refused["error"]["message"]
    client.post("/pause", mode="keep")
    client.post("/load_lora_adapter", second)
    assert client.get("/is_paused") == {"is_paused": True}
    client.post("/resume")
    assert logprobs(server) == pytest.approx(before, abs=1e-5)
    assert client.sample(model="policy-v1")["weight_versions"][0]["version"] == "policy-v2"
    client.post("/v1/unload_lora_adapter", {"lora_name": "policy-v1"})
    assert [card["id"] for card in client.get("/v1/models")["data"]] == ["tiny", "policy-v2"]
    again = first | {"lora_name": "policy-v2", "load_inplace": True}
    client.post("/v1/load_lora_adapter", again)
    assert logprobs(server) != pytest.approx(before, abs=1e-3)
    assert [card["id"] for card in client.get("/v1/models")["data"]] == ["tiny", "policy-v2"]
    assert (
        "base model" in client.post("/load_lora_adapter", again | {"lora_name": "tiny"}, status=400)["error"]["message"]
    )


def test_sglang_updates_from_disk(start: Start, braked: BrakedServer, model_dir: Path, tmp_path: Path) -> None:
    client = start(model_dir, braked, protocol="sglang")
    directory = written(model_dir, tmp_path / "updates" / "silent")
    sampling = {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": list(PROMPT), "sampling_params": sampling, "return_logprob": True, "rid": "mine"}
    with braked.brake, ThreadPoolExecutor() as pool:
        running = pool.submit(client.post, "/generate", body, token="")
        wait_until(lambda: weight_version(braked).num_running == 1)
        assert client.post("/pause_generation", {"mode": "in_place"})["success"]
        update = {"model_path": directory, "weight_version": "v7", "flush_cache": True}
        assert client.post("/update_weights_from_disk", update)["success"]
        assert client.post("/continue_generation", {})["success"]
        braked.brake.release()
        answer = running.result(timeout=60)
    spans = answer["meta_info"]["weight_versions"]
    assert spans[-1]["version"] == answer["meta_info"]["weight_version"] == "v7" and len(spans) == 2
    tail = answer["meta_info"]["output_token_logprobs"][spans[-1]["start"] :]
    assert [row[0] for row in tail] == pytest.approx([UNIFORM] * len(tail))
    assert [row[1] for row in tail] == answer["output_ids"][spans[-1]["start"] :]
    assert client.get("/get_weight_version") == {"weight_version": "v7"}
    assert client.get("/model_info")["weight_version"] == "v7"
    of_text = client.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}}, token="")
    assert of_text["meta_info"]["prompt_tokens"] == 5
    both = {"text": "hello", "input_ids": list(PROMPT)}
    for body in ({}, both):
        assert "exactly one of input_ids and text" in client.post("/generate", body, token="", status=400)["message"]
    refused = client.post("/update_weights_from_disk", {"model_path": "/etc"}, status=400)
    assert refused["success"] is False and "not a directory below" in refused["message"]
    pickled = client.post("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, status=400)
    assert "pickles" in pickled["message"]


@pytest.mark.parametrize("mode", ["full", pytest.param("lora", marks=pytest.mark.exhaustive)])
def test_the_async_trainer_of_trl_samples_and_updates(
    mode: str, start: Start, start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """Its own trainer and rollout worker; the weights of ``full`` go through a directory instead of NCCL."""
    model = make_model(tmp_path / "model", tied=True)
    server = start_server(model, "--name", str(model))  # TRL asks for the model by its path
    client = start(model, server, options=("--open",))
    arguments = (mode, str(model), client.url, str(tmp_path / "updates"))
    trainer = Program(tmp_path / "trainer.log", "tests.dialects.trl_async_trainer", *arguments)
    *steps, _ = json.loads(trainer.line_with('"kl"'))
    assert trainer.process.wait(timeout=60) == 0
    trainer.stop()
    first, last = steps[0], steps[-1]
    assert first["sample/staleness_max"] == 0 and abs(first["kl"]) < 1e-6  # its logprobs are those that were sampled
    assert last["sample/staleness_max"] >= 1
    assert_serves(server, 4)  # before the first step, and after each of three
    assert client.get("/weight_info") == {"weight_version": "4" if mode == "full" else "trl-policy-v4"}
