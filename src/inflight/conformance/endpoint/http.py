"""Level ``http``: tokens, bodies and connections of a server, tested with bytes that no client library would send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pydantic

from inflight.base.tasks import cancel_and_wait, start
from inflight.conformance.checks import CheckFailed, check, fail, look_at, require, skip
from inflight.conformance.endpoint.aftermath import require_ended_early, until_running
from inflight.conformance.endpoint.connections import HttpAnswer, answer_to, connection, head, read_answer
from inflight.conformance.endpoint.subject import EndpointSubject
from inflight.conformance.endpoint.waiting import GRACE_S, SERVED_S, SLACK_S, within
from inflight.errors import UnauthorizedError
from inflight.http import routes
from inflight.http.client import HttpEndpoint
from inflight.http.routes import Route
from inflight.wire import AbortRequests, DraftHistory, EndpointState, ErrorBody, GenerateResponse, Health, PromptHistory

LEVEL = "http"
_CONTROL_ROUTES = tuple(route for route in routes.ROUTES if route.control)
_NUM_STALLED = 60
"""Number of connections that send part of a request and then nothing."""
_NUM_TRIES = 3
_CHAT_TOKENS = 128
"""More tokens than the kit's chats have when they are rendered."""
_LONG_BODY_BYTES = 80 << 20
_PIECE_BYTES = 1 << 18
_PARSING = "whether bodies are validated as in docs/openapi.json before anything else, and errors have the OpenAI shape"


def require_error_body(answer: HttpAnswer, statuses: tuple[int, ...], what: str, code: str | None = None) -> None:
    """Require that the answer has one of these statuses, and an `ErrorBody` with this code."""
    require(answer.status in statuses, f"{what} was answered with status {answer.status}: {answer.body[:200]!r}")
    try:
        found = ErrorBody.model_validate_json(answer.body).error.code
    except pydantic.ValidationError:
        fail(f"{what} was answered with status {answer.status} and without an ErrorBody: {answer.body[:200]!r}")
    require(code in (None, found), f"{what} was answered with error code {found!r}, not {code!r}")


@check("E-50", "url updates", deadline_s=30)
@look_at("whether every control route checks the token, before it reads the body")
async def control_takes_a_token(subject: EndpointSubject) -> None:
    """Control routes that are called without the token, or with a wrong one, respond with 401 and change nothing."""
    url, token = subject.opened.url, subject.opened.token
    assert url is not None
    if token is None:
        skip("no control token was given; see --token-file")
    other = subject.reference.with_final_norm(-1.0, "B")
    update = await subject.publisher.request(other)
    bodies = {
        routes.INIT_PROCESS_GROUP: subject.another_publisher().open_group(0.5).model_dump_json(),
        routes.REQUEST_WEIGHT_UPDATE: update.model_copy(update={"version": update.version + 1}).model_dump_json(),
        routes.RECEIVE_WEIGHTS: subject.publisher.transfer(update, 0, 0.5).model_dump_json(),
        routes.COMMIT_WEIGHT_UPDATE: update.ref.model_dump_json(),
        routes.ABORT_WEIGHT_UPDATE: update.ref.model_dump_json(),
        routes.ABORT_REQUESTS: AbortRequests(request_ids=("nobody",)).model_dump_json(),
        routes.RECORD_HISTORY: DraftHistory(
            entries=(PromptHistory(prompt_token_ids=(1,), completions=((1,),), rewards=(0.0,)),)
        ).model_dump_json(),
    }
    for route in _CONTROL_ROUTES:
        for given in (None, "", "wrong", token[:-1], f"{token}x"):
            body = bodies.get(route, "").encode()
            what = f"{route.path} with {'no token' if given is None else 'a wrong token'}"
            answer = await answer_to(subject, route.method, route.path, body, given)
            require_error_body(answer, (401,), what, UnauthorizedError.code)
    for given in (None, "wrong"):
        stranger = HttpEndpoint(url, token=given)
        await subject.enter(contextlib.aclosing(stranger))
        abort = stranger.abort_weight_update(update.ref)
        await subject.require_raises(abort, UnauthorizedError, f"an abort with the token {given!r}")
    await subject.require_state(EndpointState.PAUSED, "after control calls without the token")
    await subject.publisher.complete(update, other)
    await subject.require_serves(other, "after an update that others tried to disturb")


@check("E-51", "url", deadline_s=40)
@look_at("whether requests are read one at a time or in one thread each, and how many connections may be open")
async def stalled_connections(subject: EndpointSubject) -> None:
    """Connections that stall in the middle of a request do not keep others from being served."""
    body = subject.request().model_dump_json().encode()
    whole = head(subject, "POST", routes.GENERATE.path, {"content-length": str(len(body))}) + body
    starts = (b"", whole[:10], whole[: whole.index(b"\r\n\r\n") - 5], whole[: -len(body) // 2])
    for i in range(_NUM_STALLED):
        _, writer = await subject.enter(connection(subject))
        writer.write(starts[i % len(starts)])
    await asyncio.sleep(GRACE_S)
    started = time.monotonic()
    for _ in range(3):
        async with connection(subject) as (reader, writer):
            writer.write(whole)
            answer = await within(SLACK_S, read_answer(reader), f"a request next to {_NUM_STALLED} stalled connections")
        words = f"with {_NUM_STALLED} stalled connections open, a request was answered with status {answer.status}"
        require(answer.status == 200, f"{words}: {answer.body[:200]!r}")
    await within(SLACK_S, subject.endpoint.weight_version(), "weight_version next to stalled connections")
    subject.note(connections=_NUM_STALLED, **{"seconds for three requests": time.monotonic() - started})


def _is_offered(subject: EndpointSubject, route: Route[Any]) -> bool:
    return route.needs is None or not subject.capabilities.missing(route.needs)


def _malformed(good: dict[str, Any], key: str) -> dict[str, bytes]:
    """Return bodies that a route must refuse, derived from one that it accepts."""
    return {
        "no body": b"",
        "half of a body": json.dumps(good).encode()[:-3],
        "a list": b"[]",
        "null": b"null",
        "no keys": b"{}",
        "bytes that are not text": b"\xff\xfe\x00{}",
        "a hundred thousand brackets": b"[" * 100_000,
        "an unknown key": json.dumps({**good, "unknown_key": 1}).encode(),
        **_with_unknown_keys(good),
        f"{key} of another type": json.dumps({**good, key: {"no": "such"}}).encode(),
        f"{key} not a number": json.dumps(good).encode().replace(f'"{key}"'.encode(), f'"{key}": NaN, "x"'.encode()),
    }


def _with_unknown_keys(good: dict[str, Any]) -> dict[str, bytes]:
    """Return bodies with an unknown key in one of the objects that they contain."""
    parts = {name: part for name, part in good.items() if isinstance(part, dict)}
    return {
        f"an unknown key in {name}": json.dumps({**good, name: {**part, "unknown_key": 1}}).encode()
        for name, part in parts.items()
    }


@check("E-52", "url", deadline_s=60, look_at=_PARSING)
async def malformed_bodies(subject: EndpointSubject) -> None:
    """A malformed body, including one with an unknown key at any depth, is refused with a 4xx status and an ErrorBody.
    So are a body whose content type is not JSON, and a request from a web page of another origin."""
    token = subject.opened.token
    generate = subject.request().model_dump(mode="json")
    ref = {"run_id": "check", "version": 1}
    bodies: dict[Route[Any], tuple[dict[str, Any], str]] = {routes.GENERATE: (generate, "prompt_token_ids")}
    if subject.capabilities.chat:
        bodies[routes.CHAT_COMPLETIONS] = (subject.chat_request().model_dump(mode="json"), "messages")
    if token is not None:
        taken = [route for route in _CONTROL_ROUTES if route.request is not None and _is_offered(subject, route)]
        bodies |= dict.fromkeys(taken, (ref, "version"))
    num_refused = 0
    for route, (good, key) in bodies.items():
        for what, body in _malformed(good, key).items():
            answer = await answer_to(subject, route.method, route.path, body, token if route.control else None)
            require_error_body(answer, tuple(range(400, 500)), f"{route.path} with {what}", "invalid_request")
            num_refused += 1
    subject.note(refused=num_refused)
    body = json.dumps(generate).encode()
    for what, headers, statuses in (
        ("a body of type text/plain", {"content-type": "text/plain"}, (401, 415)),
        ("a request from a web page of another origin", {"origin": "http://elsewhere.example"}, (401, 403)),
    ):
        named = {"content-length": str(len(body)), "authorization": "", **headers}
        async with connection(subject) as (reader, writer):
            writer.write(head(subject, "POST", routes.GENERATE.path, named) + body)
            answer = await within(SLACK_S, read_answer(reader), f"the answer to {what}")
        require_error_body(answer, statuses, what)
    await within(SLACK_S, subject.generate(), "a request after malformed ones")


@check("E-53", "url", deadline_s=60)
@look_at("whether the length is counted while a body is received, even if the request does not specify its length")
async def long_body(subject: EndpointSubject) -> None:
    """The size of a body is limited: one of 80 MB is refused, or its connection is closed."""
    good = subject.request().model_dump_json().encode()
    piece = b" " * _PIECE_BYTES
    framed = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    num_sent = 0
    async with connection(subject) as (reader, writer):
        writer.write(head(subject, "POST", routes.GENERATE.path, {"transfer-encoding": "chunked"}))
        reading = start(read_answer(reader))
        try:
            while num_sent < _LONG_BODY_BYTES and not reading.done():
                writer.write(framed)
                await within(SLACK_S, writer.drain(), "a piece of a long body")
                num_sent += len(piece)
            writer.write(f"{len(good):x}\r\n".encode() + good + b"\r\n0\r\n\r\n")
            answer = await within(SLACK_S, reading, "the answer to a long body")
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            subject.note(sent_bytes=num_sent, closed=str(error))
        else:
            subject.note(sent_bytes=num_sent, status=answer.status)
            words = f"a body of {num_sent} bytes was answered with status {answer.status}: {answer.body[:200]!r}"
            require(400 <= answer.status < 500, words)
        finally:
            await cancel_and_wait(reading)
    await within(SLACK_S, subject.generate(), "a request after one with a long body")


@check("E-54", "url", deadline_s=60)
@look_at("whether the server watches for a disconnect while it generates, and cancels the request in the engine")
async def cut_connections(subject: EndpointSubject) -> None:
    """A generate or chat request, plain or streamed, ends when its connection is cut.

    An equally long request that is not cut runs at the same time, or before the cut one if only one sequence is decoded
    at a time.
    """
    is_alone = subject.capabilities.max_concurrent_sequences < 2
    usual_s = await subject.seconds_to_fill_the_context() if is_alone else 0.0
    kinds = _kinds_to_cut(subject)
    streamed = (False, True) if subject.capabilities.streaming else (False,)
    for stream, (name, path, body_of) in itertools.product(streamed, kinds):
        what = f"a streamed {name}" if stream else f"a {name}"
        for tries_left in reversed(range(_NUM_TRIES)):
            uncut = [] if is_alone else [task for _, task in await subject.start_running(1)]
            try:
                await _cut(subject, uncut, usual_s / 2, what, path, body_of(stream), stream=stream)
                break
            except CheckFailed:
                ended = [task for task in uncut if task.done()]
                for task in ended:
                    task.result()
                # On a busy machine, the other request may end before the cut is noticed. If nothing is cancelled, both
                # end at the same time in every try.
                if not (tries_left and ended):
                    raise
            finally:
                await cancel_and_wait(*uncut)
        await until_running(subject, 0, SERVED_S, "a request that was cancelled was still being decoded")


def _kinds_to_cut(subject: EndpointSubject) -> list[tuple[str, str, Callable[[bool], bytes]]]:
    """Return the name and path of each kind of long request, and a function that makes a body, streamed or not."""

    def generate(stream: bool) -> bytes:
        return subject.request(max_tokens=subject.remaining_tokens(), stream=stream).model_dump_json().encode()

    def chat(stream: bool) -> bytes:
        num_tokens = min(subject.context_len, subject.capabilities.max_model_len - _CHAT_TOKENS)
        request = subject.chat_request(max_tokens=num_tokens, ignore_eos=True, stream=stream)
        return request.model_dump_json().encode()

    kinds: list[tuple[str, str, Callable[[bool], bytes]]]
    kinds = [("generate request", routes.GENERATE.path, generate)]
    if subject.capabilities.chat and subject.capabilities.max_model_len >= 4 * _CHAT_TOKENS:
        kinds.append(("chat completion", routes.CHAT_COMPLETIONS.path, chat))
    return kinds


async def _cut(
    subject: EndpointSubject,
    uncut: Sequence[asyncio.Task[GenerateResponse]],
    alone_s: float,
    what: str,
    path: str,
    body: bytes,
    *,
    stream: bool,
) -> None:
    """Start a request, cut its connection, and require that the request ends soon: see `require_ended_early`."""
    async with connection(subject) as (reader, writer):
        writer.write(head(subject, "POST", path, {"content-length": str(len(body))}) + body)
        deadline = time.monotonic() + SLACK_S
        while (found := (await subject.endpoint.weight_version()).num_running) != 1 + len(uncut):
            late = time.monotonic() > deadline or any(task.done() for task in uncut)
            require(not late, f"{what} was not being decoded next to another request (num_running is {found})")
            await asyncio.sleep(0.005)
        if stream:
            await within(SLACK_S, reader.readline(), f"the status line of {what}")
    await require_ended_early(subject, uncut, alone_s, f"{what} whose connection was cut")


@check("E-55", "url", look_at=_PARSING)
async def unknown_routes(subject: EndpointSubject) -> None:
    """A request to an unknown route is answered with 404, and one with a wrong method with 405 or 404; both answers
    have an ErrorBody."""
    for method, path in (("GET", "/no/such/route"), ("POST", "/v1/no_such_route"), ("GET", "/capabilities/")):
        require_error_body(await answer_to(subject, method, path), (404,), f"{method} {path}", "invalid_request")
    for route in routes.ROUTES:
        method = "PUT" if route.method == "POST" else "DELETE"
        answer = await answer_to(subject, method, route.path)
        require_error_body(answer, (404, 405), f"{method} {route.path}", "invalid_request")


@check("E-56", "url")
@look_at("whether a pause counts as unhealthy, so that a load balancer removes the server during every update")
async def health(subject: EndpointSubject) -> None:
    """/health responds with 200, the state and the version, both while the server is ready and while it is paused.
    /v1/models lists the reported model, and /metrics and /openapi.json respond with 200."""
    await require_healthy(subject, EndpointState.READY)
    for path, part in (("/v1/models", json.dumps(subject.capabilities.model)), ("/metrics", ""), ("/openapi.json", "")):
        answer = await answer_to(subject, "GET", path)
        require(answer.status == 200, f"{path} responds with status {answer.status}: {answer.body[:200]!r}")
        require(part.encode() in answer.body, f"the response of {path} does not contain {part}: {answer.body[:200]!r}")
    if subject.missing("updates") is None:
        update = await subject.publisher.request(subject.reference.weights)
        try:
            await require_healthy(subject, EndpointState.PAUSED)
        finally:
            await subject.publisher.abort(update)


async def require_healthy(subject: EndpointSubject, state: EndpointState) -> None:
    """Require that /health reports this state as healthy, with the version that is served."""
    answer = await answer_to(subject, "GET", routes.HEALTH.path)
    try:
        found = Health.model_validate_json(answer.body)
    except pydantic.ValidationError:
        fail(f"the answer of /health is not a valid Health: {answer.body[:200]!r}")
    require(
        (answer.status, found.ok, found.state) == (200, True, state),
        f"/health answered status {answer.status}, ok={found.ok} and {found.state} while {state}",
    )
    served = (await subject.endpoint.weight_version()).version
    require(found.version == served, f"/health reports version {found.version}, weight_version reports {served}")
