"""Servers that answer as SGLang and vLLM do, with a prefix cache that weights outlive, as under ``keep``.

A prefix is computed by the weights that are served when its key is used for the first time. A token's logprob says
whether it was sampled behind a prefix of its own weights: `FRESH`, or `STALE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from inflight.contracts import InferenceEndpoint
from inflight.wire import UpdateRef
from inflight_sglang import SglangEndpoint
from inflight_sglang import flags as sglang_flags
from inflight_vllm import VllmEndpoint
from inflight_vllm import flags as vllm_flags
from inflight_vllm.updates import COMMIT, PLUGIN_PROTOCOL

FRESH, STALE = -0.5, -9.0


def decoded(token_ids: list[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


@dataclass(frozen=True)
class Refused:
    """An answer with vLLM's form of an error."""

    status: int
    kind: str
    message: str


def event_stream(events: list[Any]) -> str:
    """Server-sent events, and their end."""
    return "".join(f"data: {text}\n\n" for text in [*map(json.dumps, events), "[DONE]"])


class LabelledServer:
    """What both have in common. ``on_label`` is called whenever a client has asked for the label."""

    def __init__(self, model: Path) -> None:
        self.model = str(model)
        self.label = "default"
        self.is_paused = False
        self.is_locked = False
        self.rendered: list[int] = []
        """Token ids of any chat messages."""
        self.asked: list[str] = []
        """Paths that were asked for, in order."""
        self.on_label: Callable[[], None] | None = None
        self.is_streamed = False
        """Whether clients ask for streams."""
        self.before_event: Callable[[], Awaitable[None]] | None = None
        """Awaited before each event of a stream is sent."""
        self.num_sampled = 0
        """Completions that were sampled."""
        self.computed: dict[str, str] = {}
        """The label under which each key's prefix was computed."""

    def told_label(self) -> str:
        label = self.label
        if self.on_label is not None:
            self.on_label()
        return label

    def sampled(self, key: str) -> float:
        """Sample one token behind the prefix of a key; return its logprob."""
        self.num_sampled += 1
        return FRESH if self.computed.setdefault(key, self.label) == self.label else STALE

    @abstractmethod
    def answer(self, path: str, body: Any) -> Any:
        """Return what a route answers; a number is a status, and `Refused` a status with an error."""

    def events(self, answer: Any) -> str:
        """Return an answer as the server-sent events of a stream, one for each token."""
        raise NotImplementedError

    @abstractmethod
    def connect(self, url: str) -> InferenceEndpoint:
        """Return a client."""

    async def _sent(self, events: str) -> AsyncIterator[str]:
        for event in events.removesuffix("\n\n").split("\n\n"):
            if self.before_event is not None:
                await self.before_event()
            yield f"{event}\n\n"

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Yield the URL while the server answers."""

        async def handle(request: Request) -> Response:
            self.asked.append(request.url.path)
            body = await request.json() if await request.body() else None
            found = 401 if self.is_locked else self.answer(request.url.path, body)
            if isinstance(found, Refused):
                return JSONResponse({"error": {"message": found.message, "type": found.kind}}, found.status)
            if isinstance(found, int):
                return Response(status_code=found)
            if body and body.get("stream"):
                return StreamingResponse(self._sent(self.events(found)), media_type="text/event-stream")
            return JSONResponse(found)

        app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving


class LabelledSglang(LabelledServer):
    """As SGLang answers."""

    def answer(self, path: str, body: Any) -> Any:
        if path == "/generate" and body.get("stream") and "extra_key" not in body:
            return [self._item(FRESH, body["sampling_params"])]
        if path == "/generate" and "top_logprobs_num" in body:  # the probe of logprobs
            tops = ([[0.0, 1], [-1.0, 2]], [[0.0, 1], [-0.01, 2]])
            return [{"meta_info": {"output_top_logprobs": [top]}} for top in tops]
        if path == "/generate" and isinstance(body["sampling_params"], dict):
            return {}  # for the first token of an update
        if path == "/generate":
            asked = zip(body["extra_key"], body["sampling_params"], strict=True)
            return [self._item(self.sampled(key), params) for key, params in asked]
        settings = {"disable_overlap_schedule": True, "dp_size": 1, "pp_size": 1, "tokenizer_worker_num": 1}
        settings |= {"weight_cache_mode": "off", "disaggregation_mode": "null", "enable_watermark": False}
        settings |= {"max_req_input_len": 100, "sampling_mask_max_tokens": 1000, "tp_size": 1, "device": "cpu"}
        settings |= {"internal_states": [{"effective_max_running_requests_per_dp": 4}], "dtype": "float32"}
        answers = {
            "/openapi.json": {"paths": dict.fromkeys([*sglang_flags.NEEDED_ROUTES, "/v1/tokenize", "/v1/detokenize"])},
            "/server_info": {
                **settings,
                "model_path": self.model,
                "served_model_name": "tiny",
                "version": "0",
                "enable_deterministic_inference": False,
                "incremental_streaming_output": self.is_streamed,
            },
            "/ready": {} if self.is_streamed and not self.is_paused else 503,  # which leaves the probes out
            "/v1/tokenize": {"tokens": self.rendered},
            "/v1/detokenize": {"text": [decoded(tokens) for tokens in (body or {}).get("tokens", [])]},
            "/v1/loads": {"loads": [{"num_running_reqs": 0}]},
        }
        if path == "/ready" and not self.is_paused and self.num_sampled:
            return {}
        return {"weight_version": self.told_label()} if path == "/model_info" else answers.get(path, {})

    def _item(self, logprob: float, params: dict[str, Any]) -> dict[str, Any]:
        num = params["max_new_tokens"]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[logprob, 1, None]] * num,
            "weight_versions": [{"version": self.label, "start": 0, "end": num}],
        }
        return {"output_ids": [1] * num, "meta_info": meta}

    def events(self, answer: Any) -> str:
        events = [
            {
                "output_ids": [token_id],
                "meta_info": {
                    "finish_reason": item["meta_info"]["finish_reason"] if end == len(item["output_ids"]) else None,
                    "output_token_logprobs": item["meta_info"]["output_token_logprobs"][end - 1 : end],
                    "weight_versions": [span | {"end": end} for span in item["meta_info"]["weight_versions"]],
                },
            }
            for item in answer
            for end, token_id in enumerate(item["output_ids"], 1)
        ]
        return event_stream(events)

    def connect(self, url: str) -> InferenceEndpoint:
        return SglangEndpoint(url)


class LabelledVllm(LabelledServer):
    """As vLLM answers; ``kept`` is what its plug-in states that it keeps as the base of a delta."""

    kept: UpdateRef | None = None
    group = "file of run"
    num_replicas = 1
    refusal: Refused | None = None
    """What requests get while the server is paused; None: they are sampled, as if it resumed at once."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.commits: list[Any] = []
        """What each commit was asked to do."""
        self.num_refused = 0
        """Requests that were refused with `refusal`."""

    def answer(self, path: str, body: Any) -> Any:
        if path == "/inference/v1/generate" and self.refusal is not None and self.is_paused and body["token_ids"]:
            self.num_refused += 1
            return self.refusal
        if path == "/inference/v1/generate":
            return {"choices": self._choices(body)} if body["token_ids"] else 400
        if path == "/collective_rpc" and body["method"] == COMMIT:
            self.commits.append(body["kwargs"])
            return {"results": [{"load_s": 0.5, "paused_s": 1.0}]}
        settings = {
            "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"},
            "weight_transfer_config": {"backend": "inflight"},
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": False, "max_num_seqs": 4},
            "parallel_config": {"data_parallel_size": self.num_replicas},
        }
        kept = None if self.kept is None else self.kept.model_dump()
        status = {
            "protocol": PLUGIN_PROTOCOL,
            "phase": "done",
            "group": self.group,
            "kept": kept,
            "transports": ["file", "gloo"],
        }
        answers = {
            "/openapi.json": {"paths": dict.fromkeys([*vllm_flags.NEEDED_ROUTES, "/v1/chat/completions/render"])},
            "/version": {"version": "0"},
            "/v1/models": {"data": [{"id": "tiny", "root": self.model, "max_model_len": 100}]},
            "/server_info": {"vllm_config": settings},
            "/collective_rpc": {"results": [status]},
            "/v1/chat/completions/render": {"token_ids": self.rendered},
            "/detokenize": {"prompt": decoded((body or {}).get("tokens", []))},
            "/is_paused": {"is_paused": self.is_paused},
            "/get_world_size": {"world_size": 1},
        }
        return {"weight_version": self.told_label()} if path == "/weight_info" else answers.get(path, {})

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        num = body["sampling_params"]["max_tokens"]
        return [
            {
                "index": index,
                "token_ids": [1] * num,
                "finish_reason": "length",
                "logprobs": {"content": [{"logprob": self.sampled(body["cache_salt"])}] * num},
                "weight_versions": [{"version": self.label, "start": 0, "end": num}],
            }
            for index in range(body["sampling_params"].get("n", 1))
        ]

    def events(self, answer: Any) -> str:
        choices = [
            {
                **choice,
                "token_ids": [token_id],
                "finish_reason": choice["finish_reason"] if end == len(choice["token_ids"]) else None,
                "logprobs": {"content": choice["logprobs"]["content"][end - 1 : end]},
                "weight_versions": [span | {"end": end} for span in choice["weight_versions"]],
            }
            for choice in answer["choices"]
            for end, token_id in enumerate(choice["token_ids"], 1)
        ]
        return event_stream([{"choices": [choice]} for choice in choices])

    def connect(self, url: str) -> InferenceEndpoint:
        return VllmEndpoint(url)


ENGINE_PAUSED = Refused(503, "ServiceUnavailableError", "Generation is paused. Please retry after it resumes.")
"""How vLLM 0.33 refuses a request during a pause of mode ``abort`` or ``wait``."""
SERVERS: dict[str, type[LabelledServer]] = {"sglang": LabelledSglang, "vllm": LabelledVllm}
