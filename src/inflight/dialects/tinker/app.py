"""The routes of Tinker's API, as release 0.38 of its SDK calls them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pydantic
import zstandard
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inflight.dialects.tinker import requests as wire
from inflight.dialects.tinker.futures import FailedCall, GoneError, NotFoundError
from inflight.dialects.tinker.protobuf import CONTENT_TYPE
from inflight.dialects.tinker.service import TinkerService
from inflight.errors import InflightError
from inflight.http.bodies import message_of
from inflight.http.incoming_requests import content_of
from inflight.http.tokens import carries_token

API = "/api/v1"
KEY_PREFIX = "tml-"
"""The SDK sends only keys that begin with this prefix, so the key of a server is ``tml-TOKEN``."""
MAX_BODY_BYTES = 1 << 20
"""Maximum size, in bytes, of the body of requests without tokens."""
MAX_DATA_BYTES = 256 << 20
"""Maximum size, in bytes, of the body of a ``forward_backward``; `CLIENT_CONFIG` makes the SDK split larger ones."""
_CHUNK_BYTES = 64 << 20
_TOKEN_BYTES = 64
"""Maximum length, in bytes, of the JSON of a prompt token, or of a token that is scored at its position."""
_MAX_TARGETS = 32

Body = TypeVar("Body", bound=pydantic.BaseModel)
Numbered = TypeVar(
    "Numbered", wire.OptimStep, wire.SaveWeights, wire.SaveWeightsForSampler, wire.NumberedCall, wire.LoadWeights
)
Handler = Callable[[Request], Awaitable[Response]]
CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1 << 16,
    "fwdbwd_max_chunk_bytes_count": _CHUNK_BYTES,
    "sample_join_sampling_session": True,
}
"""The flags of the SDK that this server sets."""

_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
_NO_ACCOUNTS = "this server has no accounts"
_NO_PROJECTS = "this server has no projects"
_NEEDS_KIND = "include the checkpoint's kind, as in lists of checkpoints: weights/NAME or sampler_weights/NAME"
_REFUSED_ROUTES: tuple[tuple[str, str, str], ...] = (
    ("DELETE", "/training_runs/{model_id}/checkpoints/{name}", _NEEDS_KIND),
    ("POST", f"{_CHECKPOINT}/publish", f"{_NO_ACCOUNTS}: all clients share its key, and with it every checkpoint"),
    ("DELETE", f"{_CHECKPOINT}/publish", f"{_NO_ACCOUNTS}: all clients share its key, and with it every checkpoint"),
    ("GET", f"{_CHECKPOINT}/external_weights_urls", "this server stores no weights elsewhere: copy them from its disk"),
    ("POST", "/copy_weights", f"{_NO_PROJECTS} that weights could be copied to"),
    ("PUT", "/sessions/{session_id}/project", f"{_NO_PROJECTS} that a session could be assigned to"),
    ("GET", "/sessions/{session_id}/trace_export", "this server records no traces of sessions"),
    ("POST", "/sessions/search", "sessions cannot be searched: list them instead"),
    (
        "POST",
        "/create_custom_loss",
        "custom losses do not run on this server: pass a function to forward_backward_custom",
    ),
    ("GET", "/audit", f"{_NO_ACCOUNTS}, and so no audit log"),
    ("GET", "/billing/usage/events", f"{_NO_ACCOUNTS}, and so no billing"),
    ("GET", "/billing/usage/checkpoints/current", f"{_NO_ACCOUNTS}: checkpoints list their sizes"),
)
"""Routes of Tinker's API that are refused: the method, the path and the reason that the error states."""


def create_app(service: TinkerService, *, token: str) -> Starlette:
    """Return the application. Every route except ``/healthz`` needs the key ``tml-TOKEN``."""
    if not token:
        raise ValueError("create_app needs a token, because training is never open to everyone")

    async def body_of(request: Request, kind: type[Body], max_bytes: int = MAX_BODY_BYTES) -> tuple[Body, bytes]:
        content = await content_of(request, max_bytes, is_trusted=True)
        try:
            return await message_of(kind, content), content
        except ValueError as error:
            raise _RefusedError(422, f"{request.url.path} cannot accept this body: {error}") from error

    async def client_config(request: Request) -> Response:
        return JSONResponse(CLIENT_CONFIG)

    async def dynamic_config(request: Request) -> Response:
        return JSONResponse(
            {"refresh_interval_sec": 300, "sample_cancel_enabled": False, "sample_cancel_max_batch_size": 64}
        )

    async def telemetry(request: Request) -> Response:
        await content_of(request, 16 << 20, is_trusted=True)
        return JSONResponse({"status": "accepted"})

    async def create_session(request: Request) -> Response:
        asked, _ = await body_of(request, wire.CreateSession)
        return JSONResponse({"session_id": service.create_session(asked), "type": "create_session"})

    async def sessions(request: Request) -> Response:
        return JSONResponse(_page(request, "sessions", service.session_ids()))

    async def session(request: Request) -> Response:
        return JSONResponse(service.session_info(request.path_params["session_id"]))

    async def heartbeat(request: Request) -> Response:
        asked, _ = await body_of(request, wire.OfSession)
        if not service.heartbeat(asked.session_id):
            raise _RefusedError(410, f"session {asked.session_id!r} has finished")
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(request: Request) -> Response:
        await service.finish_session(request.path_params["session_id"])
        return JSONResponse({"type": "finish_session"})

    async def create_model(request: Request) -> Response:
        asked, _ = await body_of(request, wire.CreateModel)
        return _future(service.create_model(asked))

    async def unload_model(request: Request) -> Response:
        asked, _ = await body_of(request, wire.OfModel)
        return _future(service.unload_model(asked.model_id), asked.model_id)

    async def get_info(request: Request) -> Response:
        asked, _ = await body_of(request, wire.OfModel)
        return JSONResponse(service.info(asked.model_id))

    async def forward_backward(request: Request) -> Response:
        content = await content_of(request, MAX_DATA_BYTES, is_trusted=True)
        if request.headers.get("content-encoding") == "zstd":
            content = _decompressed(content)
        return _future(*service.forward_backward(content))

    def numbered(kind: type[Numbered], call: Callable[[Numbered, bytes], str]) -> Handler:
        """Return the handler for a numbered call of a model; a repeated call is recognized by its content."""

        async def handle(request: Request) -> Response:
            asked, content = await body_of(request, kind)
            return _future(call(asked, content), asked.model_id)

        return handle

    async def create_sampler(request: Request) -> Response:
        asked, _ = await body_of(request, wire.CreateSamplingSession)
        return JSONResponse({"sampling_session_id": service.create_sampler(asked), "type": "create_sampling_session"})

    async def join_sampler(request: Request) -> Response:
        asked, _ = await body_of(request, wire.JoinSamplingSession)
        number = service.sampling.join(asked.sampling_session_id)
        return JSONResponse({"client_counter": number, "type": "join_sampling_session"})

    async def sampler_info(request: Request) -> Response:
        return JSONResponse(service.sampling.info(request.path_params["sampler_id"]))

    async def sample(request: Request) -> Response:
        max_bytes = MAX_BODY_BYTES + _TOKEN_BYTES * (1 + _MAX_TARGETS) * service.backend.max_model_len
        asked, _ = await body_of(request, wire.Sample, max_bytes)
        request_id, sequence_ids = service.sampling.sample(asked)
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": sequence_ids})

    async def retrieve_future(request: Request) -> Response:
        asked, _ = await body_of(request, wire.RetrieveFuture)
        try:
            outcome = await service.futures.retrieve(asked.request_id)
        except GoneError as error:
            raise _RefusedError(410, f"there is no future {error}; the server may have been restarted") from error
        if outcome is None:
            return JSONResponse({"type": "try_again", "request_id": asked.request_id, "queue_state": "active"})
        if isinstance(outcome, FailedCall):
            return JSONResponse({"error": outcome.error, "category": outcome.category})
        if isinstance(outcome, bytes):
            return Response(outcome, media_type=CONTENT_TYPE)
        return JSONResponse(outcome)

    async def sequence(request: Request) -> Response:
        return JSONResponse({"version_spans": service.sampling.spans(request.path_params["sequence_id"])})

    async def capabilities(request: Request) -> Response:
        backend = service.backend
        model = {
            "model_name": backend.model_name,
            "max_context_length": backend.max_model_len,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def training_runs(request: Request) -> Response:
        return JSONResponse(_page(request, "training_runs", service.training_runs()))

    async def training_run(request: Request) -> Response:
        return JSONResponse(service.training_run(request.path_params["model_id"]))

    async def checkpoints(request: Request) -> Response:
        model_id = request.path_params["model_id"]
        service.training_run(model_id)
        return JSONResponse({"checkpoints": [it.as_json() for it in service.store.of_model(model_id)]})

    async def all_checkpoints(request: Request) -> Response:
        found = [it.as_json() for model_id in service.store.model_ids() for it in service.store.of_model(model_id)]
        found.sort(key=lambda it: str(it["time"]), reverse=True)
        return JSONResponse(_page(request, "checkpoints", found))

    async def checkpoint(request: Request) -> Response:
        found = service.store.find("tinker://{model_id}/{kind}/{name}".format(**request.path_params))
        if request.method == "DELETE":
            service.store.delete(found)
            return Response(status_code=204)
        asked, _ = await body_of(request, wire.SetTtl)
        service.store.set_ttl(found, asked.ttl_seconds)
        return JSONResponse({"type": "ttl"})

    async def weights_info(request: Request) -> Response:
        asked, _ = await body_of(request, wire.WeightsInfo)
        facts = service.store.find(asked.tinker_path).facts
        is_lora = facts.lora_rank > 0
        parts = dict.fromkeys(("train_mlp", "train_attn"), True) | {"train_unembed": not is_lora}
        rank = {"lora_rank": facts.lora_rank} if is_lora else {}
        return JSONResponse({"base_model": facts.base_model, "is_lora": is_lora, **rank, **parts})

    run = "/training_runs/{model_id}"
    handlers: list[tuple[str, str, Handler]] = [
        ("POST", "/client/config", client_config),
        ("POST", "/client/dynamic_config", dynamic_config),
        ("POST", "/telemetry", telemetry),
        ("POST", "/create_session", create_session),
        ("GET", "/sessions", sessions),
        ("GET", "/sessions/{session_id}", session),
        ("POST", "/session_heartbeat", heartbeat),
        ("POST", "/sessions/{session_id}/finish", finish_session),
        ("POST", "/create_model", create_model),
        ("POST", "/unload_model", unload_model),
        ("POST", "/get_info", get_info),
        ("POST", "/forward_backward", forward_backward),
        ("POST", "/optim_step", numbered(wire.OptimStep, service.optim_step)),
        ("POST", "/save_weights", numbered(wire.SaveWeights, service.save_weights)),
        ("POST", "/save_weights_for_sampler", numbered(wire.SaveWeightsForSampler, service.save_for_sampler)),
        ("POST", "/save_weights_external", numbered(wire.NumberedCall, service.save_external)),
        ("POST", "/load_weights", numbered(wire.LoadWeights, service.load_weights)),
        ("POST", "/create_sampling_session", create_sampler),
        ("POST", "/join_sampling_session", join_sampler),
        ("GET", "/samplers/{sampler_id}", sampler_info),
        ("POST", "/asample", sample),
        ("POST", "/retrieve_future", retrieve_future),
        ("GET", "/inflight/sequences/{sequence_id}", sequence),
        ("GET", "/get_server_capabilities", capabilities),
        ("GET", "/training_runs", training_runs),
        ("GET", run, training_run),
        ("GET", f"{run}/checkpoints", checkpoints),
        ("GET", "/checkpoints", all_checkpoints),
        ("DELETE", _CHECKPOINT, checkpoint),
        ("PUT", f"{_CHECKPOINT}/ttl", checkpoint),
        ("POST", "/weights_info", weights_info),
        *((method, path, _refusing(why)) for method, path, why in _REFUSED_ROUTES),
    ]
    routes = [
        Route(API + path, _guarded(handle, token, lambda: service.is_stopping), methods=[method])
        for method, path, handle in handlers
    ]
    routes.append(Route(f"{API}/healthz", healthz, methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})
    app.router.redirect_slashes = False
    return app


class _RefusedError(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def _guarded(handle: Handler, token: str, is_stopping: Callable[[], bool]) -> Handler:
    """Return a handler that checks the key before it reads the body, and reports errors as JSON.

    The SDK repeats a call after the statuses 408, 409, 429 and 500 or above, and treats any other error as final.
    """

    async def guarded(request: Request) -> Response:
        given = request.headers.get("x-api-key", "")
        if not carries_token(given, token, scheme=KEY_PREFIX):
            what = "wrong" if given else "missing"
            return _refusal(401, f"the header X-API-Key is {what}: it must be {KEY_PREFIX} and the server's token")
        if is_stopping():
            return _refusal(503, "the server is stopping")
        try:
            return await handle(request)
        except _RefusedError as error:
            return _refusal(error.status, str(error))
        except NotFoundError as error:
            return _refusal(404, str(error))
        except InflightError as error:
            return _refusal(400, str(error))
        except ClientDisconnect:
            return Response(status_code=499)

    return guarded


def _refusing(why: str) -> Handler:
    async def refuse(request: Request) -> Response:
        raise _RefusedError(400, why)

    return refuse


def _refusal(status: int, detail: str) -> Response:
    return JSONResponse({"detail": detail}, status_code=status)


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


def _future(request_id: str, model_id: str | None = None) -> Response:
    return JSONResponse({"request_id": request_id} | ({} if model_id is None else {"model_id": model_id}))


def _page(request: Request, name: str, found: Sequence[Any]) -> dict[str, Any]:
    """Return the part of a list that ``limit`` and ``offset`` in the query select."""
    try:
        limit, offset = (int(request.query_params.get(key, default)) for key, default in (("limit", 20), ("offset", 0)))
    except ValueError:
        raise _RefusedError(422, "limit and offset must be whole numbers") from None
    if not (0 <= limit <= 10_000 and offset >= 0):
        raise _RefusedError(422, "limit must be from 0 to 10000, and offset at least 0")
    return {
        name: found[offset : offset + limit],
        "cursor": {"offset": offset, "limit": limit, "total_count": len(found)},
    }


def _decompressed(content: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(content)
        if not 0 <= size <= MAX_DATA_BYTES:
            raise _RefusedError(
                413, f"the body decompresses to {size} bytes, but at most {MAX_DATA_BYTES} are accepted"
            )
        return zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError as error:
        raise _RefusedError(400, f"the body cannot be decompressed: {error}") from error
