"""The routes of a real server: tokens, refusals, disconnects, health, metrics, streams."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.http.routes import ROUTES, Route
from inflight.wire import (
    Capabilities,
    Completion,
    CompletionChunk,
    ErrorBody,
    ErrorDetail,
    GenerateResponse,
    Health,
    ModelList,
    WeightVersion,
)
from tests.gates import BrakedServer, wait_until
from tests.servers import TOKEN, ServerProcess
from tests.zygote import python

WAIT_S = 60.0
CONTROL_ROUTES = [route for route in ROUTES if route.control]
OPEN_ROUTES = [route for route in ROUTES if not route.control]


@pytest.fixture(scope="module")
def client(shared_server: ServerProcess) -> httpx.Client:
    with httpx.Client(base_url=shared_server.url, timeout=WAIT_S, trust_env=False) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> ErrorDetail:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return ErrorBody.model_validate_json(response.content).error


def num_running(client: httpx.Client) -> int:
    return WeightVersion.model_validate_json(client.get("/weight_version").content).num_running


def metrics_of(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").raise_for_status().text
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


# ---------------------------------------------------------------------------------------------------------------
# Tokens


def test_the_control_routes_are_those_that_change_what_is_served_or_end_requests() -> None:
    assert {route.path for route in CONTROL_ROUTES} == {
        "/init_process_group",
        "/request_weight_update",
        "/receive_weights",
        "/commit_weight_update",
        "/abort_weight_update",
        "/abort_requests",
        "/release_memory",
        "/restore_memory",
        "/record_history",
    }


@pytest.mark.parametrize("route", CONTROL_ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({}, "missing"),
        ({"authorization": "Bearer wrong"}, "wrong"),
        ({"authorization": f"Bearer {TOKEN}x"}, "wrong"),
        ({"authorization": TOKEN}, "wrong"),
        ({"authorization": "Bearer"}, "wrong"),
        ([(b"authorization", b"Bearer \xff\xfe")], "wrong"),
    ],
    ids=["missing", "wrong", "longer", "no-scheme", "empty", "no-text"],
)
def test_a_control_route_refuses_a_call_without_its_token_before_reading_it(
    client: httpx.Client, route: Route, headers: dict[str, str], what: str
) -> None:
    error = error_of(client.request(route.method, route.path, content=b"not even json", headers=headers), 401)
    assert error.code == "unauthorized"
    assert error.message == f"the bearer token for {route.path} is {what}"
    assert TOKEN not in error.message


@pytest.mark.parametrize("route", CONTROL_ROUTES, ids=lambda route: route.path)
def test_a_control_route_takes_its_token(client: httpx.Client, route: Route) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    if route.request is None:
        assert client.request(route.method, route.path, headers=headers).status_code == 200
        client.post("/restore_memory", headers=headers)  # for the other tests
        return
    error = error_of(client.request(route.method, route.path, content=b"{}", headers=headers), 400)
    assert " is missing" in error.message


@pytest.mark.parametrize("route", OPEN_ROUTES, ids=lambda route: route.path)
def test_the_other_routes_need_no_token(client: httpx.Client, route: Route) -> None:
    body = b"{}" if route.request is not None else None
    assert client.request(route.method, route.path, content=body).status_code == (400 if body else 200)


# ---------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize("path", ["/", "/v1/completions", "/generate", "/capabilities/", "/v1/generate/x"])
def test_an_unknown_route_lists_the_known_ones(client: httpx.Client, path: str) -> None:
    error = error_of(client.post(path, content=b"{}"), 404)
    assert path in error.message
    for route in ROUTES:
        assert f"{route.method} {route.path}" in error.message


def test_a_wrong_method_is_refused_with_the_known_routes(client: httpx.Client) -> None:
    error = error_of(client.get("/v1/generate"), 405)
    assert "GET /v1/generate" in error.message
    assert "POST /v1/generate" in error.message


GENERATE_BODY = {"request_id": "r", "prompt_token_ids": [1, 2], "sampling": {"max_tokens": 2}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nonsense": 1}, ("unknown key 'nonsense'", "known: request_id")),
        ({"prompt_token_ids": []}, ("prompt_token_ids", "at least 1", "(got [])")),
        ({"prompt_token_ids": [1, -5]}, ("prompt_token_ids.1", "(got -5)")),
        ({"prompt_token_ids": "text"}, ("prompt_token_ids", "'text'")),
        ({"prompt_token_ids": [1, 1.5]}, ("prompt_token_ids.1", "1.5")),
        ({"request_id": ""}, ("request_id", "at least 1")),
        ({"sampling": {"temperature": -1}}, ("sampling.temperature", "(got -1)")),
        ({"sampling": {"temperature": "NaN"}}, ("sampling.temperature",)),
        ({"sampling": {"top_p": 0}}, ("sampling.top_p", "(got 0)")),
        ({"sampling": {"min_p": 1}}, ("sampling.min_p", "(got 1)")),
        ({"sampling": {"max_tokens": 0}}, ("sampling.max_tokens", "(got 0)")),
        ({"sampling": {"n": 2000}}, ("sampling.n", "1024", "(got 2000)")),
        ({"sampling": {"stop": [""]}}, ("sampling.stop.0", "at least 1")),
        ({"sampling": {"topk": 5}}, ("unknown key 'sampling.topk'", "did you mean sampling.top_k?")),
        ({"sampling": {"max_tokens": 5000}}, ("max_tokens=5000", "1024")),
        pytest.param({"prompt_token_ids": [1] * 1024}, ("1024 tokens",), id="long-prompt"),
        ({"prompt_token_ids": [258]}, ("258",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_that_cannot_be_used_is_refused_by_key_and_value(
    client: httpx.Client, change: dict[str, object], words: tuple[str, ...], stream: bool
) -> None:
    error = error_of(client.post("/v1/generate", json={**GENERATE_BODY, **change, "stream": stream}), 400)
    assert error.code == "invalid_request"
    for word in words:
        assert word in error.message


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b'"text"', b"\xff\xfe", b'{"request_id": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, content: bytes) -> None:
    error = error_of(client.post("/v1/generate", content=content), 400)
    assert error.message.startswith("/v1/generate cannot accept this body: ")


def test_a_long_wrong_value_is_quoted_in_part(client: httpx.Client) -> None:
    error = error_of(client.post("/v1/generate", json={**GENERATE_BODY, "stream": "x" * 100_000}), 400)
    assert "stream" in error.message
    assert len(error.message) < 500


# ---------------------------------------------------------------------------------------------------------------
# Generation


def test_generate_answers_the_contract(client: httpx.Client) -> None:
    body = {"request_id": "r", "prompt_token_ids": [72, 105], "sampling": {"n": 2, "max_tokens": 9, "ignore_eos": True}}
    answer = GenerateResponse.model_validate_json(client.post("/v1/generate", json=body).raise_for_status().content)
    assert answer.request_id == "r"
    for index, completion in enumerate(answer.completions):
        assert (completion.index, len(completion.token_ids), completion.finish_reason) == (index, 9, "length")


def test_a_stream_joins_to_the_answer_of_generate(client: httpx.Client) -> None:
    body = {"request_id": "r", "prompt_token_ids": [5, 6, 7], "sampling": {"n": 2, "max_tokens": 40, "seed": 3}}
    answer = GenerateResponse.model_validate_json(client.post("/v1/generate", json=body).raise_for_status().content)
    with client.stream("POST", "/v1/generate", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [CompletionChunk.model_validate_json(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(chunks) > 2
    for completion in answer.completions:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert tuple(t for chunk in mine for t in chunk.token_ids) == completion.token_ids
        # float32: the batch differs when one of two completions ends earlier.
        assert [x for chunk in mine for x in chunk.logprobs] == pytest.approx(list(completion.logprobs), abs=1e-4)
        assert mine[-1].finish_reason == completion.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_ends_its_request(braked_server: BrakedServer, stream: bool) -> None:
    body = {
        "request_id": "leaves",
        "prompt_token_ids": [1],
        "sampling": {"n": 30, "ignore_eos": True},
        "stream": stream,
    }
    with (
        httpx.Client(base_url=braked_server.url, timeout=WAIT_S, trust_env=False) as client,
        braked_server.brake,  # nothing else ends it
    ):
        address = client.base_url.host, client.base_url.port
        with socket.create_connection(address, timeout=WAIT_S) as connection:
            content = json.dumps(body).encode()
            head = f"POST /v1/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            wait_until(lambda: num_running(client) == 30, "30 completions do not run")
        wait_until(lambda: num_running(client) == 0, "the request continues")


CHAT_CLIENT = """
import asyncio, signal, sys
from inflight.http.client import HttpEndpoint
from inflight.wire import ChatCompletionRequest, ChatMessage

signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background of a shell ignores it

async def main():
    messages = (ChatMessage(role="user", content="Hello"),)
    asked = ChatCompletionRequest(model="tiny", messages=messages, n=2, ignore_eos=True, stream=True)
    async for chunk in HttpEndpoint(sys.argv[1]).chat_completion_stream(asked):
        print("token", flush=True)

asyncio.run(main())
"""


def test_ctrl_c_in_a_client_ends_its_streamed_chat_on_the_server(braked_server: BrakedServer, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CHAT_CLIENT)
    with (
        httpx.Client(base_url=braked_server.url, timeout=WAIT_S, trust_env=False) as client,
        braked_server.brake,  # nothing else ends it
        subprocess.Popen(
            [python(), str(tmp_path / "client.py"), braked_server.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as program,
    ):
        try:
            assert program.stdout.readline() == "token\n"
            assert num_running(client) == 2
            program.send_signal(signal.SIGINT)
            _, printed = program.communicate(timeout=WAIT_S)
        finally:
            program.kill()
        assert printed.rstrip().endswith("KeyboardInterrupt")
        wait_until(lambda: num_running(client) == 0, "the request continues")


# ---------------------------------------------------------------------------------------------------------------
# Discovery


def test_health_capabilities_and_version_of_an_idle_server(client: httpx.Client) -> None:
    health = Health.model_validate_json(client.get("/health").raise_for_status().content)
    assert (health.ok, health.state, health.version) == (True, "ready", 0)
    version = WeightVersion.model_validate_json(client.get("/weight_version").content)
    assert (version.state, version.version, version.run_id, version.updating_to) == ("ready", 0, None, None)
    declared = Capabilities.model_validate_json(client.get("/capabilities").content)
    assert (declared.model, declared.vocab_size, declared.max_model_len) == ("tiny", 258, 1024)
    assert set(declared.in_flight_policies) == {"keep", "recompute", "drain", "abort"}
    assert (declared.version_binding, declared.logprob_kind) == ("spans", "processed")


def test_models_lists_the_served_model(client: httpx.Client) -> None:
    (card,) = ModelList.model_validate_json(client.get("/v1/models").raise_for_status().content).data
    assert card.id == "tiny"


def test_the_served_openapi_document_is_that_of_the_package(client: httpx.Client) -> None:
    from inflight.http.openapi import openapi_document

    assert client.get("/openapi.json").json() == json.loads(json.dumps(openapi_document()))


def test_metrics_parse_and_count_tokens(client: httpx.Client) -> None:
    before = metrics_of(client)
    body = {"request_id": "m", "prompt_token_ids": [1] * 5, "sampling": {"n": 3, "max_tokens": 7, "ignore_eos": True}}
    answer = GenerateResponse.model_validate_json(client.post("/v1/generate", json=body).content)
    assert [len(completion.token_ids) for completion in answer.completions] == [7, 7, 7]
    after = metrics_of(client)
    assert after["inflight_completion_tokens_total"] - before["inflight_completion_tokens_total"] == 21
    assert after["inflight_finished_sequences_total"] - before["inflight_finished_sequences_total"] == 3
    assert after["inflight_prompt_tokens_total"] - before["inflight_prompt_tokens_total"] >= 5
    assert after["inflight_running_sequences"] == after["inflight_waiting_sequences"] == 0
    assert after["inflight_weight_version"] == after["inflight_poisoned"] == 0


def test_a_completion_as_served_is_valid_by_the_contract(client: httpx.Client) -> None:
    body = {"request_id": "v", "prompt_token_ids": [9], "sampling": {"n": 4, "max_tokens": 5}}
    for completion in client.post("/v1/generate", json=body).json()["completions"]:
        Completion.model_validate(completion)
