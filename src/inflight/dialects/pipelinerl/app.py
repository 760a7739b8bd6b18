"""The routes of a PipelineRL inference server, in front of endpoints of the contract.

Its trainer posts updates and its actors post chats here. A failed update is answered with an error, never with ``ok``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inflight.base.tasks import run_together
from inflight.contracts import InferenceEndpoint
from inflight.dialects.pipelinerl.messages import (
    CHAT_ROUTE,
    MAX_UPDATE_BYTES,
    UPDATE_ROUTE,
    WeightUpdateRequest,
    chat_answer,
    chat_body,
)
from inflight.errors import InflightError, InvalidRequestError
from inflight.http import routes
from inflight.http.bodies import message_of
from inflight.http.receiving import content_of, run_while_connected
from inflight.http.server import error_response
from inflight.wire import ChatCompletionRequest, EndpointState, ModelCard, ModelList

Handler = Callable[[Request], Awaitable[Response]]
Receive = Callable[[WeightUpdateRequest], Awaitable[None]]
"""Publishes an update to the endpoints. Raises `InflightError`."""


def dialect_app(
    endpoints: Sequence[InferenceEndpoint],
    *,
    receive: Receive | None,
    on_unreadable: Callable[[], None],
    is_ready: Callable[[], bool],
) -> Starlette:
    """Return the application. Without ``receive`` it has no route for updates.

    ``on_unreadable`` is called when an update cannot be read. Each chat goes to the endpoint with the fewest running
    chats. ``/health`` reports success once ``is_ready`` returns true and every endpoint serves.
    """
    num_running = dict.fromkeys(endpoints, 0)

    async def update(request: Request) -> Response:
        assert receive is not None
        try:
            message = await message_of(WeightUpdateRequest, await content_of(request, MAX_UPDATE_BYTES))
        except ValueError as error:
            on_unreadable()
            raise InvalidRequestError(f"{UPDATE_ROUTE} cannot use this body: {error}") from error
        # The trainer broadcasts even if its connection is lost.
        await asyncio.shield(receive(message))
        return JSONResponse({"status": "ok"})

    async def chat(request: Request) -> Response:
        endpoint = min(endpoints, key=lambda it: num_running[it])
        can = await endpoint.capabilities()
        size = routes.CHAT_COMPLETIONS.request_size.bytes_for(can.max_model_len, images=can.images)
        content = await content_of(request, size)
        try:
            body = chat_body(json.loads(content))
            asked = await message_of(ChatCompletionRequest, json.dumps(body).encode())
        except ValueError as error:
            raise InvalidRequestError(f"{CHAT_ROUTE} cannot use this body: {error}") from error
        if asked.stream:
            raise InvalidRequestError(f"{CHAT_ROUTE} does not support streaming here")
        num_running[endpoint] += 1
        try:
            return JSONResponse(chat_answer(await run_while_connected(request, endpoint.chat_completion(asked))))
        finally:
            num_running[endpoint] -= 1

    async def models(_: Request) -> Response:
        names = dict.fromkeys([(await endpoint.capabilities()).model for endpoint in endpoints])
        return JSONResponse(ModelList(data=tuple(ModelCard(id=name) for name in names)).model_dump(mode="json"))

    async def health(_: Request) -> Response:
        served = await run_together(*(endpoint.weight_version() for endpoint in endpoints))
        down = (EndpointState.POISONED, EndpointState.JOINING, EndpointState.RELEASED)
        ok = is_ready() and not any(it.state in down for it in served)
        return JSONResponse({"ok": ok, "versions": [it.version for it in served]}, 200 if ok else 503)

    mounted = [
        Route(CHAT_ROUTE, _answering(chat), methods=["POST"]),
        Route("/v1/models", _answering(models), methods=["GET"]),
        Route("/health", _answering(health), methods=["GET"]),
    ]
    if receive is not None:
        mounted.append(Route(UPDATE_ROUTE, _answering(update), methods=["POST"]))

    async def refused(request: Request, error: HTTPException) -> Response:
        text = error.detail
        if error.status_code in (404, 405):
            text = f"{request.method} {request.url.path} is not served; known: {', '.join(it.path for it in mounted)}"
        response = error_response(InvalidRequestError(text))
        response.status_code = error.status_code
        return response

    handlers: dict[Any, Any] = {HTTPException: refused}
    return Starlette(routes=mounted, exception_handlers=handlers)


def _answering(handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except InflightError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)  # the client has disconnected

    return handle
