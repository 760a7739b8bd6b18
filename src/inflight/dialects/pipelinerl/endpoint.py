"""A PipelineRL inference server, which is vLLM with PipelineRL's update route, as an `InferenceEndpoint`.

The server was started with its own process group, in which this process is rank 0, the trainer. PipelineRL's servers
neither keep nor report a version, so the endpoint is an `OwnedEndpoint`: weights change only when no request runs.
Incoming weights are checked and staged here, and the commit posts the update and broadcasts it. A failed commit leaves
torn weights and a group that cannot be formed again, so the server must be restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.base.tasks import run_together
from inflight.base.threads import run_abandonable
from inflight.base.transport_registry import receivable_transports
from inflight.base.url_query import options_of, options_of_query
from inflight.contracts import EngineKind, EngineOptions, InferenceEndpoint
from inflight.dialects.completions import ROUTE, body_of, completion_of, ids_of_tokens
from inflight.dialects.pipelinerl.channel import PostedBroadcasts, WeightChannel
from inflight.dialects.pipelinerl.messages import CHAT_ROUTE
from inflight.dialects.single_owner import OwnedEndpoint
from inflight.engines.requests import protocol_errors
from inflight.engines.routes import EngineRoutes
from inflight.errors import (
    ConfigError,
    DeadlineError,
    TransferError,
    UnreachableError,
    UnsupportedError,
)
from inflight.http.chat import chat_completion_of, check_chat, generate_request_of
from inflight.model.checkpoint_specs import checkpoint_of, config_of
from inflight.wire import (
    Capabilities,
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    Manifest,
    TensorSpec,
    TransportSpec,
    VersionSpan,
    WeightUpdate,
)

if TYPE_CHECKING:
    import torch

_HEALTH_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class PipelineRlOptions:
    """Facts that a server does not report itself, taken from the query of its URL."""

    group: str = ""
    """The ``tcp://HOST:PORT`` in --weight-update-group-init-method. If empty, this process does not send weights."""
    world_size: int = 2
    """Value of --weight-update-group-world-size."""
    dtype: str = ""
    """The dtype in which the server computes (default: the dtype of the checkpoint)."""
    max_concurrent: int = 64
    """Value of --max-num-seqs."""
    timeout_s: float = 300.0
    """How long, in seconds, the server may take to join the group and to apply an update."""


class PipelineRlEndpoint(OwnedEndpoint):
    """One server at ``url`` with one rank.

    The first call joins a weight channel, because the server does not answer any request before a trainer has joined.
    ``make_channel`` returns a new channel; without it, this process does not send weights. ``dtype``,
    ``max_concurrent`` and ``timeout_s`` have the same meaning as in `PipelineRlOptions`.
    """

    def __init__(
        self,
        url: str,
        make_channel: Callable[[], WeightChannel] | None,
        *,
        engine: str = "pipelinerl",
        dtype: str,
        max_concurrent: int,
        timeout_s: float,
        model_dir: Path | None = None,
        control_timeout_s: float = 30.0,
        generate_timeout_s: float = 600.0,
    ) -> None:
        super().__init__(EngineRoutes(url.rstrip("/"), api_key=None, control_timeout_s=control_timeout_s))
        self._make_channel = make_channel
        self._engine = engine
        self._dtype = dtype
        self._max_concurrent = max_concurrent
        self._timeout_s = timeout_s
        self._model_dir = model_dir
        self._generate_timeout_s = generate_timeout_s
        self._channel: WeightChannel | None = None

    async def _attach(self) -> tuple[Capabilities, Sequence[TensorSpec] | None]:
        needed = [ROUTE, CHAT_ROUTE]
        if self._make_channel is not None:
            if self._channel is None or not self._channel.is_formed:
                self._channel = self._make_channel()
                await run_abandonable(self._channel.join, "inflight-join")
            if self._channel.update_route is not None:
                needed.append(self._channel.update_route)
        await self._until_healthy()
        paths = await self._routes.fetch_paths()
        if missing := [path for path in needed if path not in paths]:
            raise ConfigError(f"{self.name} has no {', '.join(missing)}: check that this is a PipelineRL server")
        models, version = await run_together(self._routes.get("/v1/models"), self._routes.get("/version"))
        with protocol_errors("/v1/models"):
            card = models["data"][0]
            model, root, max_model_len = str(card["id"]), Path(card["root"]), int(card["max_model_len"])
        directory = self._model_dir or root
        config = config_of(directory)
        dtype = self._dtype or str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
        vocab_size, specs = checkpoint_of(self.name, directory, dtype)
        can = Capabilities(
            engine=self._engine,
            engine_version=str(version["version"]),
            model=model,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            in_flight_policies=(InFlightPolicy.DRAIN,),
            transports=receivable_transports(on_gpu=False) if self._make_channel is not None else (),
            staging=True,
            version_binding="admission",
            logprob_kind="processed",
            num_ranks=1,
            max_concurrent_sequences=self._max_concurrent,
            streaming=False,
            chat=True,
            seeds=False,
            manifest_digest=None if specs is None else Manifest(tensors=specs).digest(),
        )
        return can, specs

    async def _until_healthy(self) -> None:
        """Return once the server answers, which it does only after it has joined the group."""
        try:
            async with asyncio.timeout(None if self._make_channel is None else self._timeout_s):
                while True:
                    try:
                        status, _ = await self._routes.ask("GET", "/health")
                    except UnreachableError:
                        if self._make_channel is None:
                            raise
                        status = 0
                    if status == 200:
                        return
                    if self._make_channel is None:
                        raise UnreachableError(f"GET /health answered status {status}", self.name)
                    await asyncio.sleep(_HEALTH_POLL_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"the server was not healthy within {self._timeout_s:g} s: check its log, or increase timeout_s in "
                "the URL",
                self.name,
            ) from error

    async def init_process_group(self, spec: TransportSpec) -> None:
        """Join a publisher's group. Raises `TransferError` if the server's own group is lost: restart the server."""
        await self.capabilities()
        if self._channel is not None and not self._channel.is_formed:
            raise TransferError(f"{self.name}: the group of this server is lost; restart the server")
        await super().init_process_group(spec)

    async def _complete(self, request: GenerateRequest, index: int, version: int) -> Completion:
        can = await self.capabilities()
        body = body_of(request, model=can.model, room=can.max_model_len - len(request.prompt_token_ids))
        # The salt separates cached prefixes by weights, because PipelineRL's server does not clear its cache.
        body["cache_salt"] = self._salt
        answer = await self._routes.request(ROUTE, body, self._generate_timeout_s)
        with protocol_errors(ROUTE):
            choice = answer["choices"][0]
            return completion_of(choice, ids_of_tokens(choice["logprobs"]["tokens"]), index, version)

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Return one choice, as PipelineRL's own client requests it, with the text that the server returned."""
        can = await self.capabilities()
        check_chat(request, can)
        body = request.model_dump(mode="json", include={"model", "messages", "temperature", "top_p", "top_k", "min_p"})
        body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        body |= {"include_stop_str_in_output": True, "repetition_penalty": 1.0, "cache_salt": self._salt}
        sampling = request.sampling()
        if sampling.n != 1 or sampling.seed is not None or sampling.stop:
            raise UnsupportedError(
                "chats do not support several choices, a seed or stop strings: send token ids instead"
            )
        if sampling.max_tokens is not None:
            body["max_tokens"] = sampling.max_tokens
        async with self._sampling() as version:
            answer = await self._routes.request(CHAT_ROUTE, body, self._generate_timeout_s)
        with protocol_errors(CHAT_ROUTE):
            choice = answer["choices"][0]
            content = choice["logprobs"]["content"]
            ids = ids_of_tokens([token["token"] for token in content])
            completion = Completion(
                index=0,
                token_ids=tuple(ids),
                logprobs=tuple(float(token["logprob"]) for token in content),
                version_spans=(VersionSpan(version=version, start=0, end=len(ids)),) if ids else (),
                finish_reason=choice["finish_reason"],
            )
            asked = generate_request_of(request, answer["prompt_token_ids"])
            response = GenerateResponse(request_id=asked.request_id, completions=(completion,))
            texts = [str(choice["message"]["content"] or "")]
            return chat_completion_of(request, asked, response, texts, [[token["token"] for token in content]])

    async def _replace(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._channel is not None  # transports are supported only then
        await self._channel.send(self._routes, update, tensors)

    @property
    def _salt(self) -> str:
        return f"inflight-{self._updates.session.session_id or self._version}"

    async def aclose(self) -> None:
        """Leave the group; the server then accepts no more updates."""
        await super().aclose()
        if self._channel is not None:
            await run_abandonable(self._channel.close, "inflight-leave")


class PipelineRlKind(EngineKind):
    """Supports only attaching, because PipelineRL's own launcher starts the servers."""

    name = "pipelinerl"

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        raise ConfigError(
            "inflight does not start PipelineRL's servers; start one with python -m "
            f"pipelinerl.entrypoints.run_vllm1. Attach with pipelinerl+http://{host}:{port}?group=tcp://HOST:PORT"
        )

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint for a URL whose query has the fields of `PipelineRlOptions`.

        No token is used. Raises `ConfigError`.
        """
        address, _, query = url.partition("?")
        return _endpoint(
            address,
            options_of_query(PipelineRlOptions, query),
            control_timeout_s=control_timeout_s,
            generate_timeout_s=generate_timeout_s,
        )


PIPELINERL = PipelineRlKind()


def attach(model_dir: Path, *, url: str, **options: Any) -> PipelineRlEndpoint:
    """Return the endpoint of the server at ``url``, for ``inflight serve MODEL_DIR --engine module:function``.

    Options are those of `PipelineRlOptions`. Raises `ConfigError`.
    """
    return _endpoint(url, options_of(PipelineRlOptions, options), model_dir=model_dir)


def _endpoint(url: str, options: PipelineRlOptions, **more: Any) -> PipelineRlEndpoint:
    def make_channel() -> WeightChannel:
        from inflight.dialects.broadcast_group import BroadcastGroup
        from inflight.dialects.pipelinerl.group import place_of

        place = place_of(options.group, rank=0, world_size=options.world_size, timeout_s=options.timeout_s)
        return PostedBroadcasts(BroadcastGroup(place), options.timeout_s)

    return PipelineRlEndpoint(
        url,
        make_channel if options.group else None,
        dtype=options.dtype,
        max_concurrent=options.max_concurrent,
        timeout_s=options.timeout_s,
        **more,
    )
