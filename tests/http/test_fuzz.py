"""No body that a client can send makes a server say that it failed itself: extremes of every field, and garbage."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.http.routes import ROUTES, STATUS_OF_CODE, Route
from inflight.http.server import create_app
from inflight.weights.encode.buckets import plan_buckets
from tests.http.test_bodies import AUTHORIZED, TOKEN, answer_of
from tests.selection import first_of_each

MAX_MODEL_LEN = 64
LONGEST_S = 0.05
BY_PATH = {route.path: route for route in ROUTES}
ANSWERS = {200, 413, *STATUS_OF_CODE.values()}


class Server:
    """An application in this process, whose loop has a thread of its own."""

    def __init__(self, path: Path, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.endpoint: EmbeddedEndpoint = load_endpoint(path, device="cpu", max_model_len=MAX_MODEL_LEN, drafts="both")
        self._app = create_app(self.endpoint, token=TOKEN)
        self.bodies = valid_bodies(self.endpoint, directory)

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(60)

    def send(self, route: Route, body: bytes) -> tuple[int, bytes]:
        answer = self._run(answer_of(self._app, route, [body], AUTHORIZED))
        return answer.status, answer.body

    def close(self) -> None:
        self._run(self.endpoint.aclose())
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def valid_bodies(endpoint: EmbeddedEndpoint, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Bodies that each route takes."""
    specs = endpoint._manifest.tensors
    manifest = endpoint._manifest.model_dump(mode="json")
    buckets = [bucket.model_dump(mode="json") for bucket in plan_buckets(specs, 1 << 16)]
    ref = {"run_id": "run", "version": 1, "session_id": "s"}
    times = {"deadline_s": 0.05, "lease_s": 0.2}
    update = {**ref, **times, "manifest": manifest, "buckets": buckets, "in_flight": "keep", "staged": True}
    encoded = {**update, "encodings": ["bfloat16", "float8", "delta"], "base": {**ref, "version": 0}, "keep": True}
    lora = {**update, "manifest": {**manifest, "lora": {"rank": 1, "alpha": 1.0, "rslora": True}, "frozen": []}}
    transfer = {**ref, "bucket_index": 0, "timeout_s": LONGEST_S, "checksum": "0" * 32}
    joining = {"run_id": "run", "incarnation": 0, "timeout_s": LONGEST_S}
    group = {"transport": "gloo", "group_name": "g", "master_address": "127.0.0.1", "master_port": 9, "rank": 1}
    sampling = {"n": 2, "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 1}
    text = {"model": endpoint.name, "messages": [{"role": "user", "content": "a"}], "logprobs": True, "user": "u"}
    return {
        "/init_process_group": [
            {**joining, **group, "world_size": 2, "secret": "0" * 64},
            {**joining, "transport": "file", "directory": str(directory)},
            {**joining, "transport": "shm", "directory": str(directory)},
            {**joining, "transport": "http", "url": "http://127.0.0.1:9/x", "token": "t"},
        ],
        "/request_weight_update": [update, encoded, lora],
        "/receive_weights": [transfer, {**transfer, "encoding": "float8", "size_bytes": 100}],
        "/commit_weight_update": [ref],
        "/abort_weight_update": [ref],
        "/abort_requests": [{"request_ids": ["r", "s"]}],
        "/record_history": [{"entries": [{"prompt_token_ids": [1], "completions": [[2], []], "rewards": [0.5, -1]}]}],
        "/v1/generate": [
            {"request_id": "r", "prompt_token_ids": [1, 2], "sampling": {**sampling, "stop": ["x"]}, "stream": False},
            {"request_id": "r", "prompt_token_ids": [1], "sampling": {**sampling, "stop_token_ids": [5]}},
        ],
        "/v1/score": [
            {"request_id": "r", "token_ids": [1, 2, 3], "start": 2, "top_k": 2, "candidates": [[4, 5]]},
            {"request_id": "r", "token_ids": [1, 2]},
        ],
        "/v1/chat/completions": [{**text, **sampling, "stop": ["x", "y"]}, {**text, **sampling, "stop": "x"}],
    }


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(model_dir, tmp_path_factory.mktemp("stored"))
    yield server
    server.close()


# ---------------------------------------------------------------------------------------------------------------
# What is put into bodies

NUMBERS = [0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**64), 10**400]
FLOATS = [0.0, -0.0, 5e-324, 1e-46, 1.5e-45, 1e-38, 0.5, 1 - 2**-53, 1.0, 1e10, 1e308, -1e308, math.inf, math.nan]
TEXTS = ["", " ", "\x00", "a\nb", "x" * 5000, "é\U0001f600", "../..", "/", "%00", "[", "http://[", "http://a:b", "a..b"]
OTHERS = [None, True, False, [], {}, [[]], [None], [1.5], ["a"], {"a": 1}, [0] * 100, [[1] * 3] * 3]
EXTREMES = [*NUMBERS, *FLOATS, *TEXTS, *OTHERS]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside of a body; of a list its first elements."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The body with another value in one place. A time that would be waited for is cut."""
    if str(path[-1]).endswith("_s") and isinstance(value, int | float) and LONGEST_S < value <= 604800:
        value = LONGEST_S
    body = copy.deepcopy(body)
    inside = body
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return body


def require_no_failure(server: Server, path: str, body: bytes) -> None:
    status, answer = server.send(BY_PATH[path], body)
    assert status in ANSWERS, (status, answer[:2000], body[:2000])
    assert b"Traceback" not in answer
    assert server.endpoint._engine.failure is None


PATHS = [route.path for route in ROUTES if route.request is not None]


@pytest.mark.parametrize("path", PATHS)
def test_a_valid_body_is_not_refused_for_its_form(server: Server, path: str) -> None:
    for body in server.bodies[path]:
        status, answer = server.send(BY_PATH[path], json.dumps(body).encode())
        assert b"cannot use this body" not in answer
        assert status in ANSWERS - {413}, answer


SHARES = first_of_each(range(4), lambda _: "any")
"""Each share has a fourth of the extremes for each place, the next place the next fourth."""


def extremes(share: int, index: int) -> list[Any]:
    return EXTREMES[(share + index) % len(SHARES) :: len(SHARES)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("path", PATHS)
def test_no_extreme_of_any_field_is_an_error_of_the_server(server: Server, path: str, share: int) -> None:
    for body in server.bodies[path]:
        for index, place in enumerate(places(body)):
            if path == "/request_weight_update" and len(place) > 4:
                continue  # the second tensor is like the first
            for value in extremes(share, index):
                require_no_failure(server, path, json.dumps(changed(body, place, value)).encode())


json_values = st.recursive(
    st.sampled_from(EXTREMES) | st.text(max_size=5) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("share", SHARES)
def test_no_extreme_of_a_transfer_is_an_error_while_its_update_is_open(
    server: Server, tmp_path: Path, share: int
) -> None:
    join = {"run_id": "stored", "transport": "file", "directory": str(tmp_path), "timeout_s": LONGEST_S}
    for i, update in enumerate(server.bodies["/request_weight_update"][:2]):
        (tmp_path / "stored").mkdir(exist_ok=True)
        assert server.send(BY_PATH["/init_process_group"], json.dumps(join).encode())[0] == 200
        transfers = [
            changed(body, place, value)
            for body in server.bodies["/receive_weights"]
            for index, place in enumerate(places(body))
            for value in extremes(share, index)
        ]
        for number, transfer in enumerate(transfers):
            session = {"run_id": "stored", "session_id": f"s{i}-{number}", "version": 1}
            opened = {
                **update,
                **session,
                "base": None,
                "encodings": ["bfloat16", "float8"] if i else [],
                "keep": False,
            }
            assert server.send(BY_PATH["/request_weight_update"], json.dumps(opened).encode())[0] == 200
            for key in ("run_id", "session_id"):
                if transfer.get(key) in ("run", "s"):
                    transfer[key] = session[key]
            require_no_failure(server, "/receive_weights", json.dumps(transfer).encode())
            require_no_failure(server, "/abort_weight_update", json.dumps(session).encode())
            assert server.send(BY_PATH["/init_process_group"], json.dumps(join).encode())[0] == 200


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_garbage_is_an_error_of_the_server(server: Server, path: str, data: st.DataObject) -> None:
    body: Any = copy.deepcopy(data.draw(st.sampled_from(server.bodies[path])))
    for _ in range(data.draw(st.integers(0, 3))):
        where = list(places(body))
        if where:
            body = changed(body, data.draw(st.sampled_from(where)), data.draw(json_values))
    if isinstance(body, dict) and data.draw(st.booleans()):
        body.pop(data.draw(st.sampled_from(sorted(body))), None)
    content = json.dumps(body).encode()
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(content)))
        content = content[:at] + data.draw(st.binary(max_size=8)) + content[at + data.draw(st.integers(0, 8)) :]
    require_no_failure(server, path, content)


def test_sampling_at_the_edges_of_every_parameter_draws_what_can_be_drawn(server: Server) -> None:
    edges = {
        "temperature": [0, 5e-324, 1e-46, 1e-38, 100],
        "top_p": [5e-324, 1e-46, 1.5e-45, 1e-38, 1 - 2**-53, 1],
        "top_k": [0, 1, 2**31 - 1],
        "min_p": [0, 5e-324, 1 - 2**-53],
        "seed": [-(2**63), 0, 2**64 - 1],
    }
    for name, values in edges.items():
        for value in values:
            for others in ({}, {"top_k": 2, "top_p": 1e-46, "min_p": 1 - 2**-53}):
                sampling = {"max_tokens": 4, "ignore_eos": True, **others, name: value}
                body = {"request_id": "r", "prompt_token_ids": [1, 2], "sampling": sampling}
                status, answer = server.send(BY_PATH["/v1/generate"], json.dumps(body).encode())
                assert status == 200, (sampling, answer)
                completion = json.loads(answer)["completions"][0]
                assert all(math.isfinite(it) and it <= 1e-6 for it in completion["logprobs"]), sampling
                assert max(completion["token_ids"]) < 258
