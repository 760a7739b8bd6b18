"""An SGLang server as an `InferenceEndpoint`, over SGLang's own HTTP routes. Never imports SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.engines.labels import parse_label
from inflight.errors import (
    InflightError,
    InvalidRequestError,
    ProtocolError,
    TransferError,
    UnsupportedError,
    UpdateRefusedError,
)
from inflight.weights.receiving import ReceivingEndpoint, UpdateReceiver
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
from inflight_sglang.chat import chat_completion_of, rendered
from inflight_sglang.checkpoint_files import CheckpointIntake
from inflight_sglang.flags import Updates
from inflight_sglang.requests import began_late, body_of, check_request, items_of, misaligned, response_of
from inflight_sglang.routes import SglangRoutes, words_of
from inflight_sglang.updates import SglangUpdates

if TYPE_CHECKING:
    from inflight_sglang.loaded_weights import LoadedWeights

_CLOSE_S = 5.0


class SglangEndpoint(ReceivingEndpoint):
    """One SGLang server at ``url``; nothing of inflight is installed there. Satisfies `InferenceEndpoint`.

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
        self._routes = SglangRoutes(self._url, api_key=api_key, control_timeout_s=control_timeout_s)
        self._running: set[str] = set()
        self._num_sent = 0
        self._engine = SglangUpdates(self._routes, lambda: self._num_sent)
        self._staged = CheckpointIntake(self._engine.clear, self._make_loaded)
        self._was_replaced = False
        self._attaching: asyncio.Future[Capabilities] | None = None
        self._attached: Attached
        self._updates: UpdateReceiver  # both from the first call on

    def __repr__(self) -> str:
        return f"SglangEndpoint({self._url!r})"

    @property
    def name(self) -> str:
        """The server's URL."""
        return self._url

    # -------------------------------------------------------------------------------------------------- attaching

    async def capabilities(self) -> Capabilities:
        """See `InferenceEndpoint.capabilities`. Raises `ConfigError` if the server was not started as needed."""
        if self._attaching is None or (
            self._attaching.done() and (self._attaching.cancelled() or self._attaching.exception() is not None)
        ):
            self._attaching = asyncio.ensure_future(self._attach())
        return await asyncio.shield(self._attaching)

    async def _attach(self) -> Capabilities:
        self._attached = attached = await attach(self._routes, self._model_dir, self._wanted_updates)
        can = attached.capabilities
        self._engine.num_ranks = can.num_ranks
        if can.staging:
            self._engine.files = lambda: self._staged.files
        self._updates = UpdateReceiver(
            self._engine,
            self._staged if can.staging else self._engine,
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
        """See `ReceivingEndpoint.receiver`."""
        await self.capabilities()
        return self._updates

    async def init_process_group(self, spec: TransportSpec) -> None:
        """See `InferenceEndpoint.init_process_group`. What another client left open on the server is cleared."""
        await super().init_process_group(spec)
        await self._found()
        self._was_replaced = False  # the group just formed is that of the process that answers now

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`. Raises `TransferError` if the server was replaced."""
        receiver = await self.receiver()
        if reason := misaligned(update):
            raise UpdateRefusedError(f"update to version {update.version} refused: {reason}")
        if receiver.session.update is None:
            await self._found()
            if self._was_replaced:
                raise TransferError("the engine was restarted and belongs to no weight group; form the group anew")
        await receiver.request(update)

    async def weight_version(self) -> WeightVersion:
        """See `InferenceEndpoint.weight_version`. HELD too while another client holds the server.

        ``num_running`` is the server's, other clients' requests included.
        """
        await self.capabilities()
        session = self._updates.session
        num_running, (status, _), _ = await asyncio.gather(
            self._engine.num_running(), self._routes.ask("GET", "/ready"), self._found()
        )
        # A server that is paused says what ran before; where weights are torn every request was ended.
        answer = self._updates.weight_version(
            num_running=0 if session.state is EndpointState.POISONED else num_running, last_update=self._engine.timings
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
                self._was_replaced, self._engine.timings = True, None
            session.found(served.version, served.run_id, torn=self._engine.found(served), session_id=served.session_id)
        return label

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """See `InferenceEndpoint.generate`. Cancelling the call aborts the request in the server."""
        await self.capabilities()
        check_request(request, self._attached.limits)
        if request.request_id in self._running:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use by a running request")
        self._running.add(request.request_id)
        try:
            # Under keep SGLang's prefix cache outlives an update; what runs keeps its own entries.
            label = await self._label()
            items = await self._sample(request, dict.fromkeys(range(request.sampling.n), label))
            if late := began_late(items, label):
                await self._label()  # whoever holds or poisons the server has his turn first
                again = await self._sample(request, {index: uuid.uuid4().hex for index in late})
                for index, item in zip(late, again, strict=True):
                    items[index] = item
            return response_of(request, items, self._attached.limits)
        finally:
            self._running.discard(request.request_id)

    async def _label(self) -> str:
        """Return how the server calls its weights, once requests may be sent. Raises `PoisonedError` if they are torn.

        Asked for each request: any other client may have changed them since.
        """
        while True:
            await self._engine.is_open.wait()
            label = await self._found()
            self._updates.session.refuse_if_poisoned()
            if self._engine.is_open.is_set():
                return label

    async def _sample(self, request: GenerateRequest, cache_keys: Mapping[int, str]) -> list[Any]:
        """Have the completions with these indices sampled; return what SGLang answers for each.

        A request whose caller leaves is ended by SGLang, which sees that its connection was closed. It is not told to
        abort it: an abort that comes before the request is begun has no effect, and SGLang ignores each later one.
        """
        body = body_of(request, self._attached.limits, cache_keys)
        self._num_sent += 1
        try:
            status, answer = await self._routes.ask("POST", "/generate", body, self._generate_timeout_s)
        finally:
            self._num_sent -= 1
        if status == 400:
            raise InvalidRequestError(f"SGLang refused the request: {words_of(answer)}")
        if status != 200:
            raise ProtocolError(f"POST /generate answered status {status}: {words_of(answer)}", self._url)
        return items_of(answer, len(cache_keys))

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """See `InferenceEndpoint.chat_completion`. SGLang renders the messages and decodes the tokens."""
        can = await self.capabilities()
        if not can.chat:
            raise UnsupportedError(f"{self._url} renders no chat messages; use token ids")
        if request.model != can.model:
            raise InvalidRequestError(f"model {request.model!r} is not served here, {can.model!r} is")
        generate_request = GenerateRequest(
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_token_ids=await rendered(self._routes, request),
            sampling=request.sampling(),
        )
        response = await self.generate(generate_request)
        return await chat_completion_of(self._routes, request, generate_request, response)

    async def aclose(self) -> None:
        """See `InferenceEndpoint.aclose`. An open update is ended first, so that the server is not left held."""
        attaching = self._attaching
        if attaching is not None and attaching.done() and not attaching.cancelled() and attaching.exception() is None:
            if (update := self._updates.session.update) is not None:
                with contextlib.suppress(InflightError):
                    await self._updates.abort(update.ref)
            self._updates.close()
        await self._staged.aclose(_CLOSE_S)
        await self._engine.aclose(_CLOSE_S)
        await self._routes.aclose()
