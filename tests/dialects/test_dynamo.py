"""Our publisher and requests on a stand-in of Dynamo: two workers behind one frontend."""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.base.extensions import import_object
from inflight.dialects.dynamo import DYNAMO
from inflight.errors import ConfigError, PoisonedError, PublishError, UnsupportedError
from inflight.types import EndpointOutcome
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender
from inflight.wire import GenerateRequest, SamplingParams
from tests.dialects.programs import Program
from tests.gates import reserved_port
from tests.weights.workers import PlainWorker, checkpoint, silenced

UNIFORM = -math.log(258)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[list[int], Callable[[], WeightPublisher]]]]:
    """Start a stand-in of a deployment; returns its ports, and a call that connects a publisher to it."""
    programs: list[Program] = []
    publishers: list[WeightPublisher] = []

    def start(**odd: Any) -> tuple[list[int], Callable[[], WeightPublisher]]:
        ports = [reserved_port() for _ in range(4)]
        told = {"model": str(model_dir), "ports": ports} | odd
        programs.append(Program(tmp_path / "dynamo.log", "tests.dialects.dynamo_deployment", json.dumps(told)))
        deadline = time.monotonic() + 60
        while True:
            try:
                if all(httpx.get(f"http://127.0.0.1:{port}/").status_code == 404 for port in ports):
                    break
            except httpx.ConnectError:
                assert time.monotonic() < deadline, programs[-1].log.read_text()
                time.sleep(0.05)
        query = f"discovery=http://127.0.0.1:{ports[1]}&directory={tmp_path}&model_dir={model_dir}&logprobs=processed"

        def connect() -> WeightPublisher:
            url = f"http://127.0.0.1:{ports[0]}?{query}"
            endpoint = DYNAMO.connect(url, token=None, control_timeout_s=10, generate_timeout_s=60)
            publishers.append(WeightPublisher([endpoint], make_sender("shm"), run_id="run", connect_timeout_s=30))
            return publishers[-1].__enter__()

        return ports, connect

    yield start
    for publisher in publishers:
        publisher.close()
    for program in programs:
        program.stop()


def sample(publisher: WeightPublisher, **sampling: Any) -> Any:
    (endpoint,) = publisher.endpoints
    params = SamplingParams(max_tokens=4, ignore_eos=True, **sampling)
    request = GenerateRequest(request_id="probe", prompt_token_ids=tuple(b"weights"), sampling=params)
    return publisher.run(endpoint.generate, request).completions


def publish(publisher: WeightPublisher, model_dir: Path, version: int) -> Any:
    return publish_weights(PlainWorker(silenced(checkpoint(model_dir)), version), publisher, in_flight="drain")


def labels(ports: list[int]) -> list[str]:
    asked = [httpx.post(f"http://127.0.0.1:{port}/engine/get_weight_version", json={}) for port in ports[2:]]
    return [answer.json()["version"] for answer in asked]


def test_a_publish_reaches_every_worker_and_a_later_client_learns_what_they_serve(
    start: Callable[..., Any], model_dir: Path, tmp_path: Path
) -> None:
    ports, connect = start()
    publisher = connect()
    assert sample(publisher)[0].version_spans[0].version == 0
    publish(publisher, model_dir, 3)
    for completion in sample(publisher, n=2):  # one from each worker
        assert completion.logprobs == pytest.approx([UNIFORM] * 4)
        assert [(span.version, span.end) for span in completion.version_spans] == [(3, 4)]
    assert len(set(labels(ports))) == 1
    assert not list(tmp_path.glob("inflight-*"))

    later = connect()
    (endpoint,) = later.endpoints
    served = later.run(endpoint.weight_version)
    assert (served.version, served.run_id) == (3, "run")
    with pytest.raises(UnsupportedError, match="keep"):
        publish_weights(PlainWorker(checkpoint(model_dir), 4), later, in_flight="keep")


def test_a_worker_that_fails_to_load_poisons_the_deployment_and_no_worker_is_resumed(
    start: Callable[..., Any], model_dir: Path
) -> None:
    ports, connect = start(broken=[1])
    publisher = connect()
    with pytest.raises(PublishError, match="weights do not fit") as caught:
        publish(publisher, model_dir, 1)
    assert [it.outcome for it in caught.value.report.endpoints] == [EndpointOutcome.POISONED]
    with pytest.raises(PoisonedError):
        sample(publisher)
    with pytest.raises(ConfigError, match="different weights"):
        connect()
    body = {"model": "tiny", "prompt": [1], "max_tokens": 1, "temperature": 1.0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"http://127.0.0.1:{ports[0]}/v1/completions", json=body, timeout=0.5)


def test_the_adapter_is_installed_under_its_name() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inflight.engines"]
    assert import_object(found["dynamo"]) is DYNAMO
