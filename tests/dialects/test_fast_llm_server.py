"""Our publisher drives servers of PipelineRL in fast-llm mode: through a real Redis server and a real group of gloo."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import redis

from inflight.base.extensions import import_object
from inflight.dialects.fast_llm.sending import FAST_LLM
from inflight.errors import ConfigError, PoisonedError, PublishError, UnsupportedError
from inflight.http.kinds import connect_endpoint
from inflight.types import EndpointOutcome
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender
from inflight.wire import ChatCompletionRequest, ChatMessage, EndpointState, GenerateRequest, SamplingParams
from tests.dialects.programs import Program
from tests.dialects.redis_server import running_redis
from tests.gates import reserved_port, wait_until
from tests.weights.workers import PlainWorker, checkpoint, silenced
from tests.zygote import python

UNIFORM = -math.log(258)
ROOT = Path(__file__).parents[2]


class Server(Program):
    def __init__(self, directory: Path, **told: Any) -> None:
        super().__init__(directory / "server.log", "tests.dialects.fast_llm_server", json.dumps(told))


@pytest.fixture
def start(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[WeightPublisher, Server]]]:
    """Start a stand-in of a server, and a publisher that is connected to it."""
    programs: list[Program] = []
    publishers: list[WeightPublisher] = []
    with running_redis(tmp_path / "redis") as redis_port:

        def start(timeout_s: float = 20, **odd: Any) -> tuple[WeightPublisher, Server]:
            with redis.Redis(port=redis_port) as client:  # of an earlier run
                client.xadd("fast_llm_events", {"event": '{"type": "weights_ready", "step": 7}'})
                client.xadd("fast_llm_events", {"event": '{"type": "training_finished"}'})
            told = {"model": str(model_dir), "port": reserved_port(), "group_port": reserved_port()}
            server = Server(tmp_path, redis=redis_port, **told, **odd)
            programs.append(server)
            server.line_with("forming the group")
            query = f"group=tcp://127.0.0.1:{told['group_port']}&redis=redis://127.0.0.1:{redis_port}"
            endpoint = connect_endpoint(
                f"fast_llm+http://127.0.0.1:{told['port']}?{query}&timeout_s={timeout_s}", control_timeout_s=10
            )
            publisher = WeightPublisher([endpoint], make_sender("shm"), run_id="run", connect_timeout_s=60)
            publishers.append(publisher)
            return publisher.__enter__(), server

        yield start
        for publisher in publishers:
            publisher.close()
        for program in programs:
            program.stop()


def sample(publisher: WeightPublisher, max_tokens: int = 4, **sampling: Any) -> Any:
    (endpoint,) = publisher.endpoints
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    request = GenerateRequest(request_id=f"probe-{max_tokens}", prompt_token_ids=tuple(b"weights"), sampling=params)
    return publisher.run(endpoint.generate, request)


def publish(publisher: WeightPublisher, model_dir: Path, version: int, *, silent: bool) -> Any:
    tensors = checkpoint(model_dir)
    worker = PlainWorker(silenced(tensors) if silent else tensors, version)
    return publish_weights(worker, publisher, in_flight="drain", deadline_s=30)


def test_our_publishes_arrive_and_the_end_of_training_is_announced(
    start: Callable[..., tuple[WeightPublisher, Server]], model_dir: Path
) -> None:
    publisher, server = start()
    (can,) = publisher.endpoints.values()
    policies = [str(policy) for policy in can.in_flight_policies]
    assert (can.engine, can.version_binding, policies) == ("fast_llm", "admission", ["drain"])
    assert sample(publisher).completions[0].version_spans[0].version == 0

    publish(publisher, model_dir, 32, silent=True)
    completion = sample(publisher, n=2).completions[1]
    assert completion.logprobs == pytest.approx([UNIFORM] * 4)
    assert [(span.version, span.end) for span in completion.version_spans] == [(32, 4)]

    (endpoint,) = publisher.endpoints
    messages = (ChatMessage(role="user", content="hello"),)
    chat = publisher.run(endpoint.chat_completion, ChatCompletionRequest(model="tiny", messages=messages, max_tokens=3))
    assert chat.choices[0].version_spans[0].version == 32

    publish(publisher, model_dir, 64, silent=False)
    assert sample(publisher).completions[0].logprobs != pytest.approx([UNIFORM] * 4)

    publisher.close()
    assert [json.loads(server.line()) for _ in range(3)] == [
        {"type": "weights_ready", "step": 0, "documents_seen": 32},
        {"type": "weights_ready", "step": 1, "documents_seen": 64},
        {"type": "training_finished"},
    ]
    assert server.line() == "left the group\n"


def test_an_update_waits_for_the_completions_that_run_so_that_each_is_of_one_version(
    start: Callable[..., tuple[WeightPublisher, Server]], model_dir: Path
) -> None:
    publisher, _ = start(step_s=0.02)
    running: Future[Any] = Future()
    threading.Thread(target=lambda: running.set_result(sample(publisher, 30, n=2)), daemon=True).start()
    (endpoint,) = publisher.endpoints
    wait_until(lambda: publisher.run(endpoint.weight_version).num_running == 2)
    publish(publisher, model_dir, 1, silent=True)
    before = running.result(timeout=30).completions
    assert {span.version for completion in before for span in completion.version_spans} == {0}
    assert UNIFORM not in [pytest.approx(logprob) for completion in before for logprob in completion.logprobs]
    assert sample(publisher).completions[0].logprobs == pytest.approx([UNIFORM] * 4)


def poisoned(publisher: WeightPublisher, model_dir: Path) -> None:
    """A publish fails in time, and no completion is claimed to be of its version."""
    with pytest.raises(PublishError) as caught:
        publish(publisher, model_dir, 1, silent=True)
    (report,) = caught.value.report.endpoints
    assert report.outcome is EndpointOutcome.POISONED
    (endpoint,) = publisher.endpoints
    assert publisher.run(endpoint.weight_version).state is EndpointState.POISONED
    with pytest.raises(PoisonedError):
        sample(publisher)
    with pytest.raises(PublishError, match="restart the server"):
        publish(publisher, model_dir, 2, silent=True)


def test_a_server_that_fails_half_way_and_never_says_so_is_poisoned(
    start: Callable[..., tuple[WeightPublisher, Server]], model_dir: Path
) -> None:
    publisher, server = start(timeout_s=5, unknown="model.norm.weight")
    poisoned(publisher, model_dir)
    assert "model.norm.weight" in server.line_with("Error receiving")


def test_a_server_that_is_killed_is_poisoned(
    start: Callable[..., tuple[WeightPublisher, Server]], model_dir: Path
) -> None:
    publisher, server = start(timeout_s=5)
    server.process.kill()
    server.process.wait(timeout=30)
    poisoned(publisher, model_dir)


def test_what_cannot_be_true_is_refused(start: Callable[..., tuple[WeightPublisher, Server]], model_dir: Path) -> None:
    publisher, _ = start()
    with pytest.raises(UnsupportedError, match="keep"):
        publish_weights(PlainWorker(checkpoint(model_dir)), publisher, in_flight="keep")
    with pytest.raises(UnsupportedError, match="seed"):
        sample(publisher, seed=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_what_the_adapter_declares_holds_on_the_stand_in() -> None:
    levels = [
        word for level in ("discovery", "control", "weights", "versions", "caches") for word in ("--level", level)
    ]
    command = [python(), "-m", "inflight", "check", "endpoint", "tests.dialects.fast_llm_factory:start"]
    run = subprocess.run([*command, "--deadline-scale", "3", *levels], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_url_says_what_the_server_does_not_and_nothing_else() -> None:
    with pytest.raises(ConfigError, match="colour"):
        FAST_LLM.connect("http://x:1?colour=red", token=None, control_timeout_s=1, generate_timeout_s=1)
    endpoint = FAST_LLM.connect("http://x:1?dtype=bfloat16", token=None, control_timeout_s=1, generate_timeout_s=1)
    asyncio.run(endpoint.aclose())


def test_the_adapter_is_installed_under_its_name() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inflight.engines"]
    assert import_object(found["fast_llm"]) is FAST_LLM
