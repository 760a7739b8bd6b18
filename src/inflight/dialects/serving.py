"""Components shared by the dialects' servers: a pool of endpoints, and routes, some of which need the control token."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inflight.base.tasks import run_together
from inflight.contracts import InferenceEndpoint
from inflight.errors import InflightError, InvalidRequestError, UnsupportedError
from inflight.http.bodies import message_of
from inflight.http.incoming_requests import content_of
from inflight.http.server import check_token, error_response
from inflight.wire import Capabilities, EndpointState

Handler = Callable[[Request], Awaitable[Response]]
ErrorAnswer = Callable[[InflightError], Response]
Message = TypeVar("Message", bound=pydantic.BaseModel)

CONTROL_BYTES = 64 << 10
"""Maximum size, in bytes, of the body of a request to a control route."""


class EndpointPool:
    """The endpoints of one model; each request goes to the endpoint with the fewest running requests."""

    def __init__(self, endpoints: Sequence[InferenceEndpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self._num_running = dict.fromkeys(self.endpoints, 0)

    @contextlib.contextmanager
    def least_loaded(self) -> Iterator[InferenceEndpoint]:
        """Yield the endpoint for one request, which counts as running until the context exits."""
        endpoint = min(self.endpoints, key=lambda it: self._num_running[it])
        self._num_running[endpoint] += 1
        try:
            yield endpoint
        finally:
            self._num_running[endpoint] -= 1

    async def capabilities(self) -> Capabilities:
        """Return the capabilities of the first endpoint."""
        return await self.endpoints[0].capabilities()

    async def health(self) -> tuple[bool, list[int]]:
        """Return whether every endpoint is serving, and the version of each."""
        served = await run_together(*(endpoint.weight_version() for endpoint in self.endpoints))
        down = (EndpointState.POISONED, EndpointState.JOINING, EndpointState.RELEASED)
        return not any(it.state in down for it in served), [it.version for it in served]


class DialectRoutes:
    """The routes of a dialect. ``token`` guards the control routes; None leaves them open."""

    def __init__(self, token: str | None = None, answer_error: ErrorAnswer = error_response) -> None:
        self._token = token
        self._answer_error = answer_error
        self._routes: list[Route] = []

    def add(self, method: str, path: str, handler: Handler, *, control: bool = False) -> None:
        """Add a route. Errors that its handler raises become error responses."""

        async def handle(request: Request) -> Response:
            try:
                if control and self._token is not None:
                    check_token(request, self._token)
                return await handler(request)
            except InflightError as error:
                return self._answer_error(error)
            except ClientDisconnect:
                return Response(status_code=499)  # the client has disconnected

        self._routes.append(Route(path, handle, methods=[method]))

    def refuse(self, refused: Mapping[str, str]) -> None:
        """Answer POST requests to these paths with the reason why the paths are not supported."""

        def handler_of(path: str, why: str) -> Handler:
            async def handle(_: Request) -> Response:
                raise UnsupportedError(f"{path} is not supported by this server: {why}")

            return handle

        for path, why in refused.items():
            self.add("POST", path, handler_of(path, why), control=True)

    def app(self) -> Starlette:
        """Return the application."""

        async def answer_refusal(request: Request, error: HTTPException) -> Response:
            text = error.detail
            if error.status_code in (404, 405):
                known = ", ".join(route.path for route in self._routes)
                text = f"{request.method} {request.url.path} is not served; known: {known}"
            response = error_response(InvalidRequestError(text))
            response.status_code = error.status_code
            return response

        async def answer_failure(request: Request, error: Exception) -> Response:
            problem = f"{request.url.path} failed: {type(error).__name__}: {error}"
            return self._answer_error(InflightError(problem))

        handlers: dict[Any, Any] = {HTTPException: answer_refusal, Exception: answer_failure}
        app = Starlette(routes=self._routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app


async def message_in(request: Request, kind: type[Message], max_body_bytes: int = CONTROL_BYTES) -> Message:
    """Parse a request body; an absent body counts as an empty object. Raises `InvalidRequestError`."""
    content = await content_of(request, max_body_bytes)
    try:
        return await message_of(kind, content or b"{}")
    except ValueError as error:
        raise InvalidRequestError(f"{request.url.path} cannot accept this body: {error}") from error


def flag_in(request: Request, name: str, default: bool) -> bool:
    """Return a boolean from the query of a request. Raises `InvalidRequestError`."""
    given = request.query_params.get(name, str(default)).lower()
    if given not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name} is {given!r}, but must be true or false")
    return given in ("true", "1")


def ok(**fields: Any) -> Response:
    """Return an answer with these fields."""
    return JSONResponse(fields)
