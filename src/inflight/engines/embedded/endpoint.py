"""The embedded engine as an `InferenceEndpoint` in this process: the contract's reference implementation.

It combines the engine (a thread) with the receiving half of updates. Only a commit, in the engine's thread, changes the
model, so after a failure before the commit, the old weights are still served.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from inflight.base.requirements import require
from inflight.base.threads import run_abandonable
from inflight.base.transport_registry import receivable_transports
from inflight.contracts import (
    EMBEDDED,
    AbortingEndpoint,
    DraftingEndpoint,
    ReleasingEndpoint,
    ScoringEndpoint,
    StreamingEndpoint,
    WeightReceiver,
)
from inflight.engines.embedded.chat import ChatFormat
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.parameters import HOST, PreparedParameters
from inflight.engines.embedded.sequences import Sequence
from inflight.errors import (
    EndpointError,
    InflightError,
    InvalidRequestError,
    NonFiniteError,
    PoisonedError,
    UnsupportedError,
)
from inflight.http.chat import chat_completion_of, check_chat, check_logprobs
from inflight.http.streamed_text import chat_chunks_of
from inflight.model.images import ImageProcessor
from inflight.types import EngineStats
from inflight.weights.encode.transit import finished_on_weight_stream
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.base_weights import AdaptedLoad, AdaptedWeights, Named
from inflight.weights.receive.receiver import ReceivingEndpoint, UpdateReceiver
from inflight.weights.receive.releasing import MemoryRelease, ReleasableEngine
from inflight.weights.receive.staged_sink import StagedSink
from inflight.weights.send.module import tensor_spec
from inflight.weights.transports import make_receiver
from inflight.wire import (
    MAX_ALTERNATIVES,
    AbortRequests,
    Capabilities,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionChunk,
    DraftHistory,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    Manifest,
    Needs,
    ScoreRequest,
    ScoreResponse,
    TransportSpec,
    UpdateTimings,
    WeightUpdate,
    WeightVersion,
)

T = TypeVar("T")


class EmbeddedEndpoint(
    ReceivingEndpoint,
    StreamingEndpoint,
    AbortingEndpoint,
    ReleasingEndpoint,
    DraftingEndpoint,
    ScoringEndpoint,
    PausableEngine,
    ReleasableEngine,
):
    """An endpoint around an `Engine`, which it starts and closes.

    Belongs to the event loop that first uses it. ``chat`` is None if the model has no chat template, and ``images`` is
    None if the model does not accept images.
    """

    def __init__(
        self,
        engine: Engine,
        model: Any,
        *,
        name: str,
        chat: ChatFormat | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        self._engine = engine
        self._images = images
        self._name = name
        self._chat = chat
        parameter = next(model.parameters())
        stored = engine.weights.stored.views(engine.weights.by_name)
        specs = tuple(tensor_spec(name, tensor, None) for name, tensor in stored.items())
        self._device: Any = parameter.device
        self._adapted = AdaptedWeights()
        self._is_borrowed = False
        """Whether weights arrive in memory that disappears when the trainer's process ends."""
        self._sink = StagedSink(self._make_receiver, self._prepare)
        self._manifest = Manifest(tensors=specs)
        self._capabilities = self._describe_capabilities(parameter)
        self._updates = UpdateReceiver(self, self._sink, specs, self._capabilities)
        self._memory = MemoryRelease(self, self._updates.session)
        self._last_timings: UpdateTimings | None = None
        engine.start()

    @property
    def name(self) -> str:
        return self._name

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def capabilities(self) -> Capabilities:
        return self._capabilities

    def _describe_capabilities(self, parameter: Any) -> Capabilities:
        from inflight import __version__

        return Capabilities(
            engine=EMBEDDED,
            engine_version=__version__,
            model=self._name,
            vocab_size=self._engine.limits.vocab_size,
            max_model_len=self._engine.limits.max_model_len,
            dtype=str(parameter.dtype).removeprefix("torch."),
            in_flight_policies=tuple(InFlightPolicy),
            transports=receivable_transports(on_gpu=parameter.is_cuda),
            staging=True,
            encodings=("bfloat16", "float8", "delta"),
            partial_updates=True,
            sharded=True,
            lora=True,
            partial_rollouts=True,
            version_binding="spans",
            logprob_kind="processed",
            num_ranks=1,
            max_concurrent_sequences=self._engine.scheduler.max_concurrent,
            streaming=True,
            chat=self._chat is not None,
            releases_memory=not self._engine.weights.keeps_addresses,
            images=self._images is not None,
            drafts=self._engine.speculation.takes_history,
            draft_counts=self._engine.speculation.is_on,
            routed_experts=self._engine.records_routing,
            scoring=True,
            max_top_k=min(MAX_ALTERNATIVES, self._engine.limits.vocab_size),
            candidates=True,
            manifest_digest=self._manifest.digest(),
        )

    # ---------------------------------------------------------------------------------------------------- weights

    async def receiver(self) -> UpdateReceiver:
        return self._updates

    async def weight_version(self) -> WeightVersion:
        """Return the served version. Raises `EndpointError` if the engine has failed."""
        if (failure := self._engine.failure) is not None:
            raise failure
        is_open = self._updates.session.update is not None
        return self._updates.weight_version(
            num_running=await self.num_running(),
            last_update=self._last_timings if is_open else self._timings(),
        )

    def _timings(self) -> UpdateTimings | None:
        """Return the timings of the last committed update, with the time to its first token once that is known."""
        timings = self._last_timings
        if timings is not None and timings.first_token_s is None:
            timings = timings.model_copy(update={"first_token_s": self._engine.pauses.first_token_s})
        return timings

    async def pause(self, update: WeightUpdate) -> None:
        self._last_timings = self._timings()
        paused: Future[None] = _outcome()
        try:
            await self._in_engine(lambda: self._engine.pauses.pause(update.in_flight, lambda: paused.set_result(None)))
            await asyncio.wrap_future(paused)
        except asyncio.CancelledError:
            self._engine.call(
                self._engine.pauses.resume
            )  # the engine runs this after the pause, which may not have begun yet
            raise

    def _make_receiver(self, spec: TransportSpec) -> WeightReceiver:
        self._is_borrowed = spec.transport == "ipc" and not spec.others
        return make_receiver(spec, self._device)

    def _prepare(self, update: WeightUpdate, arrived: Named) -> tuple[AdaptedLoad, PreparedParameters]:
        """Return the tensors that the commit will load. Runs in the receiving thread while sampling continues."""
        weights = self._engine.weights

        def present(name: str) -> Any:
            """Return one of the model's tensors, copied if the commit would overwrite its memory."""
            tensor = weights.stored.view(name, weights.by_name).detach()
            return tensor.clone() if weights.keeps_addresses else tensor

        with finished_on_weight_stream(self._device):
            if self._is_borrowed:
                arrived = [(name, tensor.clone()) for name, tensor in arrived]
            load = self._adapted.prepare(update.manifest, arrived, present)
            whole = weights.stored.assemble(load.tensors, weights.by_name.__getitem__)
            return load, weights.prepare(whole)

    async def apply(self, update: WeightUpdate) -> None:
        load, ready = self._sink.prepared()

        def apply() -> UpdateTimings:
            started = time.monotonic()
            self._engine.load(ready, update.version, update.in_flight)
            self._adapted.note_loaded(load)
            load_s = time.monotonic() - started
            return UpdateTimings(load_s=load_s, paused_s=self._engine.pauses.resume())

        self._last_timings = await self._in_engine(apply)
        await asyncio.to_thread(self._engine.weights.replaced.clear)

    async def resume(self) -> None:
        await self._in_engine(self._engine.pauses.resume)

    async def fail_requests(self) -> None:
        def fail() -> None:
            self._engine.scheduler.cancel_all()
            self._engine.scoring.fail_all(
                PoisonedError("the weights were torn while the request waited: publish again")
            )

        await self._in_engine(fail)

    async def release_memory(self) -> WeightVersion:
        await self._memory.release()
        return await self.weight_version()

    async def restore_memory(self) -> WeightVersion:
        await self._memory.restore()
        return await self.weight_version()

    async def free_memory(self) -> None:
        def free() -> None:
            self._engine.free_memory()
            self._adapted.move(HOST)

        await self._in_engine(free)

    async def take_memory(self) -> None:
        """Reacquire the memory. Raises `EndpointError` if it cannot be allocated."""

        def take() -> None:
            self._adapted.move(self._device)
            self._engine.take_memory()

        try:
            await self._in_engine(take)
        except RuntimeError as error:  # torch's error for too little memory is one
            raise EndpointError(f"the memory could not be reacquired and remains released: {error}") from error

    async def num_running(self) -> int:
        """Return the number of running sequences; a request may have several."""
        return self._engine.stats().num_running

    async def _in_engine(self, command: Callable[[], T]) -> T:
        """Run ``command`` in the engine's thread, even if the caller is cancelled, and return its result."""
        return await asyncio.shield(asyncio.wrap_future(self._engine.call(command)))

    # ------------------------------------------------------------------------------------------------- generation

    async def record_history(self, history: DraftHistory) -> None:
        speculation = self._engine.speculation
        if not speculation.takes_history:
            raise UnsupportedError(f"{self._name} does not support drafts; start it with --drafts history or both")
        largest = max(token for entry in history.entries for ids in (*entry.completions, (0,)) for token in ids)
        if largest >= (num := self._engine.limits.vocab_size):
            raise InvalidRequestError(f"token id {largest} of the history is outside the vocabulary of {num} tokens")
        await self._in_engine(lambda: speculation.record(history))

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Return the completions of a request. Cancelling the call ends the request between two token steps."""
        self._updates.session.refuse_to_sample()
        if request.routed_experts and not self._engine.records_routing:
            raise UnsupportedError(
                f"{self._name} does not support routed_experts: its model has no known routers, or its decode "
                "step is compiled"
            )
        finished: Future[list[Completion]] = _outcome()
        tensors = await self._image_tensors(request)
        admitted, submitted = self._engine.submit(
            request, finished.set_result, finished.set_exception, image_tensors=tensors
        )
        try:
            await asyncio.wrap_future(submitted)
            completions = await asyncio.wrap_future(finished)
        except asyncio.CancelledError:
            self._engine.call(lambda: self._engine.scheduler.cancel(admitted))
            raise
        for completion in completions:
            self._refuse_non_finite(completion.logprobs)
        return GenerateResponse.model_construct(request_id=request.request_id, completions=tuple(completions))

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Yield one chunk per step: one token, or several with drafts. Closing the iterator ends the request."""
        self._updates.session.refuse_to_sample()
        if request.routed_experts:
            raise UnsupportedError("routed_experts cannot be streamed: request the whole completion")
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[CompletionChunk | InflightError | None] = asyncio.Queue()
        sent = [0] * request.sampling.n

        def on_token(sequence: Sequence) -> None:
            start = sent[sequence.index]
            sent[sequence.index] = len(sequence.token_ids)
            chunk = CompletionChunk.model_construct(
                request_id=request.request_id,
                index=sequence.index,
                start=start,
                token_ids=tuple(sequence.token_ids[start:]),
                logprobs=tuple(sequence.logprobs[start:]),
                version=sequence.spans[-1][0] if sequence.spans else self._updates.session.version,
                finish_reason=sequence.finish_reason,
            )
            _call_in(loop, lambda: chunks.put_nowait(chunk))

        tensors = await self._image_tensors(request)
        admitted, submitted = self._engine.submit(
            request,
            lambda _: _call_in(loop, lambda: chunks.put_nowait(None)),
            lambda error: _call_in(loop, lambda: chunks.put_nowait(error)),
            on_token,
            tensors,
        )
        try:
            await asyncio.wrap_future(submitted)
            while (chunk := await chunks.get()) is not None:
                if isinstance(chunk, InflightError):
                    raise chunk
                self._refuse_non_finite(chunk.logprobs)
                yield chunk
        finally:
            self._engine.call(lambda: self._engine.scheduler.cancel(admitted))

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Score a request in one forward pass, which runs between two token steps and delays running sequences."""
        require(self._capabilities, Needs.of_score(request), self._name)
        self._updates.session.refuse_to_sample()
        self._engine.limits.check_scored(request)
        outcome: Future[ScoreResponse] = _outcome()
        added = self._engine.call(lambda: self._engine.scoring.add(request, outcome))
        try:
            await asyncio.wrap_future(added)
            response = await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            self._engine.call(lambda: self._engine.scoring.remove(outcome))
            raise
        self._refuse_non_finite(response.logprobs)
        return response

    async def _image_tensors(self, request: GenerateRequest) -> dict[str, Any] | None:
        """Return the vision tower's inputs for a request's images, or None without images.

        Raises `UnsupportedError` if the model does not accept images, and `InvalidRequestError` if an image cannot be
        decoded or is not where the request specifies.
        """
        if not request.images:
            return None
        images = self._images
        if images is None:
            raise UnsupportedError(f"{self._name} does not support images: its model has no vision tower")

        def tensors() -> dict[str, Any]:
            images.check(request.prompt_token_ids, request.images)
            return images.tensors(image.url for image in request.images)

        return await asyncio.to_thread(tensors)

    async def abort_requests(self, requests: AbortRequests) -> None:
        """End requests between two token steps. A sequence that is waiting for a slot ends without tokens."""
        await self._in_engine(lambda: self._engine.scheduler.abort(requests.request_ids))

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        generate_request = await asyncio.to_thread(self.chat_request, request)
        response = await self.generate(generate_request)
        chat = self._chat_format()

        def answer() -> ChatCompletion:
            sampled = [completion.token_ids for completion in response.completions]
            pieces = [chat.pieces(token_ids) for token_ids in sampled] if request.logprobs else []
            return chat_completion_of(request, generate_request, response, [chat.text(it) for it in sampled], pieces)

        return await asyncio.to_thread(answer)

    async def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        generate_request = await asyncio.to_thread(self.chat_request, request, streamed=True)
        chunks = chat_chunks_of(request, self.generate_stream(generate_request), self._chat_format().streamed_text)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    def chat_request(self, request: ChatCompletionRequest, *, streamed: bool = False) -> GenerateRequest:
        """Render a chat request into a request with token ids."""
        check_chat(request, self._capabilities, streamed=streamed)
        rendered = self._chat_format().render(request)
        check_logprobs(request, self._engine.limits.max_tokens_of(rendered))
        return rendered

    def _refuse_non_finite(self, logprobs: Iterable[float]) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise NonFiniteError(
                "sampled logprobs are not finite: the current weights "
                f"(version {self._updates.session.version}) or earlier ones are broken; publish valid weights"
            )

    def _chat_format(self) -> ChatFormat:
        assert self._chat is not None  # `check_chat` has refused the request otherwise
        return self._chat

    async def aclose(self) -> None:
        """Abort all requests and end the engine."""
        await self._updates.aclose()
        await run_abandonable(self._engine.close, "inflight-close")


def _outcome() -> Future[Any]:
    """Return a future for the engine's thread to complete. It is not cancelled when a caller stops waiting."""
    outcome: Future[Any] = Future()
    outcome.set_running_or_notify_cancel()
    return outcome


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
        loop.call_soon_threadsafe(call)
