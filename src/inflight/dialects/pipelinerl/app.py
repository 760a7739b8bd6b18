"""The routes of a PipelineRL inference server, in front of inflight's endpoints.

PipelineRL's trainer posts updates to these routes, and its actors post chats. A failed update is answered with an
error, never with ``ok``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.contracts import InferenceEndpoint
from inflight.dialects.pipelinerl.messages import (
    CHAT_ROUTE,
    MAX_UPDATE_BYTES,
    UPDATE_ROUTE,
    WeightUpdateRequest,
    chat_answer,
    chat_body,
)
from inflight.dialects.serving import DialectRoutes, EndpointPool
from inflight.errors import InvalidRequestError
from inflight.http import routes
from inflight.http.bodies import message_of
from inflight.http.incoming_requests import content_of, run_while_connected
from inflight.wire import ChatCompletionRequest, ModelCard, ModelList

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
    chats. ``/health`` reports success once ``is_ready`` returns true and every endpoint is serving.
    """
    pool = EndpointPool(endpoints)

    async def update(request: Request) -> Response:
        assert receive is not None
        try:
            message = await message_of(WeightUpdateRequest, await content_of(request, MAX_UPDATE_BYTES))
        except ValueError as error:
            on_unreadable()
            raise InvalidRequestError(f"{UPDATE_ROUTE} cannot accept this body: {error}") from error
        # The trainer broadcasts even if its connection is lost.
        await asyncio.shield(receive(message))
        return JSONResponse({"status": "ok"})

    async def chat(request: Request) -> Response:
        can = await pool.capabilities()
        size = routes.CHAT_COMPLETIONS.request_size.bytes_for(can.max_model_len, images=can.images)
        content = await content_of(request, size)
        try:
            body = chat_body(json.loads(content))
            asked = await message_of(ChatCompletionRequest, json.dumps(body).encode())
        except ValueError as error:
            raise InvalidRequestError(f"{CHAT_ROUTE} cannot accept this body: {error}") from error
        if asked.stream:
            raise InvalidRequestError(f"{CHAT_ROUTE} does not support streaming on this server; omit stream")
        with pool.least_loaded() as endpoint:
            return JSONResponse(chat_answer(await run_while_connected(request, endpoint.chat_completion(asked))))

    async def models(_: Request) -> Response:
        names = dict.fromkeys([(await endpoint.capabilities()).model for endpoint in endpoints])
        return JSONResponse(ModelList(data=tuple(ModelCard(id=name) for name in names)).model_dump(mode="json"))

    async def health(_: Request) -> Response:
        serves, versions = await pool.health()
        is_well = serves and is_ready()
        return JSONResponse({"ok": is_well, "versions": versions}, 200 if is_well else 503)

    served = DialectRoutes()
    served.add("POST", CHAT_ROUTE, chat)
    served.add("GET", "/v1/models", models)
    served.add("GET", "/health", health)
    if receive is not None:
        served.add("POST", UPDATE_ROUTE, update)
    return served.app()
