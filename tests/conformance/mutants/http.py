"""Faults in the HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pydantic
from starlette.responses import PlainTextResponse, Response

import inflight.http.server
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import InvalidRequestError, UnauthorizedError
from inflight.wire import EndpointState, Health
from tests.conformance.mutants.mutant import Mutant

SERVER: Any = inflight.http.server


def serving_with(**parts: Any) -> Callable[[EmbeddedEndpoint], EmbeddedEndpoint]:
    """Replace some functions of the server's module."""

    def infect(endpoint: EmbeddedEndpoint) -> EmbeddedEndpoint:
        for name, part in parts.items():
            assert hasattr(SERVER, name)
            setattr(SERVER, name, part)
        return endpoint

    return infect


def checks_the_beginning(request: Any, token: str) -> None:
    given = request.headers.get("authorization", "")
    if not given.startswith(f"Bearer {token}"):
        raise UnauthorizedError("wrong")


def reads_one_at_a_time() -> Callable[..., Any]:
    content_of = SERVER.content_of
    turn = asyncio.Lock()

    async def faulty(*arguments: Any, **others: Any) -> Any:
        async with turn:
            return await content_of(*arguments, **others)

    return faulty


async def message_with_any_key(request: Any, kind: Any, content: bytes) -> Any:
    try:
        values = json.loads(content)
        return kind.model_validate({key: value for key, value in values.items() if key in kind.model_fields})
    except (ValueError, AttributeError, RecursionError, pydantic.ValidationError) as error:
        raise InvalidRequestError("no") from error


def reads_everything() -> Callable[..., Any]:
    content_of = SERVER.content_of
    return lambda request, max_body_bytes, **others: content_of(request, 1 << 40, **others)


async def answers_to_the_end(request: Any, call: Any) -> Any:
    return await call


async def refuses_barely(request: Any, error: Any) -> Response:
    return PlainTextResponse("Not Found", error.status_code)


def unhealthy_while(state: EndpointState) -> Callable[..., Response]:
    to_json: Callable[..., Response] = SERVER._json

    def faulty(model: Any, status: int = 200) -> Response:
        is_unhealthy = isinstance(model, Health) and model.state is state
        return to_json(model, 503 if is_unhealthy else status)

    return faulty


MUTANTS = (
    Mutant(
        "unhealthy while released",
        "E-65",
        "/health responds with 503 while memory is released.",
        serving_with(_json=unhealthy_while(EndpointState.RELEASED)),
        over_http=True,
    ),
    Mutant(
        "open control routes",
        "E-50",
        "Control routes require no token.",
        serving_with(check_token=lambda *_: None),
        over_http=True,
    ),
    Mutant(
        "beginning of the token",
        "E-50",
        "Control routes accept any string that begins with the token.",
        serving_with(check_token=checks_the_beginning),
        over_http=True,
    ),
    Mutant(
        "one at a time",
        "E-51",
        "Request bodies are read one at a time.",
        serving_with(content_of=reads_one_at_a_time()),
        over_http=True,
    ),
    Mutant(
        "any key",
        "E-52",
        "Unknown keys in a request body are ignored.",
        serving_with(_message=message_with_any_key),
        over_http=True,
    ),
    Mutant(
        "any length",
        "E-53",
        "The size of request bodies is not limited.",
        serving_with(content_of=reads_everything()),
        over_http=True,
    ),
    Mutant(
        "serves a client that left",
        "E-54",
        "A request continues after its client has disconnected.",
        serving_with(run_while_connected=answers_to_the_end),
        over_http=True,
    ),
    Mutant(
        "bare refusal",
        "E-55",
        "The response to an unknown route is plain text.",
        serving_with(_answer_refusal=refuses_barely),
        over_http=True,
    ),
    Mutant(
        "unhealthy while paused",
        "E-56",
        "/health returns 503 during a pause.",
        serving_with(_json=unhealthy_while(EndpointState.PAUSED)),
        over_http=True,
    ),
)
