"""The HTTP client: it satisfies the contract, and whatever a peer does becomes one of our errors in time."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from inflight import errors
from inflight.contracts import AbortingEndpoint, InferenceEndpoint, StreamingEndpoint
from inflight.errors import (
    DeadlineError,
    EndpointError,
    InflightError,
    InvalidRequestError,
    ProtocolError,
    PublishError,
    UnauthorizedError,
    UnreachableError,
    error_from_code,
)
from inflight.http.client import HttpEndpoint
from inflight.types import EndpointOutcome, EndpointReport, PublishReport, PublishSpans
from inflight.wire import (
    AbortRequests,
    BucketSpec,
    BucketTransfer,
    ChatCompletionRequest,
    ChatMessage,
    DraftHistory,
    EndpointState,
    ErrorBody,
    ErrorDetail,
    GenerateRequest,
    GenerateResponse,
    Health,
    Manifest,
    ProcessGroupSpec,
    PromptHistory,
    SamplingParams,
    ScoreRequest,
    TensorSpec,
    UpdateRef,
    WeightUpdate,
)
from tests.engine.reference import make_request
from tests.gates import SOON_S, BrakedServer, until
from tests.servers import TOKEN, ServerProcess

REQUEST = make_request("r", [72, 105], n=2, max_tokens=30, seed=6)
GROUP = ProcessGroupSpec(
    run_id="run",
    transport="gloo",
    group_name="group",
    master_address="127.0.0.1",
    master_port=9,
    secret="0" * 64,
    rank=1,
    world_size=2,
    timeout_s=0.5,
)
UPDATE = WeightUpdate(
    run_id="run",
    version=1,
    manifest=Manifest(tensors=(TensorSpec(name="w", dtype="float32", shape=(2,)),)),
    buckets=(BucketSpec(index=0, start=0, stop=1, size_bytes=8),),
    in_flight="keep",
    deadline_s=0.5,
    lease_s=5.0,
)
HISTORY = DraftHistory(entries=(PromptHistory(prompt_token_ids=(1,), completions=((2,),), rewards=(1.0,)),))
SCORED = ScoreRequest(request_id="r", token_ids=(1, 2, 3))
CHAT = ChatCompletionRequest(model="tiny", messages=(ChatMessage(role="user", content="x"),), max_tokens=3)


async def exhaust(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def runs(endpoint: HttpEndpoint, num_sequences: int) -> bool:
    return (await endpoint.weight_version()).num_running == num_sequences


CALLS: dict[str, Callable[[HttpEndpoint], Awaitable[Any]]] = {
    "capabilities": lambda e: e.capabilities(),
    "weight_version": lambda e: e.weight_version(),
    "health": lambda e: e.health(timeout_s=0.5),
    "init_process_group": lambda e: e.init_process_group(GROUP),
    "request_weight_update": lambda e: e.request_weight_update(UPDATE),
    "receive_weights": lambda e: e.receive_weights(
        BucketTransfer(run_id="run", version=1, bucket_index=0, timeout_s=0.5)
    ),
    "commit_weight_update": lambda e: e.commit_weight_update(UpdateRef(run_id="run", version=1)),
    "abort_weight_update": lambda e: e.abort_weight_update(UpdateRef(run_id="run", version=1)),
    "abort_requests": lambda e: e.abort_requests(AbortRequests(request_ids=("r",))),
    "record_history": lambda e: e.record_history(HISTORY),
    "generate": lambda e: e.generate(REQUEST),
    "score": lambda e: e.score(SCORED),
    "chat_completion": lambda e: e.chat_completion(CHAT),
    "generate_stream": lambda e: exhaust(e.generate_stream(REQUEST)),
    "chat_completion_stream": lambda e: exhaust(e.chat_completion_stream(CHAT)),
}


@contextlib.asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[HttpEndpoint]:
    endpoint = HttpEndpoint(url, **options)
    try:
        async with asyncio.timeout(60):
            yield endpoint
    finally:
        await endpoint.aclose()


@contextlib.asynccontextmanager
async def answering(content: bytes) -> AsyncIterator[str]:
    """A server that answers every connection with these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(content)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def http(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def errors_raised(content: bytes, *names: str, **options: Any) -> dict[str, InflightError]:
    """What each call (all of them by default) raises when its peer answers ``content``."""

    async def run() -> dict[str, InflightError]:
        raised = {}
        async with answering(content) as url, connected(url, token=TOKEN, **options) as endpoint:
            for name in names or CALLS:
                with pytest.raises(InflightError) as error:
                    await CALLS[name](endpoint)
                assert str(error.value).startswith(url)
                raised[name] = error.value
        return raised

    return asyncio.run(run())


def kinds_raised(content: bytes, *names: str) -> set[type[InflightError]]:
    return {type(error) for error in errors_raised(content, *names).values()}


# ---------------------------------------------------------------------------------------------------------------
# With a real server


def test_the_client_is_a_streaming_and_an_aborting_endpoint() -> None:
    endpoint = HttpEndpoint("http://127.0.0.1:1/")
    assert isinstance(endpoint, InferenceEndpoint)
    assert isinstance(endpoint, StreamingEndpoint)
    assert isinstance(endpoint, AbortingEndpoint)
    assert endpoint.name == "http://127.0.0.1:1"


def test_every_call_of_generation_and_discovery_works_over_http(shared_server: ServerProcess) -> None:
    async def run() -> None:
        async with connected(shared_server.url) as endpoint:
            assert (await endpoint.capabilities()).model == "tiny"
            assert (await endpoint.weight_version()).state is EndpointState.READY
            assert (await endpoint.health()).ok
            response = await endpoint.generate(REQUEST)
            chunks = await exhaust(endpoint.generate_stream(REQUEST))
            for completion in response.completions:
                mine = [chunk for chunk in chunks if chunk.index == completion.index]
                assert tuple(t for chunk in mine for t in chunk.token_ids) == completion.token_ids
                assert mine[-1].finish_reason == completion.finish_reason
            chat = await endpoint.chat_completion(CHAT)
            assert chat.usage.completion_tokens == len(chat.choices[0].token_ids)
            seeded = CHAT.model_copy(update={"seed": 1, "max_tokens": 20})
            text = (await endpoint.chat_completion(seeded)).choices[0].message.content
            parts = await exhaust(endpoint.chat_completion_stream(seeded))
            assert "".join(part.choices[0].delta.content for part in parts) == text

    asyncio.run(run())


def test_a_request_that_another_client_aborts_returns_what_it_has(braked_server: BrakedServer) -> None:
    long = make_request("aborted", [72, 105], n=2, ignore_eos=True)

    async def run() -> GenerateResponse:
        async with connected(braked_server.url) as endpoint, connected(braked_server.url, token=TOKEN) as another:
            with braked_server.brake:
                answer = asyncio.ensure_future(endpoint.generate(long))
                await until(lambda: runs(another, 2))
                await another.abort_requests(AbortRequests(request_ids=("never seen", "aborted")))
                return await answer

    for completion in asyncio.run(run()).completions:
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) == completion.version_spans[-1].end


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_is_refused_by_class_on_this_side_too(shared_server: ServerProcess, stream: bool) -> None:
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,) * 2000, sampling=SamplingParams(max_tokens=1))

    async def run() -> str:
        async with connected(shared_server.url) as endpoint:
            with pytest.raises(InvalidRequestError) as refused:
                await (exhaust(endpoint.generate_stream(request)) if stream else endpoint.generate(request))
            return str(refused.value)

    message = asyncio.run(run())
    assert message.startswith(shared_server.url)
    assert "2000 tokens" in message


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_control_call_without_the_right_token_is_unauthorized(
    shared_server: ServerProcess, token: str | None
) -> None:
    async def run() -> None:
        async with connected(shared_server.url, token=token) as endpoint:
            with pytest.raises(UnauthorizedError, match=r"token .* is (missing|wrong)\. Pass .* \$INFLIGHT_TOKEN"):
                await endpoint.abort_weight_update(UpdateRef(run_id="run", version=1))

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_a_call_ends_the_request_on_the_server(braked_server: BrakedServer, stream: bool) -> None:
    request = make_request("cancelled", [1], n=20, ignore_eos=True)

    async def run() -> None:
        async with connected(braked_server.url) as endpoint:
            call = exhaust(endpoint.generate_stream(request)) if stream else endpoint.generate(request)
            with braked_server.brake:
                task = asyncio.ensure_future(call)
                await until(lambda: runs(endpoint, 20))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until(lambda: runs(endpoint, 0))

    asyncio.run(run())


def test_a_server_that_hangs_is_a_deadline_error_in_time_and_one_that_dies_is_unreachable(
    start_server: Callable[..., ServerProcess], model_dir: Path
) -> None:
    server = start_server(model_dir)

    async def deadline_of(endpoint: HttpEndpoint, name: str) -> None:
        started = time.monotonic()
        with pytest.raises(DeadlineError, match=r"received no answer within \d") as raised:
            await CALLS[name](endpoint)
        assert raised.value.endpoint == server.url
        # Calls that carry a deadline wait five seconds longer, so that the server's own reason can arrive.
        assert time.monotonic() - started < SOON_S

    async def run() -> None:
        async with (
            connected(server.url) as patient,
            connected(server.url, token=TOKEN, control_timeout_s=2.0, generate_timeout_s=2.0) as hasty,
        ):
            await hasty.health()
            running = [
                asyncio.ensure_future(patient.generate(make_request("plain", [1], n=20, ignore_eos=True))),
                asyncio.ensure_future(
                    exhaust(patient.generate_stream(make_request("stream", [1], n=20, ignore_eos=True)))
                ),
            ]
            await until(lambda: runs(patient, 40))
            server.stop_in_place()
            await asyncio.gather(*(deadline_of(hasty, name) for name in CALLS))
            server.kill()
            for call in running:
                with pytest.raises(UnreachableError, match="check that the server is running"):
                    await call

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------------------------
# With peers that are no server of ours


def test_a_port_where_nobody_listens_is_unreachable() -> None:
    async def run(url: str) -> None:
        async with connected(url, token=TOKEN) as endpoint:
            for call in CALLS.values():
                with pytest.raises(UnreachableError, match="check that the server is running"):
                    await call(endpoint)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        asyncio.run(run(f"http://127.0.0.1:{unused.getsockname()[1]}"))


@pytest.mark.parametrize(
    "content",
    [
        http(b"<html>It works!</html>"),
        http(b'{"status": "fine"}'),
        http(b""),
        http(b"[1, 2]"),
        http(b"\xff\xfe\x00"),
        http(b"data: nonsense\n\ndata: [DONE]\n\n"),
        http(b"Not Found", "404 Not Found"),
        http(b'{"detail": "Not Found"}', "404 Not Found"),
        http(b"", "302 Found", "location: http://127.0.0.1:9/\r\n"),
        http(b"no gzip", headers="content-encoding: gzip\r\n"),
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    ],
    ids=["html", "object", "empty", "list", "bytes", "event", "404", "404-json", "redirect", "gzip", "ssh"],
)
def test_an_answer_that_is_not_of_this_contract_is_a_protocol_error(content: bytes) -> None:
    assert kinds_raised(content) == {ProtocolError}


@pytest.mark.parametrize("content", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"], ids=["nothing", "half"])
def test_a_connection_that_is_closed_early_is_unreachable(content: bytes) -> None:
    assert kinds_raised(content) == {UnreachableError}


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_an_answer_over_the_size_bound_is_a_protocol_error(newline: bytes) -> None:
    content = http((b"x" * 999 + newline).ljust(1000, b"x") * 50)
    for error in errors_raised(content, max_response_bytes=10_000).values():
        assert type(error) is ProtocolError
        assert "longer than 10000 bytes" in str(error)


def test_a_stream_that_ends_without_its_end_is_a_protocol_error() -> None:
    chunk = b'data: {"request_id":"r","index":0,"start":0,"token_ids":[1],"logprobs":[-1.0],"version":0}\n\n'
    error = errors_raised(http(chunk), "generate_stream")["generate_stream"]
    assert type(error) is ProtocolError
    assert "ended early" in str(error)


def test_an_error_within_a_stream_is_raised_as_itself() -> None:
    body = ErrorBody(error=ErrorDetail(message="weights are torn", code="poisoned")).model_dump_json()
    events = http(f"data: {body}\n\ndata: [DONE]\n\n".encode())
    assert kinds_raised(events, "generate_stream", "chat_completion_stream") == {errors.PoisonedError}


@pytest.mark.parametrize(("status", "ok"), [("200 OK", True), ("503 Service Unavailable", False)])
def test_health_tells_what_the_server_said(status: str, ok: bool) -> None:
    body = Health(ok=ok, state=EndpointState.READY if ok else EndpointState.POISONED, version=3)

    async def run() -> Health:
        async with (
            answering(http(body.model_dump_json().encode(), status)) as url,
            connected(url) as endpoint,
        ):
            return await endpoint.health()

    assert asyncio.run(run()) == body


# ---------------------------------------------------------------------------------------------------------------
# Errors


def all_kinds(root: type[InflightError]) -> list[type[InflightError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in all_kinds(child))]


KINDS = [kind for kind in all_kinds(InflightError) if kind is not PublishError]


def test_codes_are_unique_and_every_error_is_in_the_tree_of_the_docstring() -> None:
    kinds = all_kinds(InflightError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert errors.__doc__ is not None
    for kind in kinds:
        assert kind.__module__ == "inflight.errors"
        assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_every_code_maps_to_its_class_over_http(kind: type[InflightError]) -> None:
    body = ErrorBody(error=ErrorDetail(message="why, and 42", code=kind.code)).model_dump_json().encode()
    for error in errors_raised(http(body, "409 Conflict")).values():
        assert type(error) is kind
        assert "why, and 42" in str(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_every_error_survives_pickling(kind: type[InflightError]) -> None:
    error = kind("why, and 42", "http://e:1") if issubclass(kind, EndpointError) else kind("why, and 42")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.args, copy.__dict__) == (str(error), error.args, error.__dict__)


def test_a_publish_error_survives_pickling_with_its_report() -> None:
    spans = PublishSpans(gather_s=1, pause_s=1, wire_s=1, load_s=1, first_token_s=None, total_s=2)
    report = PublishReport(
        "run", 3, 100, (EndpointReport("http://e:1", EndpointOutcome.REFUSED, 2, "why"),), spans, 1, 100
    )
    copy = pickle.loads(pickle.dumps(PublishError("did not reach", report)))
    assert (type(copy), str(copy), copy.report) == (PublishError, "did not reach", report)


def test_endpoints_that_refuse_for_one_reason_share_it_in_the_summary() -> None:
    refused = EndpointOutcome.REFUSED
    endpoints = (
        EndpointReport("a", refused, 2, "no delta"),
        EndpointReport("b", EndpointOutcome.APPLIED, 3),
        EndpointReport("c", refused, 2, "no delta"),
        EndpointReport("d", refused, 2, "another shape"),
    )
    spans = PublishSpans(gather_s=1, pause_s=1, wire_s=1, load_s=1, first_token_s=None, total_s=2)
    report = PublishReport("run", 3, 100, endpoints, spans, 4, 100)
    assert report.summary() == "version 3: a, c refused (no delta); b applied; d refused (another shape)"


@pytest.mark.parametrize("code", ["from_the_future", "publish_failed", ""])
def test_an_unknown_code_is_quoted_in_an_endpoint_error(code: str) -> None:
    error = error_from_code(code, "why", "http://e:1")
    assert type(error) is EndpointError
    assert str(error) == f"http://e:1: why (error code {code!r})"
