"""The application with SGLang's routes. The routes for updates exist only if a `DirectoryUpdates` is passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.contracts import InferenceEndpoint
from inflight.dialects.directory_updates import DirectoryUpdates, policy_of
from inflight.dialects.running_requests import RunningRequests
from inflight.dialects.serving import DialectRoutes, EndpointPool, message_in, ok
from inflight.dialects.vllm.messages import (
    DialectMessage,
    Encode,
    EngineSampling,
    OnePrompt,
    RequestName,
    Text,
    generate_request,
    token_ids_of,
    weight_versions_of,
)
from inflight.errors import InflightError, InvalidRequestError
from inflight.http import routes
from inflight.http.incoming_requests import run_while_connected
from inflight.http.server import error_response
from inflight.wire import Completion, GenerateRequest, GenerateResponse, InFlightPolicy

_GROUP = (
    "this server does not receive weights over a torch group or in pickles; write a directory, and post it to "
    "/update_weights_from_disk"
)
REFUSED = {
    "/init_weights_update_group": _GROUP,
    "/update_weights_from_distributed": _GROUP,
    "/update_weights_from_tensor": _GROUP,
    "/update_weights_from_ipc": _GROUP,
    "/destroy_weights_update_group": _GROUP,
    "/weights_checker": (
        "it compares an engine's own layout; this server verifies every update by checksums in transit"
    ),
    "/release_memory_occupation": "release memory through the servers' own routes",
    "/resume_memory_occupation": "restore memory through the servers' own routes",
}
"""SGLang's routes that are not supported, with the reasons."""
_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
"""vLLM's names for SGLang's pause modes. SGLang's ``retract`` recomputes keys and values; ``in_place`` keeps them."""


class SglangSampling(EngineSampling):
    """Sampling parameters under SGLang's names where they differ from vLLM's."""

    max_tokens: int | None = Field(default=128, alias="max_new_tokens")
    seed: int | None = Field(default=None, alias="sampling_seed")
    min_tokens: Literal[0] = Field(default=0, alias="min_new_tokens")
    no_stop_trim: bool = False


class GenerateBody(DialectMessage):
    """Body of ``/generate`` for one prompt. The logprobs of sampled tokens are always returned."""

    input_ids: OnePrompt | None = None
    text: Text | None = None
    sampling_params: SglangSampling = SglangSampling()
    return_logprob: bool = False
    logprob_start_len: Literal[-1] = -1
    top_logprobs_num: Literal[0] = 0
    return_text_in_logprobs: Literal[False] = False
    stream: Literal[False] = False
    rid: RequestName | None = None

    @property
    def prompt(self) -> Any:
        """The token ids or the text. Raises `InvalidRequestError` unless exactly one of them is given."""
        if (self.input_ids is None) == (self.text is None):
            raise InvalidRequestError("/generate needs exactly one of input_ids and text")
        return self.text or self.input_ids


class PauseBody(DialectMessage):
    """Body of ``/pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class DiskBody(DialectMessage):
    """Body of ``/update_weights_from_disk``. Running requests continue unless ``abort_all_requests`` is set."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: Annotated[str, Field(max_length=256)] | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class VersionBody(DialectMessage):
    """Body of ``/update_weight_version``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    new_version: Annotated[str, Field(max_length=256)]


class AbortBody(DialectMessage):
    """Body of ``/abort_request``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rid: str = ""
    abort_all: bool = False


def sglang_app(
    endpoints: Sequence[InferenceEndpoint],
    *,
    token: str | None,
    updates: DirectoryUpdates | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    encode: Encode | None = None,
) -> Starlette:
    """Return the application. ``token`` guards the routes that change a server; None leaves them open.

    ``decode`` returns the text of token ids; without it, the returned text is empty. Without ``encode``, text prompts
    are refused.
    """
    pool = EndpointPool(endpoints)
    running = RunningRequests(pool, updates)
    served = DialectRoutes(token, _failure)

    def label_of(version: int) -> str:
        return str(version) if updates is None else updates.label_of(version)

    async def served_label() -> str:
        version = max((await pool.health())[1])
        return label_of(version) if updates is None else updates.served_label(version)

    async def generate(request: Request) -> Response:
        size = routes.GENERATE.request_size.bytes_for((await pool.capabilities()).max_model_len)
        body = await message_in(request, GenerateBody, size)
        if refusal := running.refusal():
            return refusal
        asked = generate_request(body.rid, token_ids_of(body.prompt, encode), body.sampling_params)
        answer = await running.generate(request, asked, body.rid)
        found = [_one(body, asked, answer, completion, label_of, decode) for completion in answer.completions]
        return JSONResponse(found[0] if len(found) == 1 else found)

    async def health(_: Request) -> Response:
        is_well, versions = await pool.health()
        return JSONResponse({"ok": is_well, "versions": versions}, 200 if is_well else 503)

    async def info(_: Request) -> Response:
        can = await pool.capabilities()
        version = await served_label()
        return ok(model_path=can.model, is_generation=True, weight_version=version)

    async def version(_: Request) -> Response:
        return ok(weight_version=await served_label())

    served.add("POST", "/generate", generate)
    for path in ("/health", "/health_generate"):
        served.add("GET", path, health)
    for path in ("/model_info", "/get_model_info"):
        served.add("GET", path, info)
    served.add("GET", "/get_weight_version", version)
    if updates is not None:
        _add_updates(served, pool, running, updates)
    return served.app()


def _add_updates(
    served: DialectRoutes, pool: EndpointPool, running: RunningRequests, updates: DirectoryUpdates
) -> None:
    async def pause(request: Request) -> Response:
        mode = (await message_in(request, PauseBody)).mode
        policy = policy_of(_MODES[mode], clears_cache=mode == "retract")
        await run_while_connected(request, running.pause(updates, policy))
        return _done("generation is paused")

    async def resume(_: Request) -> Response:
        await running.resume(updates)
        return _done("generation continues")

    async def update(request: Request) -> Response:
        body = await message_in(request, DiskBody)
        policy = InFlightPolicy.KEEP
        if body.abort_all_requests or body.flush_cache:
            policy = InFlightPolicy.ABORT if body.abort_all_requests else InFlightPolicy.RECOMPUTE
        version = await updates.load(body.model_path, label=body.weight_version, in_flight=policy)
        return _done(f"version {updates.label_of(version)} is served")

    async def name_version(request: Request) -> Response:
        body = await message_in(request, VersionBody)
        updates.relabel(max((await pool.health())[1]), body.new_version)
        return ok(success=True, message="the version has a new label", new_version=body.new_version)

    async def abort(request: Request) -> Response:
        body = await message_in(request, AbortBody)
        if body.rid or body.abort_all:
            await running.abort([] if body.abort_all else [body.rid])
        return _done("the requests have ended")

    async def renew(_: Request) -> Response:
        """Renew the lease of a pause. Updates are atomic, so nothing needs to begin or end."""
        await updates.renew()
        return _done("nothing needs to be done")

    async def nothing(_: Request) -> Response:
        """Do nothing: an update already makes endpoints ignore cache entries from other weights."""
        return _done("nothing needs to be done")

    control: dict[str, Any] = {
        "/pause_generation": pause,
        "/continue_generation": resume,
        "/begin_weight_update": renew,
        "/update_weights_from_disk": update,
        "/end_weight_update": renew,
        "/update_weight_version": name_version,
        "/abort_request": abort,
        "/flush_cache": nothing,
    }
    for path, handler in control.items():
        served.add("POST", path, handler, control=True)
    served.refuse(REFUSED)


def _one(
    body: GenerateBody,
    asked: GenerateRequest,
    answer: GenerateResponse,
    completion: Completion,
    label_of: Callable[[int], str],
    decode: Callable[[Sequence[int]], str] | None,
) -> dict[str, Any]:
    """Return one completion in the format of a response from ``/generate``."""
    spans = weight_versions_of(completion.version_spans, label_of)
    reason: dict[str, Any] = {"type": completion.finish_reason}
    if completion.finish_reason == "length":
        reason["length"] = len(completion.token_ids)
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return {
        "text": "" if decode is None else decode(completion.token_ids),
        "output_ids": list(completion.token_ids),
        "meta_info": {
            "id": body.rid or answer.request_id,
            "finish_reason": reason,
            "prompt_tokens": len(asked.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
            "output_token_logprobs": [[logprob, token_id, None] for token_id, logprob in pairs],
            "weight_version": spans[-1]["version"] if spans else None,
            "weight_versions": spans,
        },
    }


def _done(message: str) -> Response:
    return ok(success=True, message=message)


def _failure(error: InflightError) -> Response:
    """Return an error in SGLang's form, with the HTTP status that the contract specifies."""
    return JSONResponse({"success": False, "message": str(error)}, error_response(error).status_code)
