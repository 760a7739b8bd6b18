"""A vLLM server as an `InferenceEndpoint`, over vLLM's own HTTP routes. Never imports vLLM."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.base.requirements import require
from inflight.base.tasks import run_together
from inflight.contracts import (
    AbortingEndpoint,
    DraftingEndpoint,
    ReleasingEndpoint,
    ScoringEndpoint,
    StreamingEndpoint,
)
from inflight.engines.requests import SentRequest, Unsampled, check_scored
from inflight.engines.routes import EngineRoutes, error_text_of
from inflight.engines.version_labels import parse_label
from inflight.errors import (
    ConfigError,
    InvalidRequestError,
    ProtocolError,
    UnauthorizedError,
    UnsupportedError,
)
from inflight.model.checkpoint_specs import checkpoint_of
from inflight.model.special_tokens import special_token_ids
from inflight.rollouts.drafts import split_history
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.weights.receive.releasing import MemoryRelease
from inflight.wire import (
    Capabilities,
    ChatCompletionRequest,
    DraftHistory,
    EndpointState,
    GenerateRequest,
    InFlightPolicy,
    Manifest,
    Needs,
    PromptImage,
    SamplingParams,
    ScoreRequest,
    ScoreResponse,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from inflight_vllm import flags
from inflight_vllm.generating import GeneratingEndpoint
from inflight_vllm.requests import (
    GENERATE,
    bodies_of,
    ids_of,
    label_of_scored,
    parse_rendered_prompt,
    scores_of,
    scoring_body_of,
)
from inflight_vllm.updates import PLUGIN_PROTOCOL, VllmUpdates, status_of

_CLOSE_S = 30.0
_PART_TOKENS = 1 << 15
"""Number of history tokens per call. A worker samples nothing while it records them."""


class VllmEndpoint(
    GeneratingEndpoint,
    ReceivingEndpoint,
    StreamingEndpoint,
    AbortingEndpoint,
    ReleasingEndpoint,
    DraftingEndpoint,
    ScoringEndpoint,
):
    """The vLLM server at ``url``, with inflight's plug-in installed.

    The first call asks the server how it was started. If it was started incorrectly, that call raises a `ConfigError`
    that contains the correct command. ``api_key`` is the key that the server itself requires. ``model_dir`` is the path
    at which this process finds the checkpoint, if that differs from the server's path: manifests are checked against
    this checkpoint before anything is sent, and the size of the vocabulary is read from it.
    """

    _release_arguments = flags.RELEASE_ARGUMENTS

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model_dir: Path | None = None,
        control_timeout_s: float = 30.0,
        generate_timeout_s: float = 600.0,
    ) -> None:
        url = url.rstrip("/")
        # vLLM closes a connection after answering status 500 on it, without announcing it.
        routes = EngineRoutes(
            url, api_key=api_key, control_timeout_s=control_timeout_s, liveness_path="/health", keeps_alive=False
        )
        requests = EngineRoutes(url, api_key=api_key, control_timeout_s=control_timeout_s)
        super().__init__(routes, requests, close_s=_CLOSE_S, generate_timeout_s=generate_timeout_s)
        self._model_dir = model_dir
        self._special_ids: frozenset[int] = frozenset()  # set by `_attach`
        self._engine = VllmUpdates(routes, self._gate, self._background, self._last, self._probe)

    # ------------------------------------------------------------------------------------------------- attaching

    async def _attach(self) -> Capabilities:
        paths = await self._routes.fetch_paths()
        if problem := flags.missing_routes(paths):
            if flags.is_without_dev_mode(paths):
                raise await self._refusal(problem)
            raise ConfigError(
                f"{self.name}: cannot attach to this vLLM server: {problem}. Install another release of vLLM; 0.32.0 "
                "is known to work"
            )
        version, models, config = await asyncio.gather(
            self._routes.get("/version"),
            self._routes.get("/v1/models"),
            self._routes.get("/server_info?config_format=json"),
        )
        try:
            card = models["data"][0]
            settings = config["vllm_config"]
            dtype = str(settings["model_config"]["dtype"]).removeprefix("torch.")
            problem = flags.wrong_settings(settings)
            max_concurrent = int(settings["scheduler_config"]["max_num_seqs"])
            self._engine.has_replicas = int(settings["parallel_config"]["data_parallel_size"]) > 1
            model, root, max_model_len = card["id"], card["root"], int(card["max_model_len"])
        except (KeyError, TypeError, IndexError) as error:
            raise ProtocolError(
                f"the answer of /server_info or /v1/models lacks {error}: this release of vLLM has a different "
                "interface; vLLM 0.32.0 is known to work",
                self.name,
            ) from error
        if problem or (problem := await self._scale_out_problem(model)):
            raise await self._refusal(problem)
        statuses = await status_of(self._routes)
        for status in statuses:
            if status.get("protocol") != PLUGIN_PROTOCOL:
                raise ConfigError(
                    f"{self.name}: the server's plug-in uses protocol {status.get('protocol')}, but this client uses "
                    f"{PLUGIN_PROTOCOL}: install the same release of inflight in vLLM's environment"
                )
        self._speculates = flags.speculates(settings)
        checkpoint = self._model_dir or Path(root)
        vocab_size, specs = checkpoint_of(self.name, checkpoint, dtype)
        self._special_ids = special_token_ids(checkpoint)
        can = Capabilities(
            engine="vllm",
            engine_version=str(version["version"]),
            model=model,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            in_flight_policies=tuple(InFlightPolicy),
            transports=tuple(
                name for name in statuses[0]["transports"] if all(name in it["transports"] for it in statuses)
            ),
            staging=True,
            encodings=("bfloat16", "float8", "delta"),
            partial_updates=True,
            sharded=True,
            lora=True,
            partial_rollouts=flags.can_abort(paths),
            version_binding="spans",
            logprob_kind="processed",
            num_ranks=int((await self._routes.get("/get_world_size"))["world_size"]),
            max_concurrent_sequences=max_concurrent,
            streaming=True,
            chat=flags.offers_chat(paths),
            seeds=flags.honours_seeds(settings),
            releases_memory=bool(settings["model_config"].get("enable_sleep_mode")),
            images=flags.takes_images(settings),
            drafts=flags.drafts_from_history(settings),
            draft_counts=flags.counts_drafts(settings),
            scoring=True,
            max_top_k=flags.max_top_k(settings, vocab_size),
            manifest_digest=None if specs is None else Manifest(tensors=specs).digest(),
        )
        self._updates = UpdateReceiver(self._engine, self._engine, specs, can)
        self._memory = MemoryRelease(self._engine, self._updates.session)
        await self._refresh_label()
        return can

    async def _scale_out_problem(self, model: str) -> str | None:
        """Return a problem if the route that generates from token ids is disabled.

        Sends a request that is always rejected.
        """
        body = {"model": model, "request_id": "inflight-attach", "token_ids": [], "sampling_params": {}}
        try:
            await self._requests.ask("POST", GENERATE, body)
        except UnauthorizedError:  # not because of the key, which /v1/models has checked
            return "it was started without --enable-scale-out"
        return None

    async def _refusal(self, problem: str) -> ConfigError:
        models = await self._routes.get("/v1/models")
        model = models["data"][0].get("root", "MODEL") if models.get("data") else "MODEL"
        return ConfigError(
            f"{self.name}: cannot attach to this vLLM server: {problem}. Restart it with\n"
            f"    {flags.restart_command(self.name, str(model))}"
        )

    # --------------------------------------------------------------------------------------------------- weights

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Request an update. If the server was replaced, this or the first bucket raises `TransferError`."""
        receiver = await self.receiver()
        if receiver.session.update is None:
            await self._refresh_label()
        await receiver.request(update)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """Commit, and return without another query to the server, whose answer would take another sampling step."""
        await (await self.receiver()).commit(ref)
        return self._version(self._updates.session.state, await self.capabilities())

    async def weight_version(self) -> WeightVersion:
        """Return the served version. The state is PAUSED even if another client paused the server.

        ``num_running`` counts this client's sequences, because vLLM's own count may be arbitrarily out of date.
        """
        can = await self.capabilities()
        session = self._updates.session
        state = session.state
        if session.update is None:
            answer, _ = await asyncio.gather(self._routes.get("/is_paused"), self._refresh_label())
            state = session.state
            if answer.get("is_paused") and state is EndpointState.READY and session.update is None:
                state = EndpointState.PAUSED
        return self._version(state, can)

    def _version(self, state: EndpointState, can: Capabilities) -> WeightVersion:
        answer = self._updates.weight_version(
            num_running=min(self._gate.num_sent, can.max_concurrent_sequences),
            last_update=self._last.timings,
        )
        return answer.model_copy(update={"state": state})

    # ------------------------------------------------------------------------------------------------ generation

    async def record_history(self, history: DraftHistory) -> None:
        """Send the history in parts; the server samples between them. Parts stay recorded if a later one fails."""
        if not (await self.capabilities()).drafts:
            raise UnsupportedError(f"{self.name} does not support drafts; start the server with --drafts history")
        for part in split_history(history.entries, _PART_TOKENS):
            body = {"method": "inflight_record_history", "kwargs": {"history": part.model_dump(mode="json")}}
            await self._routes.post("/collective_rpc", body)

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Score a request. vLLM computes the whole sequence, without its prefix cache.

        If the weights are updated in the meantime, vLLM computes the sequence again.
        """
        can = await self.capabilities()
        require(can, Needs.of_score(request), "this endpoint")
        check_scored(request, max_model_len=can.max_model_len, vocab_size=can.vocab_size)
        deadline = time.monotonic() + self._generate_timeout_s

        async def send(asked: Mapping[int, SentRequest]) -> list[Any]:
            return [await self._sampled(scoring_body_of(request, can, asked[0]))]

        async def label() -> str:
            return await self._label(self._generate_timeout_s)

        async def resumed() -> None:
            await self._wait_until_resumed(deadline)

        answer, current = await self._gate.score(request.request_id, label, send, label_of_scored, resumed)
        return scores_of(request, answer, parse_label(current).version)

    async def _probe(self) -> None:
        request = GenerateRequest(
            request_id=f"inflight-first-token-{uuid.uuid4().hex}",
            prompt_token_ids=(0,),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
        )
        asked = {0: SentRequest(request.request_id, cache_key=request.request_id)}
        (body,) = bodies_of(request, await self.capabilities(), asked)
        deadline = time.monotonic() + self._generate_timeout_s
        while await self._sampled(body) is Unsampled.PAUSED:  # by the next update
            await self._wait_until_resumed(deadline)

    async def _end(self, names: Sequence[str]) -> None:
        await self._routes.post("/abort_requests", {"request_ids": ids_of(names)})
        # vLLM has answered these requests. The engine handles calls in order: after this one it samples none of them.
        await self._routes.get("/weight_info")

    async def _render(self, request: ChatCompletionRequest) -> tuple[Sequence[int], Sequence[PromptImage]]:
        body = request.model_dump(include={"model", "messages"}) | {"mm_payload": "none"}
        status, answer = await self._requests.ask("POST", "/v1/chat/completions/render", body)
        if status != 200:
            raise InvalidRequestError(f"vLLM refused the messages: {error_text_of(answer)}")
        return parse_rendered_prompt(answer, [url for message in request.messages for url in message.image_urls])

    async def _decode(self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Return the texts. vLLM's route always includes special tokens, so those to be skipped are not sent."""

        async def text(ids: Sequence[int]) -> str:
            tokens = [it for it in ids if not (skip_special_tokens and it in self._special_ids)]
            return str((await self._requests.post("/detokenize", {"tokens": tokens}))["prompt"]) if tokens else ""

        return await run_together(*(text(ids) for ids in token_ids))
