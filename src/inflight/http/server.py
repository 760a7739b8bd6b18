"""The contract's HTTP server: serves any `InferenceEndpoint` as a Starlette application.

Control routes take a bearer token, bodies are bounded, every error travels as an `ErrorBody`. A client that goes away
ends its request. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pydantic
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as StarletteRoute

from inflight.contracts import InferenceEndpoint, StreamingEndpoint
from inflight.errors import InflightError, InvalidRequestError, UnauthorizedError, UnsupportedError
from inflight.http import routes
from inflight.http.openapi import openapi_document
from inflight.http.routes import STATUS_OF_CODE, Route
from inflight.types import EngineStats
from inflight.wire import (
    Acknowledgement,
    ChatCompletionRequest,
    EndpointState,
    ErrorBody,
    ErrorDetail,
    GenerateRequest,
    Health,
    ModelCard,
    ModelList,
    TransportBody,
    WireModel,
)

Body = TypeVar("Body", bound=pydantic.BaseModel)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

MAX_BODY_BYTES = 64 * 1024 * 1024


def create_app(
    endpoint: InferenceEndpoint,
    *,
    token: str,
    stats: Callable[[], EngineStats] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Starlette:
    """Return the application that serves ``endpoint``. ``token`` guards the control routes and must not be empty.

    ``stats`` feeds ``/metrics``. The application closes the endpoint when it shuts down.
    """
    if not token:
        raise ValueError("create_app needs a token: control routes are never open")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await endpoint.aclose()

    async def generate(request: Request) -> Response:
        body = await _body(request, GenerateRequest, max_body_bytes)
        if body.stream:
            return await _events(request, _streaming(endpoint).generate_stream(body))
        return _json(await _unless_client_leaves(request, endpoint.generate(body)))

    async def chat(request: Request) -> Response:
        body = await _body(request, ChatCompletionRequest, max_body_bytes)
        if body.stream:
            return await _events(request, _streaming(endpoint).chat_completion_stream(body))
        return _json(await _unless_client_leaves(request, endpoint.chat_completion(body)))

    async def models(_: Request) -> Response:
        capabilities = await endpoint.capabilities()
        return _json(ModelList(data=(ModelCard(id=capabilities.model),)))

    async def health(_: Request) -> Response:
        version = await endpoint.weight_version()
        ok = version.state not in (EndpointState.POISONED, EndpointState.JOINING)
        return _json(Health(ok=ok, state=version.state, version=version.version), 200 if ok else 503)

    async def metrics(_: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(_Collected(await endpoint.weight_version(), stats))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def openapi(_: Request) -> Response:
        return JSONResponse(openapi_document())

    async def control(request: Request, route: Route) -> Response:
        call = getattr(endpoint, route.operation)
        if route.request is None:
            return _json(await call())
        body = await _body(request, route.request, max_body_bytes)
        answer = await call(body.root if isinstance(body, TransportBody) else body)
        return _json(Acknowledgement(ok=True) if answer is None else answer)

    special: dict[str, Handler] = {
        "generate": generate,
        "chat_completion": chat,
        "models": models,
        "health": health,
        "metrics": metrics,
    }

    def mounted(route: Route) -> StarletteRoute:
        async def handle(request: Request) -> Response:
            try:
                if route.control:
                    _check_token(request, token)
                if route.operation in special:
                    return await special[route.operation](request)
                return await control(request, route)
            except InflightError as error:
                return _error(error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return StarletteRoute(route.path, handle, methods=[route.method], name=route.operation)

    app_routes = [mounted(route) for route in routes.ROUTES]
    app_routes.append(StarletteRoute("/openapi.json", openapi, methods=["GET"]))
    handlers: dict[Any, Any] = {Exception: _unexpected, HTTPException: _refused}
    app = Starlette(routes=app_routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _check_token(request: Request, token: str) -> None:
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        what = "wrong" if given else "missing"
        raise UnauthorizedError(f"the bearer token for {request.url.path} is {what}")


async def _body(request: Request, kind: type[Body], max_body_bytes: int) -> Body:
    parts, size_bytes = [], 0
    async for part in request.stream():
        size_bytes += len(part)
        if size_bytes > max_body_bytes:
            raise HTTPException(413, f"the body of {request.url.path} is longer than {max_body_bytes} bytes")
        parts.append(part)
    try:
        return kind.model_validate_json(b"".join(parts))
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        text = "; ".join(
            f"{'.'.join(map(str, p['loc'])) or 'body'}: {p['msg']} (got {str(p['input'])[:80]!r})" for p in problems[:5]
        )
        raise InvalidRequestError(f"{request.url.path} cannot use this body: {text}") from error


def _streaming(endpoint: InferenceEndpoint) -> StreamingEndpoint:
    if not isinstance(endpoint, StreamingEndpoint):
        raise UnsupportedError(f"{endpoint.name} does not declare streaming")
    return endpoint


async def _unless_client_leaves(request: Request, call: Awaitable[T]) -> T:
    """Return what ``call`` returns; when the client disconnects, cancel it and raise `ClientDisconnect`."""
    answering = asyncio.ensure_future(call)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise ClientDisconnect
    finally:
        answering.cancel()
        watching.cancel()


async def _events(request: Request, chunks: AsyncIterator[WireModel]) -> Response:
    """Answer with server-sent events. What is raised before the first of them is raised here, later it is an event."""
    first = await _unless_client_leaves(request, anext(chunks))

    async def lines() -> AsyncIterator[str]:
        yield f"data: {first.model_dump_json()}\n\n"
        try:
            async for chunk in chunks:
                yield f"data: {chunk.model_dump_json()}\n\n"
        except InflightError as error:
            yield f"data: {_error_body(error).model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _json(model: WireModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status_code=status, media_type="application/json")


def _error_body(error: InflightError) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=str(error), code=error.code))


def _error(error: InflightError) -> Response:
    return _json(_error_body(error), STATUS_OF_CODE.get(error.code, 500))


async def _refused(request: Request, error: HTTPException) -> Response:
    """Answer what is refused without reaching a handler's endpoint: unknown routes, long bodies."""
    message = error.detail
    if error.status_code in (404, 405):
        known = ", ".join(f"{route.method} {route.path}" for route in routes.ROUTES)
        message = f"{request.method} {request.url.path} is no route; known: {known}"
    return _json(_error_body(InvalidRequestError(message)), error.status_code)


async def _unexpected(request: Request, error: Exception) -> Response:
    return _json(_error_body(InflightError(f"{request.url.path} failed: {type(error).__name__}: {error}")), 500)


class _Collected:
    """Engine counters in Prometheus' form, read at the moment of the scrape."""

    def __init__(self, version: Any, stats: Callable[[], EngineStats] | None) -> None:
        self._version = version
        self._stats = stats

    def collect(self) -> list[Metric]:
        """Return the metric families."""
        families: list[Metric] = [
            GaugeMetricFamily("inflight_weight_version", "Weight version served now", value=self._version.version),
            GaugeMetricFamily(
                "inflight_poisoned", "1 while weights are torn", value=self._version.state is EndpointState.POISONED
            ),
        ]
        if self._stats is None:
            return families
        stats = self._stats()
        gauges = {
            "inflight_running_sequences": ("Sequences being decoded", stats.num_running),
            "inflight_waiting_sequences": ("Sequences waiting for a slot", stats.num_waiting),
        }
        counters = {
            "inflight_steps": ("Forward passes", stats.num_steps),
            "inflight_completion_tokens": ("Tokens sampled", stats.num_tokens),
            "inflight_prompt_tokens": ("Prompt tokens prefilled", stats.num_prompt_tokens),
            "inflight_finished_sequences": ("Sequences finished", stats.num_finished),
            "inflight_weight_updates": ("Weight updates applied", stats.num_updates),
            "inflight_held_seconds": ("Time in which sampling was held for updates", stats.held_s),
        }
        families += [GaugeMetricFamily(name, text, value=value) for name, (text, value) in gauges.items()]
        families += [CounterMetricFamily(name, text, value=value) for name, (text, value) in counters.items()]
        return families
