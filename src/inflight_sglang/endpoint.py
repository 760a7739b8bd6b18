"""An SGLang server as an `InferenceEndpoint`, over SGLang's own HTTP routes. Never imports SGLang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.contracts import InferenceEndpoint
from inflight.engines.calls import Attaching, BackgroundCalls
from inflight.engines.labels import parse_label
from inflight.engines.requests import RequestGate
from inflight.engines.routes import EngineRoutes, words_of
from inflight.errors import InflightError, InvalidRequestError, ProtocolError, TransferError, UpdateRefusedError
from inflight.http.chat import chat_completion_of, check_chat, generate_request_of
from inflight.weights.receiving import ReceivingEndpoint, UpdateReceiver, WeightIntake
from inflight.wire import (
    Capabilities,
    ChatCompletion,
    ChatCompletionRequest,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from inflight_sglang.attaching import Attached, attach
from inflight_sglang.chat import decoded, rendered
from inflight_sglang.checkpoint_files import CheckpointIntake
from inflight_sglang.flags import Updates
from inflight_sglang.native import NativeIntake
from inflight_sglang.requests import body_of, check_request, items_of, labelled, misaligned, response_of
from inflight_sglang.updates import SglangUpdates

if TYPE_CHECKING:
    from inflight_sglang.loaded_weights import LoadedWeights

_CLOSE_S = 5.0


class SglangEndpoint(ReceivingEndpoint, InferenceEndpoint):
    """One SGLang server at ``url``; nothing of inflight is installed there.

    The first call asks the server how it was started, and raises `ConfigError` with the command that starts it as
    needed. ``api_key`` is the server's own. ``model_dir`` is the checkpoint as this process sees it, where that differs
    from the server's path: manifests are checked against it before anything is sent, and the vocabulary is read there.
    ``updates`` says where weights are received: staged in this process, compared, and loaded by the commit from files
    that both see; or by the engine itself as they come, which poisons it if they stop half way. None is staged for a
    server on this host's CPU, with one rank, and native otherwise. With staged updates SGLang's own ``/model_info`` and
    ``/v1/models`` name the files last loaded, which are gone by then; nothing here reads them.

    An instance belongs to the event loop in which it is first used. The version is the server's: it may be replaced by
    a new one, and another instance may publish.

    Seeds are honoured by servers with ``--enable-deterministic-inference`` only; others ignore them. A drain waits for
    the requests of other clients too.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model_dir: Path | None = None,
        updates: Updates | None = None,
        control_timeout_s: float = 30.0,
        generate_timeout_s: float = 600.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._model_dir = model_dir
        self._wanted_updates = updates
        self._generate_timeout_s = generate_timeout_s
        self._routes = EngineRoutes(self._url, api_key=api_key, control_timeout_s=control_timeout_s)
        self._gate = RequestGate()
        self._background = BackgroundCalls()
        self._was_replaced = False
        self._attaching = Attaching(self._attach)
        # From the first call on:
        self._attached: Attached
        self._engine: SglangUpdates
        self._updates: UpdateReceiver

    def __repr__(self) -> str:
        return f"SglangEndpoint({self._url!r})"

    @property
    def name(self) -> str:
        """The server's URL."""
        return self._url

    # -------------------------------------------------------------------------------------------------- attaching

    async def capabilities(self) -> Capabilities:
        """Raises `ConfigError` if the server was not started as needed."""
        return await self._attaching.result()

    async def _attach(self) -> Capabilities:
        self._attached = attached = await attach(self._routes, self._model_dir, self._wanted_updates)
        can = attached.capabilities
        engine = self._engine = SglangUpdates(self._routes, self._gate, self._background)
        intake: WeightIntake
        if can.staging:
            staged = intake = CheckpointIntake(engine.clear, self._make_loaded, self._background)
            engine.files = lambda: staged.files
        else:
            intake = NativeIntake(self._routes, engine, self._background, can.num_ranks)
        self._updates = UpdateReceiver(
            engine,
            intake,
            attached.specs,
            policies=can.in_flight_policies,
            transports=can.transports,
            staging=can.staging,
            encodings=can.encodings,
            partial_updates=can.partial_updates,
            adapters=can.adapters,
        )
        await self._found()
        return can

    def _make_loaded(self) -> LoadedWeights:
        from inflight_sglang.loaded_weights import LoadedWeights  # torch is loaded only where weights arrive

        def served() -> tuple[UpdateRef | None, bool]:
            session = self._updates.session
            if session.run_id is None:
                return None, session.is_torn
            ref = UpdateRef(run_id=session.run_id, version=session.version, session_id=session.session_id)
            return ref, session.is_torn

        return LoadedWeights(self._attached.directory, self._attached.capabilities.dtype, served)

    # ---------------------------------------------------------------------------------------------------- weights

    async def receiver(self) -> UpdateReceiver:
        await self.capabilities()
        return self._updates

    async def init_process_group(self, spec: TransportSpec) -> None:
        """What another client left open on the server is cleared."""
        await super().init_process_group(spec)
        await self._found()
        self._was_replaced = False  # the group just formed is that of the process that answers now

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Raises `TransferError` if the server was replaced."""
        receiver = await self.receiver()
        if reason := misaligned(update):
            raise UpdateRefusedError(f"update to version {update.version} refused: {reason}")
        if receiver.session.update is None:
            await self._found()
            if self._was_replaced:
                raise TransferError("the engine was restarted and belongs to no weight group; form the group anew")
        await receiver.request(update)

    async def weight_version(self) -> WeightVersion:
        """HELD too while another client holds the server.

        ``num_running`` is the server's, other clients' requests included.
        """
        await self.capabilities()
        session = self._updates.session
        num_running, (status, _), _ = await asyncio.gather(
            self._engine.num_running(), self._routes.ask("GET", "/ready"), self._found()
        )
        # A server that is paused says what ran before; where weights are torn every request was ended.
        answer = self._updates.weight_version(
            num_running=0 if session.state is EndpointState.POISONED else num_running,
            last_update=self._engine.last.timings,
        )
        is_held = status != 200 and session.state is EndpointState.READY
        return answer.model_copy(update={"state": EndpointState.HELD}) if is_held else answer

    async def _found(self) -> str:
        """Return how the server calls its weights; take it over, unless that may have changed meanwhile."""
        session, num_changes = self._updates.session, self._updates.session.num_changes
        label = str((await self._routes.get("/model_info"))["weight_version"])
        served = parse_label(label)
        if session.update is None and num_changes == session.num_changes:
            if session.run_id is not None and served.run_id is None:  # a new process, with its checkpoint
                self._was_replaced, self._engine.last.timings = True, None
            session.found(served.version, served.run_id, torn=self._engine.found(served), session_id=served.session_id)
        return label

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Cancelling the call aborts the request in the server."""
        await self.capabilities()
        limits = self._attached.limits
        check_request(request, limits)

        async def send(cache_keys: Mapping[int, str]) -> list[Any]:
            return await self._sample(body_of(request, limits, cache_keys), len(cache_keys))

        return response_of(request, await self._gate.sample(request, self._label, send, labelled), limits)

    async def _label(self) -> str:
        """Return how the server calls its weights. Raises `PoisonedError` if they are torn."""
        label = await self._found()
        self._updates.session.refuse_if_poisoned()
        return label

    async def _sample(self, body: Mapping[str, Any], num: int) -> list[Any]:
        """Have ``num`` completions sampled; return what SGLang answers for each.

        A request whose caller leaves is ended by SGLang, which sees that its connection was closed. It is not told to
        abort it: an abort that comes before the request is begun has no effect, and SGLang ignores each later one.
        """
        status, answer = await self._routes.ask("POST", "/generate", body, self._generate_timeout_s)
        if status == 400:
            raise InvalidRequestError(f"SGLang refused the request: {words_of(answer)}")
        if status != 200:
            raise ProtocolError(f"POST /generate answered status {status}: {words_of(answer)}", self._url)
        return items_of(answer, num)

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """SGLang renders the messages and decodes the tokens."""
        can = await self.capabilities()
        check_chat(request, model=can.model, offers_chat=can.chat)
        generate_request = generate_request_of(request, await rendered(self._routes, request))
        response = await self.generate(generate_request)
        sampled = [completion.token_ids for completion in response.completions]
        texts = await decoded(self._routes, sampled, skip_special_tokens=True)
        pieces = [await decoded(self._routes, [[t] for t in ids]) for ids in sampled if request.logprobs]
        return chat_completion_of(request, generate_request, response, texts, pieces)

    async def aclose(self) -> None:
        """An open update is ended first, so that the server is not left held."""
        if self._attaching.has_succeeded:
            if (update := self._updates.session.update) is not None:
                with contextlib.suppress(InflightError):
                    await self._updates.abort(update.ref)
            self._updates.close()
        await self._background.aclose(_CLOSE_S)
        await self._routes.aclose()
