"""The application with vLLM's routes. The routes for updates exist only if a `DirectoryUpdates` is passed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.contracts import InferenceEndpoint
from inflight.dialects.directory_updates import DirectoryUpdates, policy_of
from inflight.dialects.running_requests import RunningRequests
from inflight.dialects.serving import DialectRoutes, EndpointPool, flag_in, message_in, ok
from inflight.dialects.vllm.messages import (
    AbortBody,
    AdapterBody,
    AdapterName,
    CompletionsBody,
    Encode,
    FinishBody,
    GenerateBody,
    UpdateBody,
    VersionBody,
    chat_answer,
    completions_answer,
    generate_answer,
    generate_request,
    prompt_logprobs_of,
    score_request,
    server_info,
    token_ids_of,
)
from inflight.errors import BusyError, InvalidRequestError, UnsupportedError
from inflight.http import routes
from inflight.http.incoming_requests import run_while_connected
from inflight.wire import ChatCompletionRequest

_NCCL = (
    "this server does not receive weights over NCCL, which needs GPUs on both sides; send a directory to "
    "/update_weights"
)
_PICKLE = "it names methods of vLLM's own workers, with arguments as pickles, which this server never reads"
REFUSED = {
    "/init_weight_transfer_engine": _NCCL,
    "/init_broadcaster": _NCCL,
    "/collective_rpc": _PICKLE,
    "/fetch_weights": "its deltas have their own format; send a directory to /update_weights",
    "/weight_checker": "it compares an engine's own layout; this server verifies every update by checksums in transit",
    "/sleep": "release memory through the servers' own routes",
    "/wake_up": "restore memory through the servers' own routes",
}
"""Routes of vLLM and of its clients that are not supported, with the reasons."""
INTERNAL_PREFIX = "generate-tokens-"
"""The prefix that vLLM adds to the ids of requests to ``/inference/v1/generate``; clients abort requests by these ids.
"""
_MAX_ADAPTERS = 1024
_MAX_RANK = 512


def vllm_app(
    endpoints: Sequence[InferenceEndpoint],
    *,
    token: str | None,
    updates: DirectoryUpdates | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    encode: Encode | None = None,
) -> Starlette:
    """Return the application. ``token`` guards the routes that change a server; None leaves them open.

    ``decode`` returns the text of token ids, for ``/v1/completions``; without it, the returned text is empty. Without
    ``encode``, text prompts are refused.
    """
    pool = EndpointPool(endpoints)
    running = RunningRequests(pool, updates)
    served = DialectRoutes(token)

    async def generate(request: Request) -> Response:
        body = await message_in(request, GenerateBody, await _bytes_for(pool))
        await check_model(body.model)
        if refusal := running.refusal():
            return refusal
        asked = generate_request(body.request_id, body.token_ids, body.sampling_params)
        answer = await running.generate(request, asked, body.request_id)
        found = generate_answer(answer, label_of)
        if (top_k := body.sampling_params.prompt_logprobs) is not None:
            scores = await running.score(request, score_request(body.token_ids, top_k))
            found["prompt_logprobs"] = prompt_logprobs_of(body.token_ids, scores)
        return JSONResponse(found)

    async def completions(request: Request) -> Response:
        body = await message_in(request, CompletionsBody, await _bytes_for(pool))
        await check_model(body.model)
        if body.prompt_logprobs is not None:
            raise UnsupportedError("prompt_logprobs are supported only by /inference/v1/generate")
        if refusal := running.refusal():
            return refusal
        prompt = token_ids_of(body.prompt, encode, specials=body.add_special_tokens)
        answer = await running.generate(request, generate_request(body.request_id, prompt, body), body.request_id)
        texts = ["" if decode is None else decode(completion.token_ids) for completion in answer.completions]
        model = body.model or (await pool.capabilities()).model
        return JSONResponse(completions_answer(body, prompt, answer, model=model, texts=texts, label_of=label_of))

    async def chat(request: Request) -> Response:
        can = await pool.capabilities()
        size = routes.CHAT_COMPLETIONS.request_size.bytes_for(can.max_model_len, images=can.images)
        body = await message_in(request, ChatCompletionRequest, size)
        if body.stream:
            raise UnsupportedError("streaming is not supported by this server; omit stream")
        await check_model(body.model)
        if refusal := running.refusal():
            return refusal
        answer = await running.chat(request, body)
        return running.paused_answer() if answer is None else JSONResponse(chat_answer(answer, label_of))

    async def models(_: Request) -> Response:
        can = await pool.capabilities()
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "inflight"} for name in await names()]
        return ok(object="list", data=[card | {"max_model_len": can.max_model_len} for card in cards])

    async def health(_: Request) -> Response:
        is_well, versions = await pool.health()
        return JSONResponse({"ok": is_well, "versions": versions}, 200 if is_well else 503)

    async def load(_: Request) -> Response:
        return ok(server_load=running.num_completions)

    adapters: dict[str, int] = {}
    """The version with which each adapter was loaded, by name; adapters that were unloaded are removed."""

    async def names() -> list[str]:
        return [(await pool.capabilities()).model, *adapters]

    async def check_model(name: str | None) -> None:
        known = await names()
        if name is None:
            return
        if name not in known:
            raise InvalidRequestError(f"the model {name!r} is not served; known: {', '.join(known)}")
        if name not in adapters and updates is not None and updates.serves_adapter:
            raise InvalidRequestError(
                f"{name!r} without an adapter is no longer served, because a server has one set of weights; request "
                f"one of {', '.join(adapters) or 'the adapters, after loading one'}"
            )

    def label_of(version: int) -> str:
        return str(version) if updates is None else updates.label_of(version)

    served.add("POST", "/inference/v1/generate", generate)
    served.add("POST", "/v1/completions", completions)
    served.add("POST", "/v1/chat/completions", chat)
    served.add("GET", "/v1/models", models)
    served.add("GET", "/health", health)
    served.add("GET", "/load", load)
    if updates is not None:
        _add_updates(served, pool, running, updates, adapters)
    return served.app()


def _add_updates(
    served: DialectRoutes,
    pool: EndpointPool,
    running: RunningRequests,
    updates: DirectoryUpdates,
    adapters: dict[str, int],
) -> None:
    """Add the routes that change or report what the endpoints serve and whether they are paused."""
    phase = _Phase(updates.lease_s)
    adapter_lock = asyncio.Lock()

    async def pause(request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        policy = policy_of(mode, clears_cache=flag_in(request, "clear_cache", True))
        await run_while_connected(request, running.pause(updates, policy))
        return ok(status="paused")

    async def resume(_: Request) -> Response:
        await running.resume(updates)
        return ok(status="resumed")

    async def is_paused(_: Request) -> Response:
        return ok(is_paused=updates.pause_policy is not None)

    async def start_update(_: Request) -> Response:
        phase.start()
        await updates.renew()
        return ok(status="started")

    async def update(request: Request) -> Response:
        body = await message_in(request, UpdateBody)
        if body.update_info is not None:
            directory = _directory_of(body.update_info)
            phase.add(directory)
            await updates.renew()
            return ok(status="received")
        if body.weight_dir is None:
            raise InvalidRequestError(f"/update_weights needs weight_dir, the directory of a checkpoint: {_NCCL}")
        version = await updates.load(body.weight_dir, label=body.weight_version)
        return ok(status="updated", weight_version=updates.label_of(version))

    async def finish_update(request: Request) -> Response:
        body = await message_in(request, FinishBody)
        version = await updates.load(phase.finish(), label=body.weight_version)
        return ok(status="finished", weight_version=updates.label_of(version))

    async def name_version(request: Request) -> Response:
        body = await message_in(request, VersionBody)
        updates.relabel(max((await pool.health())[1]), body.new_version)
        return ok(success=True)

    async def weight_info(_: Request) -> Response:
        return ok(weight_version=updates.served_label(max((await pool.health())[1])))

    async def world_size(_: Request) -> Response:
        return ok(world_size=sum([(await endpoint.capabilities()).num_ranks for endpoint in pool.endpoints]))

    async def info(_: Request) -> Response:
        can = await pool.capabilities()
        lora = {"max_lora_rank": _MAX_RANK, "max_loras": _MAX_ADAPTERS} if can.lora else None
        return JSONResponse(server_info(can.dtype, can.max_model_len, model=can.model, lora=lora))

    async def load_adapter(request: Request) -> Response:
        body = await message_in(request, AdapterBody)
        async with adapter_lock:
            if body.lora_name == (await pool.capabilities()).model:
                raise InvalidRequestError(f"{body.lora_name!r} is already served as the base model; use another name")
            if body.lora_name in adapters and not body.load_inplace:
                raise InvalidRequestError(
                    f"adapter {body.lora_name!r} is already served; unload it first, set load_inplace, or use another "
                    "name"
                )
            if body.lora_name not in adapters and len(adapters) >= _MAX_ADAPTERS:
                raise InvalidRequestError(
                    f"{_MAX_ADAPTERS} adapters, the maximum, are already loaded; unload some of them"
                )
            adapters[body.lora_name] = await updates.load_adapter(body.lora_path, label=body.lora_name)
        return ok(status="loaded", weight_version=body.lora_name)

    async def unload_adapter(request: Request) -> Response:
        body = await message_in(request, AdapterName)
        if adapters.pop(body.lora_name, None) is None:
            raise InvalidRequestError(
                f"no adapter {body.lora_name!r} is loaded; known: {', '.join(adapters) or 'none'}"
            )
        return ok(status="unloaded")

    async def abort(request: Request) -> Response:
        names = (await message_in(request, AbortBody)).request_ids
        await running.abort([name.removeprefix(INTERNAL_PREFIX) for name in names])
        return ok(status="aborted")

    async def reset_prefix_cache(_: Request) -> Response:
        """Do nothing: an update already makes endpoints ignore cache entries from other weights."""
        return ok(status="ok")

    control: dict[str, Any] = {
        "/pause": pause,
        "/resume": resume,
        "/start_weight_update": start_update,
        "/update_weights": update,
        "/finish_weight_update": finish_update,
        "/update_weight_version": name_version,
        "/abort_requests": abort,
        "/reset_prefix_cache": reset_prefix_cache,
    }
    for path, handler in control.items():
        served.add("POST", path, handler, control=True)
    for prefix in ("", "/v1"):
        served.add("POST", f"{prefix}/load_lora_adapter", load_adapter, control=True)
        served.add("POST", f"{prefix}/unload_lora_adapter", unload_adapter, control=True)
    for path, handler in {
        "/is_paused": is_paused,
        "/weight_info": weight_info,
        "/get_world_size": world_size,
        "/server_info": info,
    }.items():
        served.add("GET", path, handler)
    served.refuse(REFUSED)


class _Phase:
    """The state of an update in separate phases: a start, any number of announcements, and a finish.

    An update that has been started ends ``lease_s`` seconds after its last call, because its client may have died.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._directory: str | None = None
        self._expires_at: float | None = None

    @property
    def _is_open(self) -> bool:
        return self._expires_at is not None and time.monotonic() < self._expires_at

    def start(self) -> None:
        if self._is_open:
            raise BusyError(
                "a weight update has already been started; finish it first, or wait until its lease expires, "
                f"{self._lease_s:g} s after its last call"
            )
        self._directory = None
        self._renew()

    def add(self, directory: str) -> None:
        self._require_open()
        if self._directory not in (None, directory):
            raise InvalidRequestError(f"this update already has the directory {self._directory!r}, not {directory!r}")
        self._directory = directory
        self._renew()

    def finish(self) -> str:
        self._require_open()
        self._expires_at = None
        if self._directory is None:
            raise InvalidRequestError("the weight update has no directory; it has ended without a change")
        return self._directory

    def _renew(self) -> None:
        self._expires_at = time.monotonic() + self._lease_s

    def _require_open(self) -> None:
        if self._expires_at is None:
            raise InvalidRequestError("no weight update has been started; post to /start_weight_update first")
        if not self._is_open:
            raise InvalidRequestError(
                f"the weight update has ended without a change, because its lease of {self._lease_s:g} s expired "
                "before the next call; post to /start_weight_update again"
            )


def _directory_of(update_info: dict[str, Any] | list[Any]) -> str:
    directory = update_info.get("weight_dir") if isinstance(update_info, dict) else None
    if not isinstance(directory, str):
        raise UnsupportedError(f"update_info without weight_dir is not supported: {_NCCL}")
    return directory


async def _bytes_for(pool: EndpointPool) -> int:
    return routes.GENERATE.request_size.bytes_for((await pool.capabilities()).max_model_len)
