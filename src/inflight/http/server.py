"""The contract's HTTP server: serves any `InferenceEndpoint` as a Starlette application.

Control routes require a bearer token, which is checked before the body is read. Each route limits the size of the body,
and responds to errors with an `ErrorBody`. When a client disconnects, its request ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pydantic
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as StarletteRoute

from inflight.base.requirements import require
from inflight.base.transport_registry import spec_type
from inflight.contracts import InferenceEndpoint, ScoringEndpoint, StreamingEndpoint
from inflight.errors import InflightError, InvalidRequestError, UnauthorizedError, UnsupportedError
from inflight.http import routes
from inflight.http.bodies import message_of
from inflight.http.incoming_requests import content_of, refuse_length, run_while_connected
from inflight.http.openapi import openapi_document
from inflight.http.routes import STATUS_OF_CODE, Route
from inflight.http.tokens import carries_token
from inflight.types import EngineStats
from inflight.wire import (
    Acknowledgement,
    Capabilities,
    ChatCompletionRequest,
    EndpointState,
    ErrorBody,
    ErrorDetail,
    GenerateRequest,
    Health,
    ModelCard,
    ModelList,
    ScoreRequest,
    TransportBody,
    WeightVersion,
    WireModel,
)

Body = TypeVar("Body", bound=pydantic.BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

_MAX_ERROR_CHARACTERS = 4000


def create_app(
    endpoint: InferenceEndpoint,
    *,
    token: str,
    generation_token: str | None = None,
    stats: Callable[[], EngineStats] | None = None,
    owns_endpoint: bool = True,
) -> Starlette:
    """Return the application that serves ``endpoint``. ``token`` guards the control routes and must not be empty.

    With a ``generation_token``, generation and scoring require one of the two tokens; otherwise, they require none.

    ``stats`` provides the counters of ``/metrics``. If the application owns the endpoint, it closes the endpoint on
    shutdown.
    """
    if not token:
        raise ValueError("create_app needs a token, because control routes are never open")

    capabilities: Capabilities | None = None

    async def body_of(request: Request, route: Route[Any], kind: type[Body]) -> Body:
        nonlocal capabilities
        size = route.request_size
        if not size.token_bytes:
            return await _body(request, kind, size.fixed_bytes, route.control)
        capabilities = capabilities or await endpoint.capabilities()  # constant over the endpoint's life
        return await _body(request, kind, size.bytes_for(capabilities.max_model_len, images=capabilities.images))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        if owns_endpoint:
            await endpoint.aclose()

    async def generate(request: Request) -> Response:
        body = await body_of(request, routes.GENERATE, GenerateRequest)
        if body.stream:
            return await _events(request, _require_streaming(endpoint).generate_stream(body))
        return _json(await run_while_connected(request, endpoint.generate(body)))

    async def chat(request: Request) -> Response:
        body = await body_of(request, routes.CHAT_COMPLETIONS, ChatCompletionRequest)
        if body.stream:
            return await _events(request, _require_streaming(endpoint).chat_completion_stream(body))
        return _json(await run_while_connected(request, endpoint.chat_completion(body)))

    async def score(request: Request) -> Response:
        if not isinstance(endpoint, ScoringEndpoint):
            raise UnsupportedError("this server does not support scoring")
        body = await body_of(request, routes.SCORE, ScoreRequest)
        return _json(await run_while_connected(request, endpoint.score(body)))

    async def models(_: Request) -> Response:
        capabilities = await endpoint.capabilities()
        return _json(ModelList(data=(ModelCard(id=capabilities.model),)))

    async def health(_: Request) -> Response:
        version = await endpoint.weight_version()
        ok = version.state not in (EndpointState.POISONED, EndpointState.JOINING)
        return _json(Health(ok=ok, state=version.state, version=version.version), 200 if ok else 503)

    async def metrics(_: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(MetricsCollector(await endpoint.weight_version(), None if stats is None else stats()))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def openapi(_: Request) -> Response:
        return JSONResponse(openapi_document())

    async def control(request: Request, route: Route[Any]) -> Response:
        if route.needs is not None:
            require(await endpoint.capabilities(), route.needs, endpoint.name)
        call = getattr(endpoint, route.operation)
        if route.request is None:
            return _json(await call())
        body = await body_of(request, route, route.request)
        if isinstance(body, TransportBody):
            body = await _message(request, spec_type(body.transport), body.model_dump_json().encode())
        answer = await call(body)
        return _json(Acknowledgement(ok=True) if answer is None else answer)

    special: dict[str, Handler] = {
        "generate": generate,
        "chat_completion": chat,
        "score": score,
        "models": models,
        "health": health,
        "metrics": metrics,
    }

    def make_route(route: Route[Any]) -> StarletteRoute:
        async def handle(request: Request) -> Response:
            try:
                if route.control:
                    check_token(request, token)
                elif route.generation and generation_token:
                    check_token(request, token, generation_token)
                if route.request is None:
                    refuse_length(request, 0)
                if route.operation in special:
                    return await special[route.operation](request)
                return await control(request, route)
            except InflightError as error:
                return error_response(error)
            except ClientDisconnect:
                return Response(status_code=499)  # the client has disconnected

        return StarletteRoute(route.path, handle, methods=[route.method], name=route.operation)

    app_routes = [make_route(route) for route in routes.ROUTES]
    app_routes.append(StarletteRoute("/openapi.json", openapi, methods=["GET"]))
    handlers: dict[Any, Any] = {Exception: _answer_failure, HTTPException: _answer_refusal}
    app = Starlette(routes=app_routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def check_token(request: Request, *tokens: str) -> None:
    """Raise `UnauthorizedError` unless a request carries one of the tokens."""
    given = request.headers.get("authorization", "")
    if not carries_token(given, *tokens):
        what = "wrong" if given else "missing"
        raise UnauthorizedError(f"the bearer token for {request.url.path} is {what}")


async def _body(request: Request, kind: type[Body], max_body_bytes: int, is_trusted: bool = False) -> Body:
    """Return the message in a body, reading no more than ``max_body_bytes``."""
    return await _message(request, kind, await content_of(request, max_body_bytes, is_trusted=is_trusted))


async def _message(request: Request, kind: type[Body], content: bytes) -> Body:
    try:
        return await message_of(kind, content)
    except ValueError as error:
        raise InvalidRequestError(f"{request.url.path} cannot accept this body: {error}") from error


def _require_streaming(endpoint: InferenceEndpoint) -> StreamingEndpoint:
    if not isinstance(endpoint, StreamingEndpoint):
        raise UnsupportedError("this server does not support streaming")
    return endpoint


async def _events(request: Request, chunks: AsyncIterator[WireModel]) -> Response:
    """Return a response of server-sent events. Errors before the first event are raised; later ones become events."""
    first = await run_while_connected(request, anext(chunks))

    async def lines() -> AsyncGenerator[str, None]:
        yield f"data: {first.model_dump_json()}\n\n"
        try:
            async for chunk in chunks:
                yield f"data: {chunk.model_dump_json()}\n\n"
        except InflightError as error:
            yield f"data: {_error_body(error).model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"

    return _EventStream(lines(), chunks)


class _EventStream(StreamingResponse):
    """The events of a stream of chunks.

    The stream of chunks is closed once all events have been sent or the client has disconnected.
    """

    def __init__(self, events: AsyncGenerator[str, None], chunks: Any) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events, self._chunks = events, chunks

    async def __call__(self, *arguments: Any) -> None:
        async with contextlib.aclosing(self._chunks), contextlib.aclosing(self._events):
            await super().__call__(*arguments)


def _json(model: WireModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")


def _error_body(error: InflightError) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=str(error)[:_MAX_ERROR_CHARACTERS], code=error.code))


def error_response(error: InflightError) -> Response:
    """Return the response for an error."""
    return _json(_error_body(error), STATUS_OF_CODE.get(error.code, 500))


async def _answer_refusal(request: Request, error: HTTPException) -> Response:
    """Respond to a request that does not reach the endpoint, because its route is unknown or its body is too long."""
    message = error.detail
    if error.status_code in (404, 405):
        known = ", ".join(f"{route.method} {route.path}" for route in routes.ROUTES)
        message = f"{request.method} {request.url.path} is not a route; known: {known}"
    return _json(_error_body(InvalidRequestError(message)), error.status_code)


async def _answer_failure(request: Request, error: Exception) -> Response:
    return _json(_error_body(InflightError(f"{request.url.path} failed: {type(error).__name__}: {error}")), 500)


class MetricsCollector:
    """The version and the engine's counters in Prometheus's format."""

    def __init__(self, version: WeightVersion, stats: EngineStats | None) -> None:
        self._version = version
        self._stats = stats

    def collect(self) -> list[Metric]:
        version, stats = self._version, self._stats
        gauges: list[tuple[str, str, float]] = [
            ("inflight_weight_version", "Currently served weight version", version.version),
            ("inflight_poisoned", "1 while weights are torn", version.state is EndpointState.POISONED),
        ]
        counters: list[tuple[str, str, float]] = []
        if stats is not None:
            gauges += [
                ("inflight_running_sequences", "Sequences being decoded", stats.num_running),
                ("inflight_waiting_sequences", "Sequences waiting for a slot", stats.num_waiting),
            ]
            counters = [
                ("inflight_steps", "Forward passes", stats.num_steps),
                ("inflight_completion_tokens", "Tokens sampled", stats.num_tokens),
                ("inflight_prompt_tokens", "Prompt tokens prefilled", stats.num_prompt_tokens),
                ("inflight_finished_sequences", "Sequences finished", stats.num_finished),
                ("inflight_weight_updates", "Weight updates applied", stats.num_updates),
                ("inflight_drafted_tokens", "Tokens of drafts that were verified", stats.num_drafted),
                ("inflight_accepted_tokens", "Tokens of drafts that were sampled", stats.num_accepted),
                ("inflight_verifications", "Drafts that were verified", stats.num_verifications),
                ("inflight_scored_tokens", "Given tokens that were scored", stats.num_scored_tokens),
                ("inflight_paused_seconds", "Time in which sampling was paused for updates", stats.paused_s),
            ]
        return [*(GaugeMetricFamily(*it) for it in gauges), *(CounterMetricFamily(*it) for it in counters)]
