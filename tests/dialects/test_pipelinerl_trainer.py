"""PipelineRL's trainer drives our endpoints: its messages in its order, over real sockets and a real group of gloo."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dialects.programs import Program
from tests.gates import reserved_port
from tests.servers import ServerProcess
from tests.weights.workers import assert_serves, generate, logprobs, weight_version

UNIFORM = -math.log(258)  # every logit is 0


class Trainer(Program):
    def __init__(self, log: Path, **told: Any) -> None:
        super().__init__(log, "tests.dialects.pipelinerl_trainer", json.dumps(told))

    def answered(self) -> dict[str, Any]:
        answered: dict[str, Any] = json.loads(self.line())
        return answered

    def send(self, **step: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(step) + "\n")
        self.process.stdin.flush()
        return self.answered()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[Trainer, list[str]]]]:
    """Start a trainer, and our dialect in front of each list of servers; returns the trainer and the dialects' URLs."""
    programs: list[Program] = []

    def start(model: Path, *fronts: list[str], options: tuple[str, ...] = ()) -> tuple[Trainer, list[str]]:
        meeting, ports = reserved_port(), [reserved_port() for _ in fronts]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        told = {"model": str(model), "urls": urls, "port": meeting, "world_size": 1 + len(fronts)}
        for index, (servers, port) in enumerate(zip(fronts, ports, strict=True)):
            arguments = ["inflight", "dialect", "pipelinerl", *servers, "--port", str(port), "--timeout", "20"]
            arguments += ["--weight-update-group-init-method", f"tcp://127.0.0.1:{meeting}"]
            arguments += ["--weight-update-group-world-size", str(1 + len(fronts)), "--actor-llm-idx", str(index)]
            programs.append(Program(tmp_path / f"dialect-{index}.log", *arguments, *options))
        trainer = Trainer(tmp_path / "trainer.log", **told)
        programs.append(trainer)
        return trainer, urls

    yield start
    for program in reversed(programs):
        program.stop()


def chat(url: str, **more: Any) -> httpx.Response:
    """What ``llm_async_generate`` posts."""
    body = {
        "max_tokens": 8,
        "temperature": 1.0,
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "logprobs": 1,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body | more, timeout=30)


def test_its_updates_arrive_and_a_refused_one_is_answered_with_an_error_and_leaves_the_group_in_step(
    start: Callable[..., tuple[Trainer, list[str]]], start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    before = logprobs(server)
    trainer, (url,) = start(model_dir, [server.url])

    assert trainer.answered() == {"version": 0, "answers": [[200, '{"status":"ok"}']], "broadcasts": ""}
    assert weight_version(server).run_id == "pipelinerl"
    assert logprobs(server) == pytest.approx(before, abs=1e-5)

    assert trainer.send(version=1024, silent=True)["answers"][0][0] == 200
    assert_serves(server, 1024)
    assert generate(server).completions[0].logprobs == pytest.approx([UNIFORM] * 6)

    # As its actors sample, with the ids of tokens in the place of their text.
    choice = chat(url).raise_for_status().json()["choices"][0]
    ids = [int(token["token"].split(":")[-1]) for token in choice["logprobs"]["content"]]
    assert ids == choice["token_ids"]
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == pytest.approx([UNIFORM] * len(ids))
    assert choice["version_spans"] == [{"version": 1024, "start": 0, "end": len(ids)}]
    assert chat(url, tools=[{}]).status_code == 400

    # What its FSDP path does: the head is left out, of a model that does not tie it.
    refused = trainer.send(version=2048, without=["lm_head.weight"])
    assert refused["broadcasts"] == ""
    (status, text), *_ = refused["answers"]
    assert status >= 400 and "lm_head.weight" in text
    assert_serves(server, 1024)

    assert trainer.send(version=3072)["answers"][0][0] == 200
    assert_serves(server, 3072)
    assert logprobs(server) == pytest.approx(before, abs=1e-5)


def test_two_servers_of_a_group_take_each_update_from_one_broadcast(
    start: Callable[..., tuple[Trainer, list[str]]], start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    servers = [start_server(model_dir) for _ in range(2)]
    trainer, _ = start(model_dir, [servers[0].url], [servers[1].url])
    trainer.answered()
    assert [status for status, _ in trainer.send(version=64, silent=True)["answers"]] == [200, 200]
    for server in servers:
        assert_serves(server, 64)


def test_a_manifest_that_cannot_be_read_gives_the_group_up_and_no_later_update_is_claimed(
    start: Callable[..., tuple[Trainer, list[str]]], start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    trainer, (url,) = start(model_dir, [server.url])
    trainer.answered()
    odd = [{"name": "model.norm.weight", "shape": [32], "dtype": "torch.int3"}]
    refused = trainer.send(version=8, parameters_info=odd)
    assert refused["answers"][0][0] == 400 and "torch.int3" in refused["answers"][0][1]
    assert httpx.get(f"{url}/health").status_code == 503
    assert trainer.send(version=9)["answers"][0][0] >= 500
    assert_serves(server, 0)


def test_an_update_whose_trainer_is_killed_is_over_and_the_old_weights_serve_on(
    start: Callable[..., tuple[Trainer, list[str]]], start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)
    trainer, (url,) = start(model_dir, [server.url])
    trainer.answered()
    trainer.process.kill()
    info = [{"name": "model.norm.weight", "shape": [32], "dtype": "torch.float32"}]
    message = {"kind": "weight_update_request", "version": 5, "parameters_info": info}
    answer = httpx.post(f"{url}/receive_weight_update", json=message, timeout=60)
    assert answer.status_code >= 500
    assert httpx.get(f"{url}/health").status_code == 503
    assert_serves(server, 0)


def test_without_a_group_there_is_no_route_for_updates(shared_server: ServerProcess, tmp_path: Path) -> None:
    front = Program(tmp_path / "front.log", "inflight", "dialect", "pipelinerl", shared_server.url, "--port", "0")
    try:
        url = front.line_with("speaking").split(" at ")[1].split(",")[0]
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/receive_weight_update", json={}).status_code == 404
        assert chat(url, stop=["x"]).status_code == 400
    finally:
        front.stop()
