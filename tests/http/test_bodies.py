"""What a server reads of a body, and a client of an answer: bounds by route, small errors, parsing beside the loop."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest

from inflight import wire
from inflight.errors import ProtocolError
from inflight.http import bodies
from inflight.http.client import HttpEndpoint
from inflight.http.routes import ROUTES, Route
from inflight.http.server import create_app
from inflight.wire import ErrorBody, GenerateRequest, GenerateResponse, SamplingParams, WireModel
from tests.engine.reference import serving
from tests.gates import until

MAX_MODEL_LEN = 256
TOKEN = "secret"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
by_path = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
with_a_body = pytest.mark.parametrize("route", [r for r in ROUTES if r.request], ids=lambda route: route.path)


@asynccontextmanager
async def application(path: Path) -> AsyncIterator[Any]:
    async with serving(path, max_model_len=MAX_MODEL_LEN, drafts="history") as endpoint:
        yield create_app(endpoint, token=TOKEN)


@dataclass
class Answer:
    """An application's answer, and how many pieces it read of the body."""

    status: int
    body: bytes
    num_read: int

    def error(self) -> str:
        return ErrorBody.model_validate_json(self.body).error.message


async def answer_of(app: Any, route: Route, pieces: list[bytes], headers: dict[str, str]) -> Answer:
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        for piece in pieces:
            num_read += 1
            yield piece

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # Starlette raises what it answers with status 500
    async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=None) as client:
        async with asyncio.timeout(60):
            response = await client.request(route.method, route.path, content=body(), headers=headers)
        return Answer(response.status_code, response.content, num_read)


async def answered(path: Path, route: Route, pieces: list[bytes], headers: dict[str, str]) -> Answer:
    async with application(path) as app:
        return await answer_of(app, route, pieces, headers)


def bound_of(route: Route) -> int:
    return route.request_size.bytes_for(MAX_MODEL_LEN)


# ---------------------------------------------------------------------------------------------------------------
# Bounds of requests


@pytest.mark.parametrize("route", [route for route in ROUTES if route.control], ids=lambda route: route.path)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}], ids=["none", "wrong"])
def test_nothing_is_read_of_a_body_that_comes_without_the_token(
    model_dir: Path, route: Route, headers: dict[str, str]
) -> None:
    call = asyncio.run(answered(model_dir, route, [b" " * 1000] * 100, headers))
    assert (call.status, call.num_read) == (401, 0)


@by_path
def test_nothing_is_read_of_a_body_that_says_that_it_is_too_long(model_dir: Path, route: Route) -> None:
    length = bound_of(route) + 1
    headers = {**AUTHORIZED, "content-length": str(length)}
    call = asyncio.run(answered(model_dir, route, [b" " * 1000] * 100, headers))
    assert (call.status, call.num_read) == (413, 0)
    assert f"{length} bytes, but at most {bound_of(route)}" in call.error()
    assert route.path in call.error()


@by_path
def test_a_body_without_a_length_is_read_up_to_its_bound(model_dir: Path, route: Route) -> None:
    piece = b" " * max(1, bound_of(route) // 10)
    call = asyncio.run(answered(model_dir, route, [piece] * 1000, AUTHORIZED))
    if route.request is None:
        assert (call.status, call.num_read) == (200, 0)
    else:
        assert (call.status, call.num_read) == (413, 11)
        assert f"at most {bound_of(route)}" in call.error()


@by_path
def test_a_bound_is_what_the_route_can_need(route: Route) -> None:
    if route.request is None:
        assert bound_of(route) == 0
    elif not route.control:  # anybody can send it
        assert bound_of(route) < 3 << 20
        assert route.request_size.bytes_for(2 * MAX_MODEL_LEN) > bound_of(route)


def test_the_longest_requests_that_are_valid_are_within_their_bounds() -> None:
    widest = 2**31 - 1
    request = GenerateRequest(
        request_id="\x00" * 256,
        prompt_token_ids=(widest,) * MAX_MODEL_LEN,
        sampling=SamplingParams(stop=("\x00" * 1024,) * 64, stop_token_ids=(widest,) * 4096),
    )
    route = next(route for route in ROUTES if route.request is GenerateRequest)
    assert len(json.dumps(request.model_dump(mode="json"))) <= bound_of(route)


# ---------------------------------------------------------------------------------------------------------------
# Bodies that are wrong many times


def filled(schema: dict[str, Any], definitions: dict[str, Any], bad: Any, num: int) -> list[Any]:
    """Bodies of a schema in which one list holds ``num`` bad elements, one body for each list anywhere in it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        others = {key: it for key, it in definitions.items() if key != name}  # once along a recursive path
        return filled(definitions[name], others, bad, num) if name in definitions else []
    if "anyOf" in schema or "oneOf" in schema:
        return [it for part in schema.get("anyOf", schema.get("oneOf")) for it in filled(part, definitions, bad, num)]
    if schema.get("type") == "array":
        inside = [[it] for it in filled(schema.get("items", {}), definitions, bad, num)]
        return [[bad] * num, *inside]
    properties = schema.get("properties", {})
    return [{key: it} for key, part in properties.items() for it in filled(part, definitions, bad, num)]


def wire_messages() -> list[type[pydantic.BaseModel]]:
    return [kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, WireModel)]


@pytest.mark.parametrize("kind", wire_messages(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bad", [-(2**64), {"a": [1]}, None], ids=["number", "object", "null"])
def test_a_list_of_bad_elements_costs_no_error_for_each(kind: type[pydantic.BaseModel], bad: Any) -> None:
    schema = kind.model_json_schema()
    counts = []
    for num in (1, 1000):
        found = []
        for body in filled(schema, schema.get("$defs", {}), bad, num):
            with pytest.raises(pydantic.ValidationError) as refused:
                kind.model_validate_json(json.dumps(body))
            found.append(refused.value.error_count())
        counts.append(found)
    assert all(many <= one + 1 for one, many in zip(*counts, strict=True))


MANY: dict[str, Callable[[int], bytes]] = {
    "numbers": lambda n: b'{"prompt_token_ids":[' + b"-1," * (n // 3) + b"1]}",
    "keys": lambda n: b"{" + b",".join(b'"%x":1' % i for i in range(n // 10)) + b"}",
    "a key": lambda n: b'{"' + b"x" * n + b'":1}',
    "messages": lambda n: b'{"messages":[' + b"{}," * (n // 3) + b"{}]}",
    "tensors": lambda n: b'{"manifest":{"tensors":[' + b"{}," * (n // 3) + b"{}]}}",
    "brackets": lambda n: b"[" * n,
    "a string": lambda n: b'{"run_id":"' + b"x" * n + b'"}',
    "a number": lambda n: b'{"version":' + b"9" * n + b"}",
}


@with_a_body
def test_a_long_wrong_body_is_refused_in_few_words(
    model_dir: Path, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_listed = 0
    explain = bodies.describe_problems

    def counting(error: pydantic.ValidationError, kind: type[pydantic.BaseModel]) -> str:
        nonlocal most_listed
        text = explain(error, kind)
        if "keys in it are" not in text:
            most_listed = max(most_listed, error.error_count())
        return text

    monkeypatch.setattr(bodies, "describe_problems", counting)

    async def run() -> None:
        async with application(model_dir) as app:
            for kind, body_of in MANY.items():
                body = body_of(min(bound_of(route), 1 << 19) - 200)
                call = await answer_of(app, route, [body], AUTHORIZED)
                assert call.status == 400, kind
                assert len(call.error()) < 3000, kind
                assert call.error().startswith(f"{route.path} cannot accept this body: "), kind

    asyncio.run(run())
    assert most_listed <= 100


def test_an_element_that_is_wrong_is_named_once() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids") as refused:
        asyncio.run(bodies.message_of(GenerateRequest, b'{"request_id":"r","prompt_token_ids":[-1,-2]}'))
    assert str(refused.value) == "prompt_token_ids.0: Input should be greater than or equal to 0 (got -1)"


def test_what_may_be_one_of_several_types_is_explained_in_one_sentence_without_names_of_types() -> None:
    class Body(WireModel):
        stop: str | tuple[str, ...] | None = None

        @pydantic.model_validator(mode="before")
        @classmethod
        def _refuse(cls, data: Any) -> Any:
            if "n" in data:
                raise ValueError("n is not supported: leave it out")
            return data

    for content, words in (
        (b'{"stop":5}', "stop: Input should be a valid string, or a valid array (got 5)"),
        (b'{"n":2}', "n is not supported: leave it out"),
        (b'{"str":1}', "unknown key 'str'; known: stop (got 1)"),
    ):
        with pytest.raises(ValueError, match=r".") as refused:
            asyncio.run(bodies.message_of(Body, content))
        assert str(refused.value) == words


def test_a_manifest_whose_names_all_appear_twice_is_refused_without_comparing_each_with_each() -> None:
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    from inflight.wire import Manifest, TensorSpec

    specs = [TensorSpec(name=f"t{i}", dtype="float32", shape=(1,)) for i in range(500)]
    named = [spec.model_copy(update={"name": Name(spec.name)}) for spec in specs for _ in range(2)]
    with pytest.raises(pydantic.ValidationError, match="twice"):
        Manifest(tensors=tuple(named))
    assert compared < 5000


# ---------------------------------------------------------------------------------------------------------------
# The loop continues


@with_a_body
def test_a_long_body_is_parsed_beside_the_loop_which_answers_meanwhile(
    model_dir: Path, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing, go_on = threading.Event(), threading.Event()
    seen: list[threading.Thread] = []

    def slow(content: bytes) -> Any:
        seen.append(threading.current_thread())
        parsing.set()
        assert go_on.wait(30)
        raise ValueError("it was slow")

    assert route.request is not None
    monkeypatch.setattr(route.request, "model_validate_json", slow)
    version = next(route for route in ROUTES if route.path == "/weight_version")

    async def run() -> None:
        async with application(model_dir) as app:
            body = b" " * min(bound_of(route), 1 << 20)
            long = asyncio.ensure_future(answer_of(app, route, [body], AUTHORIZED))
            await until(parsing.is_set)
            other = await answer_of(app, version, [], {})
            assert other.status == 200
            assert not long.done()
            go_on.set()
            assert (await long).status == 400

    asyncio.run(run())
    assert seen[0] is not threading.main_thread()


# ---------------------------------------------------------------------------------------------------------------
# Answers, as a client takes them


def calls_of(endpoint: HttpEndpoint) -> dict[str, Any]:
    """Every call of a client, by the route's operation."""
    from inflight.wire import (
        AbortRequests,
        BucketTransfer,
        ChatCompletionRequest,
        ChatMessage,
        DraftHistory,
        HttpFileSpec,
        PromptHistory,
        ScoreRequest,
        UpdateRef,
    )
    from tests.unit.test_wire import update

    ref = UpdateRef(run_id="run", version=1)
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=3, n=2))
    chat = ChatCompletionRequest(model="m", messages=(ChatMessage(role="user", content="x"),), max_tokens=3)
    scored = ScoreRequest(request_id="r", token_ids=(1, 2, 3), top_k=2)
    entry = PromptHistory(prompt_token_ids=(1,), completions=((2, 3),), rewards=(0.5,))
    history = DraftHistory(entries=(entry,))
    spec = HttpFileSpec(run_id="run", transport="http", url="http://127.0.0.1:9", token="t", timeout_s=1)
    return {
        "capabilities": endpoint.capabilities,
        "weight_version": endpoint.weight_version,
        "init_process_group": lambda: endpoint.init_process_group(spec),
        "request_weight_update": lambda: endpoint.request_weight_update(update([(0, 0, 3, 72)])),
        "receive_weights": lambda: endpoint.receive_weights(
            BucketTransfer(run_id="run", version=1, bucket_index=0, timeout_s=1)
        ),
        "commit_weight_update": lambda: endpoint.commit_weight_update(ref),
        "abort_weight_update": lambda: endpoint.abort_weight_update(ref),
        "abort_requests": lambda: endpoint.abort_requests(AbortRequests(request_ids=("r",))),
        "release_memory": endpoint.release_memory,
        "restore_memory": endpoint.restore_memory,
        "record_history": lambda: endpoint.record_history(history),
        "generate": lambda: endpoint.generate(request),
        "score": lambda: endpoint.score(scored),
        "chat_completion": lambda: endpoint.chat_completion(chat),
        "health": endpoint.health,
        "generate_stream": lambda: exhausted(endpoint.generate_stream(request)),
        "chat_completion_stream": lambda: exhausted(endpoint.chat_completion_stream(chat)),
    }


async def exhausted(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


OPERATIONS = sorted(calls_of(HttpEndpoint("http://127.0.0.1:9")))


def test_every_route_that_a_client_calls_is_in_the_table() -> None:
    assert {route.operation for route in ROUTES} - set(OPERATIONS) == {"models", "metrics"}


async def sent_by_a_flood(operation: str, head: str, piece: bytes, limit: int) -> int:
    """Bytes that a server which never ends gets rid of before the client abandons, with a `ProtocolError`."""
    num_sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {head}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            while num_sent < limit:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
                num_sent += len(piece)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server, asyncio.timeout(60):
        endpoint = HttpEndpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", token="t")
        with pytest.raises(ProtocolError):
            await calls_of(endpoint)[operation]()
        await endpoint.aclose()
    return num_sent


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("status", ["200 OK", "500 Broken"])
def test_an_answer_that_does_not_end_is_given_up(operation: str, status: str) -> None:
    limit = 24 << 20
    assert asyncio.run(sent_by_a_flood(operation, status, b"1," * 50_000, limit)) < limit // 2


@pytest.fixture(scope="module")
def packed() -> bytes:
    """Sixty-four MiB in gzip."""
    return gzip.compress(b" " * (64 << 20))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_answer_that_is_packed_is_refused_before_it_is_unpacked(operation: str, packed: bytes) -> None:
    assert asyncio.run(sent_by_a_flood(operation, "200 OK\r\ncontent-encoding: gzip", packed, 24 << 20)) < 12 << 20


@pytest.mark.parametrize("operation", [it for it in OPERATIONS if not it.endswith("stream")])
def test_an_answer_that_is_wrong_many_times_is_refused_in_few_words(operation: str) -> None:
    many = b'{"completions":[' + b"{}," * 200_000 + b"{}]}"
    errors: list[ProtocolError] = []

    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(many) + many)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(60):
            endpoint = HttpEndpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", token="t")
            with pytest.raises(ProtocolError) as refused:
                await calls_of(endpoint)[operation]()
            errors.append(refused.value)
            await endpoint.aclose()

    asyncio.run(run())
    assert len(str(errors[0])) < 3000


def test_a_long_answer_is_parsed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[threading.Thread] = []
    parse = GenerateResponse.model_validate_json

    def noting(content: bytes) -> GenerateResponse:
        seen.append(threading.current_thread())
        return parse(content)

    monkeypatch.setattr(GenerateResponse, "model_validate_json", noting)
    completion = {"index": 0, "token_ids": [1] * 50_000, "logprobs": [-1.0] * 50_000, "finish_reason": "length"}
    completion["version_spans"] = [{"version": 0, "start": 0, "end": 50_000}]
    body = json.dumps({"request_id": "r", "completions": [completion]}).encode()

    async def run() -> GenerateResponse:
        return await bodies.message_of(GenerateResponse, body)

    assert len(asyncio.run(run()).completions[0].token_ids) == 50_000
    assert seen[0] is not threading.main_thread()
