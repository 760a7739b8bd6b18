"""Our publisher drives servers of PipelineRL: by its route, over real sockets and a real group of gloo."""

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

from inflight.base.extensions import import_object
from inflight.contracts import InferenceEndpoint
from inflight.dialects.pipelinerl.endpoint import PIPELINERL, PipelineRlEndpoint
from inflight.errors import ConfigError, PoisonedError, PublishError, UnsupportedError
from inflight.types import EndpointOutcome
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender
from inflight.wire import ChatCompletionRequest, ChatMessage, EndpointState, GenerateRequest, SamplingParams
from tests.dialects.programs import Program
from tests.gates import reserved_port
from tests.weights.workers import PlainWorker, checkpoint, silenced
from tests.zygote import python

UNIFORM = -math.log(258)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., WeightPublisher]]:
    """Start a stand-in of a server, and a publisher that is connected to it."""
    programs: list[Program] = []
    publishers: list[WeightPublisher] = []

    def start(**odd: Any) -> WeightPublisher:
        told = {"model": str(model_dir), "port": reserved_port(), "group_port": reserved_port()} | odd
        programs.append(Program(tmp_path / "server.log", "tests.dialects.pipelinerl_server", json.dumps(told)))
        url = f"http://127.0.0.1:{told['port']}?group=tcp://127.0.0.1:{told['group_port']}&timeout_s=20"
        endpoint = PIPELINERL.connect(url, token=None, control_timeout_s=10, generate_timeout_s=60)
        publisher = WeightPublisher([endpoint], make_sender("shm"), run_id="run", connect_timeout_s=60)
        publishers.append(publisher)
        return publisher.__enter__()

    yield start
    for publisher in publishers:
        publisher.close()
    for program in programs:
        program.stop()


def sample(publisher: WeightPublisher, max_tokens: int = 4, **sampling: Any) -> Any:
    (endpoint,) = publisher.endpoints
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    name = f"probe-{max_tokens}"
    request = GenerateRequest(request_id=name, prompt_token_ids=tuple(b"weights"), sampling=params)
    return publisher.run(endpoint.generate, request)


def publish(publisher: WeightPublisher, model_dir: Path, version: int, *, silent: bool) -> Any:
    tensors = checkpoint(model_dir)
    worker = PlainWorker(silenced(tensors) if silent else tensors, version)
    return publish_weights(worker, publisher, in_flight="drain", deadline_s=30)


def test_our_publishes_arrive_and_completions_carry_the_version_that_sampled_them(
    start: Callable[..., WeightPublisher], model_dir: Path
) -> None:
    publisher = start()
    (can,) = publisher.endpoints.values()
    assert (can.engine, can.version_binding, [str(p) for p in can.in_flight_policies]) == (
        "pipelinerl",
        "admission",
        ["drain"],
    )
    assert sample(publisher).completions[0].version_spans[0].version == 0
    publish(publisher, model_dir, 1, silent=True)
    completion = sample(publisher, n=2).completions[1]
    assert completion.logprobs == pytest.approx([UNIFORM] * 4)
    assert [(span.version, span.end) for span in completion.version_spans] == [(1, 4)]

    (endpoint,) = publisher.endpoints
    messages = (ChatMessage(role="user", content="hello"),)
    chat = publisher.run(endpoint.chat_completion, ChatCompletionRequest(model="tiny", messages=messages, max_tokens=3))
    assert len(chat.choices[0].token_ids) == 3
    assert chat.choices[0].version_spans[0].version == 1

    publish(publisher, model_dir, 2, silent=False)
    assert sample(publisher).completions[0].logprobs != pytest.approx([UNIFORM] * 4)


def test_what_cannot_be_true_is_refused(start: Callable[..., WeightPublisher], model_dir: Path) -> None:
    publisher = start()
    with pytest.raises(UnsupportedError, match="keep"):
        publish_weights(PlainWorker(checkpoint(model_dir)), publisher, in_flight="keep")
    with pytest.raises(UnsupportedError, match="seed"):
        sample(publisher, seed=1)


def test_an_update_waits_for_the_completions_that_run_so_that_each_is_of_one_version(
    start: Callable[..., WeightPublisher], model_dir: Path
) -> None:
    publisher = start(step_s=0.02)
    running: Future[Any] = Future()
    threading.Thread(target=lambda: running.set_result(sample(publisher, 30, n=2)), daemon=True).start()
    (endpoint,) = publisher.endpoints
    while publisher.run(endpoint.weight_version).num_running < 2:
        pass
    publish(publisher, model_dir, 1, silent=True)
    before = running.result(timeout=30).completions
    assert {span.version for completion in before for span in completion.version_spans} == {0}
    assert UNIFORM not in [pytest.approx(logprob) for completion in before for logprob in completion.logprobs]
    assert sample(publisher).completions[0].logprobs == pytest.approx([UNIFORM] * 4)


def test_a_server_that_fails_half_way_is_poisoned_and_never_reported_as_updated(
    start: Callable[..., WeightPublisher], model_dir: Path
) -> None:
    publisher = start(unknown="model.norm.weight")
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


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_what_the_adapter_declares_holds_on_the_stand_in() -> None:
    levels = [
        word for level in ("discovery", "control", "weights", "versions", "caches") for word in ("--level", level)
    ]
    command = [python(), "-m", "inflight", "check", "endpoint", "tests.dialects.pipelinerl_factory:start"]
    run = subprocess.run([*command, "--deadline-scale", "3", *levels], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_url_says_what_the_server_does_not_and_nothing_else() -> None:
    with pytest.raises(ConfigError, match="colour"):
        PIPELINERL.connect("http://x:1?colour=red", token=None, control_timeout_s=1, generate_timeout_s=1)
    endpoint: InferenceEndpoint = PIPELINERL.connect(
        "http://x:1?dtype=bfloat16&max_concurrent=8", token=None, control_timeout_s=1, generate_timeout_s=1
    )
    assert isinstance(endpoint, PipelineRlEndpoint)
    asyncio.run(endpoint.aclose())


def test_the_adapter_is_installed_under_its_name() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inflight.engines"]
    assert import_object(found["pipelinerl"]) is PIPELINERL
