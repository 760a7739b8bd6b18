"""An SGLang server as an `InferenceEndpoint`, over SGLang's own HTTP routes. Never imports SGLang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.base.requirements import require
from inflight.base.tasks import run_together
from inflight.contracts import AbortingEndpoint, ReleasingEndpoint, ScoringEndpoint, StreamingEndpoint
from inflight.engines.attached import AttachedEndpoint
from inflight.engines.requests import SentRequest, check_scored, protocol_errors
from inflight.engines.routes import EngineRoutes, error_text_of
from inflight.engines.streams import TokenStream
from inflight.engines.version_labels import ServedVersion, began_under_another, parse_label
from inflight.errors import InvalidRequestError, TransferError, UpdateRefusedError
from inflight.weights.receive.adapter import BucketSink
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.weights.receive.releasing import MemoryRelease
from inflight.wire import (
    Capabilities,
    ChatCompletionRequest,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    Needs,
    PromptImage,
    SamplingParams,
    ScoreRequest,
    ScoreResponse,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from inflight_sglang import flags
from inflight_sglang.attaching import Attached, attach
from inflight_sglang.checkpoint_files import CheckpointSink
from inflight_sglang.flags import Updates
from inflight_sglang.native import NativeSink
from inflight_sglang.requests import (
    body_of,
    check_request,
    check_sampling,
    items_of,
    misaligned,
    response_of,
    scores_of,
    scoring_body_of,
    tokens_of,
    version_labels_of,
)
from inflight_sglang.updates import SglangUpdates

if TYPE_CHECKING:
    from inflight_sglang.loaded_weights import LoadedWeights

_CLOSE_S = 5.0


class SglangEndpoint(
    AttachedEndpoint, ReceivingEndpoint, StreamingEndpoint, AbortingEndpoint, ReleasingEndpoint, ScoringEndpoint
):
    """The SGLang server at ``url``; nothing needs to be installed there. It can stream if `inflight serve` started it.

    The first call asks the server how it was started. If it was started incorrectly, that call raises a `ConfigError`
    that contains the correct command. ``api_key`` is the key that the server itself requires. ``model_dir`` is the path
    at which this process finds the checkpoint, if that differs from the server's path: manifests are checked against
    this checkpoint before anything is sent, and the size of the vocabulary is read from it.

    ``updates`` selects where weights are received. ``staged`` updates are received and verified in this process; the
    commit loads them from files that both sides can see. ``native`` updates are received directly by the engine, whose
    weights are torn if the update stops halfway. None means staged for a server on this host's CPU with one rank, and
    native otherwise. With staged updates, SGLang's own ``/model_info`` and ``/v1/models`` report the files last loaded,
    which no longer exist.

    Requests with seeds are refused unless the server was started with ``--enable-deterministic-inference``. A drain
    also waits for the requests of other clients.
    """

    _release_arguments = flags.RELEASE_ARGUMENTS

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
        routes = EngineRoutes(url.rstrip("/"), api_key=api_key, control_timeout_s=control_timeout_s)
        super().__init__(routes, label_path="/model_info", close_s=_CLOSE_S)
        self._model_dir = model_dir
        self._wanted_updates = updates
        self._generate_timeout_s = generate_timeout_s
        # Set by the first call:
        self._attached: Attached
        self._engine: SglangUpdates

    # -------------------------------------------------------------------------------------------------- attaching

    async def _attach(self) -> Capabilities:
        self._attached = attached = await attach(self._routes, self._model_dir, self._wanted_updates)
        can = attached.capabilities
        engine = self._engine = SglangUpdates(self._routes, self._gate, self._background, self._last)
        sink: BucketSink
        if can.staging:
            staged = sink = CheckpointSink(engine.clear, self._make_loaded, self._background)
            engine.files = lambda: staged.files
        else:
            sink = NativeSink(self._routes, engine, self._background, can.num_ranks)
        self._updates = UpdateReceiver(engine, sink, attached.specs, can)
        self._memory = MemoryRelease(engine, self._updates.session)
        await self._refresh_label()
        return can

    def _make_loaded(self) -> LoadedWeights:
        from inflight_sglang.loaded_weights import LoadedWeights  # imports torch, which is needed only for updates

        def served() -> tuple[UpdateRef | None, bool]:
            session = self._updates.session
            if session.run_id is None:
                return None, session.is_torn
            ref = UpdateRef(run_id=session.run_id, version=session.version, session_id=session.session_id)
            return ref, session.is_torn

        return LoadedWeights(self._attached.directory, self._attached.capabilities.dtype, served)

    # ---------------------------------------------------------------------------------------------------- weights

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Request an update. Raises `TransferError` if the server has been replaced."""
        receiver = await self.receiver()
        if reason := misaligned(update):
            raise UpdateRefusedError(f"update to version {update.version} refused: {reason}")
        if receiver.session.update is None:
            await self._refresh_label()
            if self._was_replaced:
                raise TransferError("the engine was restarted and belongs to no weight group; form the group again")
        await receiver.request(update)

    async def weight_version(self) -> WeightVersion:
        """Return the served version. The state is PAUSED even if another client paused the server.

        ``num_running`` is the server's own count, which includes other clients' requests.
        """
        await self.capabilities()
        session = self._updates.session
        num_running, (status, _), _ = await asyncio.gather(
            self._engine.num_running(), self._routes.ask("GET", "/ready"), self._refresh_label()
        )
        # A paused server reports the number before the pause; if weights are torn, every request has been ended.
        answer = self._updates.weight_version(
            num_running=0 if session.state is EndpointState.POISONED else num_running,
            last_update=self._last.timings,
        )
        is_paused = status != 200 and session.state is EndpointState.READY
        return answer.model_copy(update={"state": EndpointState.PAUSED}) if is_paused else answer

    def _is_torn(self, served: ServedVersion) -> bool:
        return self._engine.adopt_label(served)

    # ------------------------------------------------------------------------------------------------- generation

    def _check_sampling(self, sampling: SamplingParams, can: Capabilities) -> None:
        check_sampling(sampling, self._attached.limits)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Return the completions. Cancelling the call closes its connection, which ends the request in the server."""
        can, limits = await self.capabilities(), self._attached.limits
        check_request(request, limits)
        require(can, Needs.of_request(request), self.name)

        async def send(asked: Mapping[int, SentRequest]) -> list[Any]:
            body = body_of(request, limits, asked)
            answer = await self._routes.request("/generate", body, self._generate_timeout_s)
            return items_of(answer, len(asked))

        return response_of(request, await self._gate.sample(request, self._label, send, version_labels_of), limits)

    async def _stream(self, request: GenerateRequest, stream: TokenStream) -> Sequence[object]:
        limits = self._attached.limits
        check_request(request, limits)
        require(await self.capabilities(), Needs.of_request(request), "this endpoint")

        async def send(asked: Mapping[int, SentRequest]) -> list[Any]:
            return await run_together(*(self._read(request, index, one, stream) for index, one in asked.items()))

        return await self._gate.sample(request, self._label, send, version_labels_of)

    async def _read(self, request: GenerateRequest, index: int, asked: SentRequest, stream: TokenStream) -> Any:
        """Add what SGLang streams, and return the last part, or the first if other weights sampled the first token."""
        limits = self._attached.limits
        body = body_of(request, limits, {index: asked}) | {"stream": True}
        events = self._routes.events("/generate", body, self._generate_timeout_s)
        item, reason = None, None
        async with contextlib.aclosing(events):
            async for item in events:
                with protocol_errors("/generate"):
                    ended, labels = item["meta_info"]["finish_reason"], version_labels_of(item)
                    if asked.label and not stream.num_tokens(index) and began_under_another(labels, asked.label):
                        return item
                    if status := (ended or {}).get("status_code"):
                        raise self._routes.refusal_of("/generate", int(status), ended)
                    token_ids, logprobs, reason = tokens_of(item, request.sampling, limits)
                    stream.add(index, token_ids, logprobs, labels, reason)
                if reason is not None and not ended:  # a stop token that SGLang ignores
                    return item
        with protocol_errors("/generate"):
            if reason is None:
                raise ValueError("the stream ended before its completion")
        return item

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Score a request. SGLang uses cached prefixes before ``start``.

        If the weights are updated in the meantime, SGLang computes the scores again.
        """
        can, limits = await self.capabilities(), self._attached.limits
        require(can, Needs.of_score(request), "this endpoint")
        check_scored(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)

        async def send(asked: Mapping[int, SentRequest]) -> list[Any]:
            body = scoring_body_of(request, asked[0])
            return items_of(await self._routes.request("/generate", body, self._generate_timeout_s), 1)

        item, current = await self._gate.score(request.request_id, self._label, send, version_labels_of)
        return scores_of(request, item, parse_label(current).version, limits.vocab_size)

    async def _end(self, names: Sequence[str]) -> None:
        await self._engine.end_requests(names)

    async def _render(self, request: ChatCompletionRequest) -> tuple[Sequence[int], Sequence[PromptImage]]:
        body = request.model_dump(include={"model", "messages"})
        status, answer = await self._routes.ask("POST", "/v1/tokenize", body)
        if status != 200:
            raise InvalidRequestError(f"SGLang refused the messages: {error_text_of(answer)}")
        return list(answer["tokens"]), ()

    async def _decode(self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Return the texts. Empty sequences are not sent, because SGLang does not decode them."""
        asked = [list(ids) for ids in token_ids if ids]
        if not asked:
            return [""] * len(token_ids)
        body = {"tokens": asked, "skip_special_tokens": skip_special_tokens}
        texts = iter((await self._routes.post("/v1/detokenize", body))["text"])
        return [str(next(texts)) if ids else "" for ids in token_ids]
