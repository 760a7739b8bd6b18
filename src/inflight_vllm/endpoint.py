"""A vLLM server as an `InferenceEndpoint`, over vLLM's own HTTP routes. Never imports vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Any

from inflight.contracts import InferenceEndpoint
from inflight.engines.calls import Attaching
from inflight.engines.checkpoint_specs import checkpoint_of
from inflight.engines.labels import parse_label
from inflight.engines.requests import RequestGate
from inflight.engines.routes import EngineRoutes, words_of
from inflight.errors import ConfigError, InflightError, InvalidRequestError, ProtocolError, UnauthorizedError
from inflight.http.chat import chat_completion_of, check_chat, generate_request_of
from inflight.weights.receiving import ReceivingEndpoint, UpdateReceiver
from inflight.wire import (
    Backend,
    Capabilities,
    ChatCompletion,
    ChatCompletionRequest,
    Encoding,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    Manifest,
    SamplingParams,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from inflight_vllm import flags
from inflight_vllm.requests import GENERATE, bodies_of, check_request, choices_of, labelled, response_of
from inflight_vllm.updates import PROTOCOL, VllmUpdates, status_of

_TRANSPORTS: tuple[Backend, ...] = ("gloo", "shm", "file", "http")
_ENCODINGS: tuple[Encoding, ...] = ("bfloat16", "float8", "delta")


class VllmEndpoint(ReceivingEndpoint, InferenceEndpoint):
    """One vLLM server at ``url``, whose plug-in is installed there.

    The first call asks the server how it was started, and raises `ConfigError` with the command that starts it as
    needed. ``api_key`` is the server's own. ``model_dir`` is the checkpoint as this process sees it, where that differs
    from the server's path: manifests are checked against it before anything is sent, and the vocabulary is read there.
    An instance belongs to the event loop in which it is first used. Its state is the server's: another instance may
    publish, and a server that was replaced by a new one is seen as such.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model_dir: Path | None = None,
        control_timeout_s: float = 30.0,
        generate_timeout_s: float = 600.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._model_dir = model_dir
        self._generate_timeout_s = generate_timeout_s
        self._requests = EngineRoutes(self._url, api_key=api_key, control_timeout_s=control_timeout_s)
        # vLLM closes a connection after it answered status 500 on it, and does not say so.
        self._routes = EngineRoutes(
            self._url,
            api_key=api_key,
            control_timeout_s=control_timeout_s,
            liveness_path="/health",
            keeps_alive=False,
        )
        self._gate = RequestGate()
        self._engine = VllmUpdates(self._routes, self._gate, self._probe)
        self._updates = UpdateReceiver(
            self._engine,
            self._engine,
            None,
            policies=tuple(InFlightPolicy),
            transports=_TRANSPORTS,
            staging=True,
            encodings=_ENCODINGS,
            partial_updates=True,
            adapters=True,
        )
        self._attaching = Attaching(self._attach)

    def __repr__(self) -> str:
        return f"VllmEndpoint({self._url!r})"

    @property
    def name(self) -> str:
        """The server's URL."""
        return self._url

    # ------------------------------------------------------------------------------------------------- attaching

    async def capabilities(self) -> Capabilities:
        """Raises `ConfigError` if the server was not started as needed."""
        return await self._attaching.result()

    async def _attach(self) -> Capabilities:
        paths = await self._routes.offered()
        if problem := flags.missing_routes(paths):
            if flags.is_without_dev_mode(paths):
                raise await self._refusal(problem)
            raise ConfigError(
                f"{self._url}: cannot attach to this vLLM server: {problem}. "
                "Install another release of vLLM: 0.32.0 is known to work"
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
            model, root, max_model_len = card["id"], card["root"], int(card["max_model_len"])
        except (KeyError, TypeError, IndexError) as error:
            raise ProtocolError(
                f"/server_info or /v1/models lack {error}: an interface not known here", self._url
            ) from error
        if problem or (problem := await self._scale_out_problem(model)):
            raise await self._refusal(problem)
        for status in await status_of(self._routes):
            if status.get("protocol") != PROTOCOL:
                raise ConfigError(
                    f"{self._url}: the server's plug-in speaks protocol {status.get('protocol')}, "
                    f"this client {PROTOCOL}: install the same release of inflight beside vLLM"
                )
        vocab_size, specs = checkpoint_of(self._url, self._model_dir or Path(root), dtype)
        if specs is not None:
            self._updates.session.expect(specs)
        await self._found()
        return Capabilities(
            engine="vllm",
            engine_version=str(version["version"]),
            model=model,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            in_flight_policies=tuple(InFlightPolicy),
            transports=_TRANSPORTS,
            staging=True,
            encodings=_ENCODINGS,
            partial_updates=True,
            adapters=True,
            version_binding="spans",
            logprob_kind="processed",
            num_ranks=int((await self._routes.get("/get_world_size"))["world_size"]),
            max_concurrent_sequences=max_concurrent,
            streaming=False,
            chat=flags.offers_chat(paths),
            seeds=flags.honours_seeds(settings),
            manifest_digest=None if specs is None else Manifest(tensors=specs).digest(),
        )

    async def _scale_out_problem(self, model: str) -> str | None:
        """Return a problem if generating from token ids is locked. The request is one that is refused in any case."""
        body = {"model": model, "request_id": "inflight-attach", "token_ids": [], "sampling_params": {}}
        try:
            await self._requests.ask("POST", GENERATE, body)
        except UnauthorizedError:  # not of the key, which /v1/models has asked for
            return "it was started without --enable-scale-out"
        return None

    async def _refusal(self, problem: str) -> ConfigError:
        models = await self._routes.get("/v1/models")
        model = models["data"][0]["root"] if models.get("data") else "MODEL"
        return ConfigError(
            f"{self._url}: cannot attach to this vLLM server: {problem}. Restart it with\n"
            f"    {flags.restart_command(self._url, str(model))}"
        )

    # --------------------------------------------------------------------------------------------------- weights

    async def receiver(self) -> UpdateReceiver:
        await self.capabilities()
        return self._updates

    async def init_process_group(self, spec: TransportSpec) -> None:
        """What another client left open on the server is cleared."""
        await super().init_process_group(spec)
        await self._found()

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Raises `TransferError` if the server was replaced."""
        receiver = await self.receiver()
        if receiver.session.update is None:
            await self._found()
        await receiver.request(update)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """The server is not asked: its answer would come a step later."""
        await (await self.receiver()).commit(ref)
        return self._version(self._updates.session.state, await self.capabilities())

    async def weight_version(self) -> WeightVersion:
        """HELD too while another client holds the server.

        The running sequences are those of this client: vLLM's own count lags behind by any time.
        """
        can = await self.capabilities()
        session = self._updates.session
        state = session.state
        if session.update is None:
            answer, _ = await asyncio.gather(self._routes.get("/is_paused"), self._found())
            state = session.state
            if answer.get("is_paused") and state is EndpointState.READY and session.update is None:
                state = EndpointState.HELD
        return self._version(state, can)

    def _version(self, state: EndpointState, can: Capabilities) -> WeightVersion:
        answer = self._updates.weight_version(
            num_running=min(self._gate.num_sent, can.max_concurrent_sequences),
            last_update=self._engine.last.timings,
        )
        return answer.model_copy(update={"state": state})

    async def _found(self, timeout_s: float | None = None) -> str:
        """Return how the server calls its weights; take it over, unless that may have changed meanwhile."""
        session, num_changes = self._updates.session, self._updates.session.num_changes
        label = str((await self._routes.get("/weight_info", timeout_s))["weight_version"])
        served = parse_label(label)
        if num_changes == session.num_changes:
            if session.run_id is not None and served.run_id is None:  # a new process, with its checkpoint
                self._engine.last.timings = None
            session.found(served.version, served.run_id, torn=served.torn, session_id=served.session_id)
        return label

    # ------------------------------------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Cancelling the call closes its connection, which ends it in vLLM."""
        can = await self.capabilities()
        check_request(request, can)

        async def send(cache_keys: Mapping[int, str]) -> list[Any]:
            bodies = bodies_of(request, can, cache_keys)
            return choices_of(await _all(self._sample(body, self._generate_timeout_s) for body in bodies))

        return response_of(request, await self._gate.sample(request, self._label, send, labelled))

    async def _label(self) -> str:
        """Return how the server calls its weights. Raises `PoisonedError` if they are torn."""
        label = await self._found(self._generate_timeout_s)  # an engine that loads weights answers when it has
        self._updates.session.refuse_if_poisoned()
        return label

    async def _sample(self, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        status, answer = await self._requests.ask("POST", GENERATE, body, timeout_s)
        if status == 400:
            raise InvalidRequestError(f"vLLM refused the request: {words_of(answer)}")
        if status != 200:
            raise ProtocolError(f"POST {GENERATE} answered status {status}: {words_of(answer)}", self._url)
        return answer

    async def _probe(self) -> None:
        """Have one token sampled."""
        request = GenerateRequest(
            request_id=f"inflight-first-token-{uuid.uuid4().hex}",
            prompt_token_ids=(0,),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
        )
        (body,) = bodies_of(request, await self.capabilities(), {0: uuid.uuid4().hex})
        await self._sample(body)

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """vLLM renders the messages and decodes the tokens."""
        can = await self.capabilities()
        check_chat(request, model=can.model, offers_chat=can.chat)
        generate_request = generate_request_of(request, await self._rendered(request))
        response = await self.generate(generate_request)
        sampled = [completion.token_ids for completion in response.completions]
        texts = await asyncio.gather(*(self._text(token_ids, skip_special_tokens=True) for token_ids in sampled))
        pieces = [await asyncio.gather(*(self._text([t]) for t in ids)) for ids in sampled if request.logprobs]
        return chat_completion_of(request, generate_request, response, texts, pieces)

    async def _rendered(self, request: ChatCompletionRequest) -> list[int]:
        body = request.model_dump(include={"model", "messages"})
        status, answer = await self._requests.ask("POST", "/v1/chat/completions/render", body)
        if status != 200:
            raise InvalidRequestError(f"vLLM refused the messages: {words_of(answer)}")
        return list(answer["token_ids"])

    async def _text(self, token_ids: Iterable[int], **options: bool) -> str:
        return str((await self._routes.post("/detokenize", {"tokens": list(token_ids), **options}))["prompt"])

    async def aclose(self) -> None:
        """An open update is ended first, so that the server is not left held."""
        if (update := self._updates.session.update) is not None:
            with contextlib.suppress(InflightError):
                await self._updates.abort(update.ref)
        self._updates.close()
        await self._engine.aclose()
        await self._routes.aclose()
        await self._requests.aclose()


async def _all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return what all calls return; the first that fails, or being cancelled, cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
