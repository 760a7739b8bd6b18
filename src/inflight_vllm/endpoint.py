"""A vLLM server as an `InferenceEndpoint`, over vLLM's own HTTP routes. Never imports vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Any

from inflight.engines.checkpoint_specs import tensor_specs_of
from inflight.engines.labels import parse_label
from inflight.errors import (
    ConfigError,
    InvalidRequestError,
    ProtocolError,
    UnsupportedError,
)
from inflight.http.connection import HttpConnection
from inflight.weights.receiving import ReceivingEndpoint, UpdateReceiver
from inflight.wire import (
    DTYPE_SIZES,
    Backend,
    Capabilities,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ChatUsage,
    Encoding,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    Manifest,
    SamplingParams,
    TensorSpec,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from inflight_vllm import flags
from inflight_vllm.requests import began_late, bodies_of, body_of, check_request, choices_of, response_of
from inflight_vllm.updates import PROTOCOL, VllmRoutes, VllmUpdates, words_of

_GENERATE = "/inference/v1/generate"
_TRANSPORTS: tuple[Backend, ...] = ("gloo", "shm", "file", "http")
_ENCODINGS: tuple[Encoding, ...] = ("bfloat16", "float8", "delta")


class VllmEndpoint(ReceivingEndpoint):
    """One vLLM server at ``url``, whose plug-in is installed there. Satisfies `InferenceEndpoint`.

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
        self._control_timeout_s = control_timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = HttpConnection(self._url)
        self._routes = VllmRoutes(self._url, self._headers, control_timeout_s)
        self._engine = VllmUpdates(self._routes, lambda: len(self._running), self._probe)
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
        self._running: dict[str, int] = {}
        self._attaching: asyncio.Future[Capabilities] | None = None
        self._has_chat = False

    def __repr__(self) -> str:
        return f"VllmEndpoint({self._url!r})"

    @property
    def name(self) -> str:
        """The server's URL."""
        return self._url

    # ------------------------------------------------------------------------------------------------- attaching

    async def capabilities(self) -> Capabilities:
        """See `InferenceEndpoint.capabilities`. Raises `ConfigError` if the server was not started as needed."""
        if self._attaching is None or (self._attaching.done() and self._attaching.exception() is not None):
            self._attaching = asyncio.ensure_future(self._attach())
        return await asyncio.shield(self._attaching)

    async def _attach(self) -> Capabilities:
        paths = await self._paths()
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
        for status in await self._routes.status():
            if status.get("protocol") != PROTOCOL:
                raise ConfigError(
                    f"{self._url}: the server's plug-in speaks protocol {status.get('protocol')}, "
                    f"this client {PROTOCOL}: install the same release of inflight beside vLLM"
                )
        if dtype not in DTYPE_SIZES:
            raise ConfigError(f"{self._url}: the model is served in {dtype}; known: {', '.join(DTYPE_SIZES)}")
        directory = self._model_dir or Path(root)
        specs = self._specs(directory, dtype)
        self._has_chat = flags.offers_chat(paths)
        await self._found()
        return Capabilities(
            engine="vllm",
            engine_version=str(version["version"]),
            model=model,
            vocab_size=self._vocab_size(directory),
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
            chat=self._has_chat,
            seeds=flags.honours_seeds(settings),
            manifest_digest=None if specs is None else Manifest(tensors=specs).digest(),
        )

    async def _paths(self) -> dict[str, Any]:
        document = await self._routes.get("/openapi.json")
        paths = document.get("paths") if isinstance(document, dict) else None
        if not isinstance(paths, dict):
            raise ProtocolError("GET /openapi.json answered no routes: is this a vLLM server?", self._url)
        return paths

    async def _scale_out_problem(self, model: str) -> str | None:
        """Return a problem if generating from token ids is locked. The request is one that is refused in any case."""
        body = {"model": model, "request_id": "inflight-attach", "token_ids": [], "sampling_params": {}}
        status, answer = await self._http.ask(
            "POST", _GENERATE, body, timeout_s=self._control_timeout_s, headers=self._headers
        )
        if status == 403:
            return f"it was started without --enable-scale-out: {words_of(answer)}"
        return None

    async def _refusal(self, problem: str) -> ConfigError:
        models = await self._routes.get("/v1/models")
        model = models["data"][0]["root"] if isinstance(models, dict) and models.get("data") else "MODEL"
        return ConfigError(
            f"{self._url}: cannot attach to this vLLM server: {problem}. Restart it with\n"
            f"    {flags.restart_command(self._url, str(model))}"
        )

    def _specs(self, directory: Path, dtype: str) -> tuple[TensorSpec, ...] | None:
        """What the model can load, None if its directory is not readable here; the engine refuses by itself then."""
        if not directory.is_dir():
            return None
        specs = tensor_specs_of(directory, dtype)
        self._updates.session.expect(specs)
        return specs

    def _vocab_size(self, directory: Path) -> int:
        try:
            config = json.loads((directory / "config.json").read_text())
            return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._url}: the vocabulary size cannot be read from {str(directory / 'config.json')!r}; give "
                "model_dir, the server's checkpoint directory as this process sees it"
            ) from error

    # --------------------------------------------------------------------------------------------------- weights

    async def receiver(self) -> UpdateReceiver:
        """See `ReceivingEndpoint.receiver`."""
        await self.capabilities()
        return self._updates

    async def init_process_group(self, spec: TransportSpec) -> None:
        """See `InferenceEndpoint.init_process_group`. What another client left open on the server is cleared."""
        await super().init_process_group(spec)
        await self._found()

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`. Raises `TransferError` if the server was replaced."""
        receiver = await self.receiver()
        if receiver.session.update is None:
            await self._found()
        await receiver.request(update)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.commit_weight_update`. The server is not asked: its answer would come a step later."""
        await (await self.receiver()).commit(ref)
        return self._version(self._updates.session.state, await self.capabilities())

    async def weight_version(self) -> WeightVersion:
        """See `InferenceEndpoint.weight_version`. HELD too while another client holds the server.

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
            num_running=min(sum(self._running.values()), can.max_concurrent_sequences),
            last_update=self._engine.timings,
        )
        return answer.model_copy(update={"state": state})

    async def _found(self, timeout_s: float | None = None) -> str:
        """Return how the server calls its weights; take it over, unless that may have changed meanwhile."""
        session, num_changes = self._updates.session, self._updates.session.num_changes
        label = str((await self._routes.get("/weight_info", timeout_s))["weight_version"])
        served = parse_label(label)
        if num_changes == session.num_changes:
            session.found(served.version, served.run_id, torn=served.torn, session_id=served.session_id)
        return label

    # ------------------------------------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """See `InferenceEndpoint.generate`. Cancelling the call closes its connection, which ends it in vLLM."""
        return await self._generate(request)

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """See `InferenceEndpoint.chat_completion`. vLLM renders the messages and decodes the tokens."""
        can = await self.capabilities()
        if not self._has_chat:
            raise UnsupportedError(f"{self._url} renders no chat messages; use token ids")
        if request.model != can.model:
            raise InvalidRequestError(f"model {request.model!r} is not served here, {can.model!r} is")
        sampling = request.sampling()
        generate_request = GenerateRequest(
            request_id=f"chatcmpl-{uuid.uuid4().hex}", prompt_token_ids=await self._render(request), sampling=sampling
        )
        response = await self._generate(generate_request)
        texts = await asyncio.gather(*(self._text(c.token_ids, sampling) for c in response.completions))
        pieces = await asyncio.gather(
            *(self._pieces(c.token_ids if request.logprobs else ()) for c in response.completions)
        )
        num_prompt, num_completion = (
            len(generate_request.prompt_token_ids),
            sum(len(c.token_ids) for c in response.completions),
        )
        return ChatCompletion(
            id=generate_request.request_id,
            created=int(time.time()),
            model=request.model,
            choices=tuple(
                ChatChoice(
                    index=c.index,
                    message=ChatMessage(role="assistant", content=text),
                    finish_reason=c.finish_reason,
                    logprobs=ChatLogprobs(
                        content=tuple(
                            ChatTokenLogprob(token=piece, logprob=logprob, bytes=tuple(piece.encode()))
                            for piece, logprob in zip(tokens, c.logprobs, strict=True)
                        )
                    )
                    if request.logprobs
                    else None,
                    token_ids=c.token_ids,
                    token_logprobs=c.logprobs,
                    version_spans=c.version_spans,
                )
                for c, text, tokens in zip(response.completions, texts, pieces, strict=True)
            ),
            usage=ChatUsage(
                prompt_tokens=num_prompt, completion_tokens=num_completion, total_tokens=num_prompt + num_completion
            ),
            prompt_token_ids=generate_request.prompt_token_ids,
        )

    async def _render(self, request: ChatCompletionRequest) -> tuple[int, ...]:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        status, answer = await self._http.ask(
            "POST",
            "/v1/chat/completions/render",
            {"model": request.model, "messages": messages},
            timeout_s=self._control_timeout_s,
            headers=self._headers,
        )
        if status != 200:
            raise InvalidRequestError(f"vLLM refused the messages: {words_of(answer)}")
        return tuple(answer["token_ids"])

    async def _text(self, token_ids: tuple[int, ...], sampling: SamplingParams) -> str:
        """Return the tokens' text without special tokens, cut before the first stop string."""
        body = {"tokens": list(token_ids), "skip_special_tokens": True}
        text = str((await self._routes.post("/detokenize", body))["prompt"])
        cuts = [text.index(stop) for stop in sampling.stop if stop in text]
        return text[: min(cuts)] if cuts else text

    async def _pieces(self, token_ids: tuple[int, ...]) -> list[str]:
        """Return each token's own text."""
        answers = await asyncio.gather(*(self._routes.post("/detokenize", {"tokens": [t]}) for t in token_ids))
        return [str(answer["prompt"]) for answer in answers]

    async def _generate(self, request: GenerateRequest) -> GenerateResponse:
        can = await self.capabilities()
        check_request(request, can)
        if request.request_id in self._running:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use by a running request")
        self._running[request.request_id] = 0  # nothing of it runs before it is sent
        try:
            # Under keep vLLM's prefix cache outlives an update; what runs keeps its own blocks.
            label = await self._label()
            self._running[request.request_id] = request.sampling.n
            choices = await self._choices(bodies_of(request, can, _salt(label)))
            if late := began_late(choices, label):
                await self._label()  # whoever holds or poisons the server has his turn first
                again = await self._choices([body_of(request, can, uuid.uuid4().hex, index, 1) for index in late])
                for index, choice in zip(late, again, strict=True):
                    choices[index] = choice
        finally:
            del self._running[request.request_id]
        return response_of(request, choices)

    async def _label(self) -> str:
        """Return how the server calls its weights, once requests may be sent. Raises `PoisonedError` if they are torn.

        Asked for each request: any other client may have changed them since.
        """
        while True:
            await self._engine.is_open.wait()
            label = await self._found(self._generate_timeout_s)  # an engine that loads weights answers when it has
            self._updates.session.refuse_if_poisoned()
            if self._engine.is_open.is_set():
                return label

    async def _choices(self, bodies: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return what vLLM answers to these requests, for each completion."""
        return choices_of(await _all(self._sample(body, self._generate_timeout_s) for body in bodies))

    async def _sample(self, body: Mapping[str, Any], timeout_s: float) -> Any:
        status, answer = await self._http.ask("POST", _GENERATE, body, timeout_s=timeout_s, headers=self._headers)
        if status == 400:
            raise InvalidRequestError(f"vLLM refused the request: {words_of(answer)}")
        if status != 200:
            raise ProtocolError(f"POST {_GENERATE} answered status {status}: {words_of(answer)}", self._url)
        return answer

    async def _probe(self) -> None:
        """Have one token sampled."""
        can = await self.capabilities()
        request = GenerateRequest(
            request_id=f"inflight-first-token-{uuid.uuid4().hex}",
            prompt_token_ids=(0,),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
        )
        (body,) = bodies_of(request, can, uuid.uuid4().hex)
        await self._sample(body, self._control_timeout_s)

    async def aclose(self) -> None:
        """Leave the group and close the connections; the server goes on."""
        self._updates.close()
        await self._engine.aclose()
        await self._routes.aclose()
        await self._http.aclose()


def _salt(label: str) -> str:
    """Return what keeps prefixes apart that weights of other labels computed. vLLM allows neither @ nor / in it."""
    return hashlib.sha256(label.encode()).hexdigest()


async def _all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return what all calls return; the first that fails, or being cancelled, cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
