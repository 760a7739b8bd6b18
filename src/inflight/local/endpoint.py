"""The embedded engine as an `InferenceEndpoint` in this process: the contract's reference implementation.

It joins the engine (a thread), the update state machine and a transport's receiver. Received buckets are staged and
verified against the manifest first; the model is touched by the commit only, so that everything that fails before it
leaves the old weights serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

import torch

from inflight.errors import (
    InvalidRequestError,
    NonFiniteError,
    PoisonedError,
    TransferError,
    UnsupportedError,
    UpdateAbortedError,
    UpdateRefusedError,
)
from inflight.local.chat import ChatChunkWriter, ChatFormat, chat_completion_of
from inflight.local.engine import Engine
from inflight.local.sequences import Sequence
from inflight.types import EngineStats
from inflight.weights.session import UpdateSession
from inflight.weights.threads import run_abandonable
from inflight.weights.transports.process_group import ProcessGroupReceiver
from inflight.wire import (
    BucketTransfer,
    Capabilities,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionChunk,
    EndpointState,
    GenerateRequest,
    GenerateResponse,
    InFlightPolicy,
    Manifest,
    ProcessGroupSpec,
    TensorSpec,
    UpdateRef,
    UpdateTimings,
    WeightUpdate,
    WeightVersion,
)

T = TypeVar("T")


class LocalEndpoint:
    """An endpoint around an `Engine`, which it starts and closes. Satisfies `StreamingEndpoint`.

    Belongs to the event loop in which it is first used. ``chat`` is None where the model has no chat template.
    """

    def __init__(self, engine: Engine, model: Any, *, name: str, chat: ChatFormat | None = None) -> None:
        self._engine = engine
        self._name = name
        self._chat = chat
        self._dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        self._device = next(model.parameters()).device
        specs = tuple(
            TensorSpec.model_validate(
                {"name": n, "dtype": str(p.dtype).removeprefix("torch."), "shape": tuple(p.shape)}
            )
            for n, p in model.named_parameters()
        )
        self._manifest = Manifest(tensors=specs)
        self._session = UpdateSession(specs)
        self._session.joined()
        self._receiver: ProcessGroupReceiver | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []
        self._held: asyncio.Future[None] | None = None
        self._applying: asyncio.Future[PoisonedError | None] | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        self._last_timings: UpdateTimings | None = None
        engine.start()

    @property
    def name(self) -> str:
        """The name given at construction."""
        return self._name

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._engine.stats()

    async def capabilities(self) -> Capabilities:
        """See `InferenceEndpoint.capabilities`."""
        from inflight import __version__

        return Capabilities(
            engine="inflight.local",
            engine_version=__version__,
            model=self._name,
            vocab_size=self._engine.vocab_size,
            max_model_len=self._engine.max_model_len,
            dtype=self._dtype,
            in_flight_policies=tuple(InFlightPolicy),
            transports=("gloo", "nccl") if self._device.type == "cuda" else ("gloo",),
            version_binding="spans",
            logprob_kind="processed",
            num_ranks=1,
            max_concurrent_sequences=self._engine.max_concurrent,
            streaming=True,
            chat=self._chat is not None,
            manifest_digest=self._manifest.digest(),
        )

    # ---------------------------------------------------------------------------------------------------- weights

    async def init_process_group(self, spec: ProcessGroupSpec) -> None:
        """See `InferenceEndpoint.init_process_group`. An open update is aborted first."""
        if spec.backend == "nccl" and self._device.type != "cuda":
            raise UnsupportedError("the nccl backend needs a GPU, and this engine runs on the CPU; use gloo")
        self._lose_group()
        await self._end_open_update()
        self._lose_group()  # another call may have come in between
        self._receiver = receiver = ProcessGroupReceiver(spec, self._device)
        try:
            await run_abandonable(receiver.join, "inflight-join")
        except BaseException:
            receiver.abort()
            raise
        if receiver is not self._receiver:
            raise TransferError("another group was formed meanwhile")
        self._session.group_formed(spec.run_id)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`."""
        self._session.request(update)
        self._last_timings = self._timings()
        if self._receiver is not None:
            self._receiver.recycle()
        self._renew_lease(update)
        try:
            async with asyncio.timeout(update.deadline_s):
                await self._hold(update.in_flight)
        except BaseException as error:
            running = self._engine.stats().num_running
            await self._end_update(update)
            if isinstance(error, TimeoutError):
                raise UpdateRefusedError(
                    f"update to version {update.version} refused: {running} requests were still running after "
                    f"{update.deadline_s:g} s of {update.in_flight}"
                ) from error
            raise
        if self._session.update is not update:
            raise UpdateAbortedError(f"the update to version {update.version} was ended before sampling was held")

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """See `InferenceEndpoint.receive_weights`."""
        spec, tensors = self._session.begin_bucket(bucket)
        update, receiver = self._session.update, self._receiver
        assert update is not None and receiver is not None  # losing the group ends the update
        self._renew_lease(update)
        try:
            arrived = await run_abandonable(lambda: receiver.receive(tensors, bucket.timeout_s), "inflight-receive")
        except BaseException:
            await self._end_update(update)
            raise
        if self._session.update is not update:
            raise TransferError(f"the update to version {update.version} ended while bucket {spec.index} travelled")
        self._staged += [(tensor_spec.name, tensor) for tensor_spec, tensor in zip(tensors, arrived, strict=True)]
        self._session.bucket_received()
        self._renew_lease(update)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.commit_weight_update`. Cancelling the call does not stop what it began."""
        update = self._session.begin_apply(ref)
        self._stop_lease()
        staged, self._staged = self._staged, []
        self._applying = asyncio.ensure_future(self._apply(update, staged))
        failure = await asyncio.shield(self._applying)
        if failure is not None:
            raise failure
        return await self.weight_version()

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.abort_weight_update`. A commit that has begun ends first, whole or poisoned."""
        update = self._session.update
        if update is not None:
            if (ref.run_id, ref.version) != (update.run_id, update.version):
                raise UpdateRefusedError(
                    f"the open update is version {update.version} of run {update.run_id!r}, not version {ref.version}"
                )
            await self._end_open_update()
        return await self.weight_version()

    async def weight_version(self) -> WeightVersion:
        """See `InferenceEndpoint.weight_version`. Raises `EndpointError` if the engine has failed."""
        if (failure := self._engine.failure) is not None:
            raise failure
        update = self._session.update
        return WeightVersion(
            state=self._session.state,
            version=self._session.version,
            run_id=self._session.run_id,
            updating_to=None if update is None else update.version,
            num_running=self._engine.stats().num_running,
            last_update=self._last_timings if update is not None else self._timings(),
        )

    def _timings(self) -> UpdateTimings | None:
        """The last committed update's cost, with its first token once that was sampled."""
        timings = self._last_timings
        if timings is not None and timings.first_token_s is None:
            timings = timings.model_copy(update={"first_token_s": self._engine.first_token_s})
        return timings

    async def _hold(self, policy: InFlightPolicy) -> None:
        """Return when no token is being sampled any more, or when the update was ended meanwhile."""
        loop = asyncio.get_running_loop()
        self._held = held = loop.create_future()
        engine = self._engine
        await self._in_engine(lambda: engine.hold(policy, lambda: _call_in(loop, lambda: _settle(held))))
        await held

    async def _apply(self, update: WeightUpdate, staged: list[tuple[str, torch.Tensor]]) -> PoisonedError | None:
        """Put the staged tensors into the model and sample from it again; a failure poisons and is returned."""

        def apply() -> UpdateTimings:
            started = time.monotonic()
            self._engine.load(staged, update.version, update.in_flight)
            load_s = time.monotonic() - started
            return UpdateTimings(load_s=load_s, held_s=self._engine.resume())

        try:
            self._last_timings = await self._in_engine(apply)
        except Exception as error:  # whatever it is, the model may hold a part of the update
            self._session.abort()
            self._engine.call(self._engine.cancel_all)
            return PoisonedError(f"applying version {update.version} failed: {type(error).__name__}: {error}")
        self._session.committed()
        return None

    async def _end_open_update(self) -> None:
        """End the open update, if there is one; a commit that has begun runs to its end first."""
        if self._applying is not None:
            await asyncio.wait([self._applying])
        if self._session.update is not None:
            await self._end_update(self._session.update)

    async def _end_update(self, update: WeightUpdate) -> None:
        """If ``update`` is open, drop what was staged and sample again: nothing was applied before a commit."""
        if self._session.update is not update:
            return
        self._stop_lease()
        self._staged = []
        if self._session.state is EndpointState.UPDATING:
            self._lose_group()  # a receive may be pending on it in a thread
        self._session.abort()
        if self._held is not None:
            _settle(self._held)
        if self._session.state is not EndpointState.POISONED:
            await self._in_engine(self._engine.resume)

    def _lose_group(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._session.group_lost()
        if receiver is not None:
            receiver.abort()

    async def _in_engine(self, command: Callable[[], T]) -> T:
        """Return what ``command`` returns in the engine's thread; it runs even if the caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._engine.call(command)))

    def _renew_lease(self, update: WeightUpdate) -> None:
        self._stop_lease()

        def end() -> None:
            self._ending = asyncio.ensure_future(self._end_update(update))

        self._lease = asyncio.get_running_loop().call_later(update.lease_s, end)

    def _stop_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    # ------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """See `InferenceEndpoint.generate`. Cancelling the call ends the request between two token steps."""
        self._session.refuse_if_poisoned()
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[list[Completion]] = loop.create_future()

        def settle(completions: list[Completion]) -> None:
            if not finished.done():
                finished.set_result(completions)

        admitted, submitted = self._engine.submit(
            request, lambda completions: _call_in(loop, lambda: settle(completions))
        )
        try:
            await asyncio.wrap_future(submitted)
            completions = await finished
        except asyncio.CancelledError:
            self._engine.call(lambda: self._engine.cancel(admitted))
            raise
        for completion in completions:
            self._refuse_non_finite(completion.logprobs)
        return GenerateResponse.model_construct(request_id=request.request_id, completions=tuple(completions))

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        """See `StreamingEndpoint.generate_stream`. One chunk per token; closing the iterator ends the request."""
        self._session.refuse_if_poisoned()
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[CompletionChunk | None] = asyncio.Queue()
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
                version=sequence.spans[-1][0] if sequence.spans else self._session.version,
                finish_reason=sequence.finish_reason,
            )
            _call_in(loop, lambda: chunks.put_nowait(chunk))

        admitted, submitted = self._engine.submit(
            request, lambda _: _call_in(loop, lambda: chunks.put_nowait(None)), on_token
        )
        try:
            await asyncio.wrap_future(submitted)
            while (chunk := await chunks.get()) is not None:
                self._refuse_non_finite(chunk.logprobs)
                yield chunk
        finally:
            self._engine.call(lambda: self._engine.cancel(admitted))

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """See `InferenceEndpoint.chat_completion`."""
        generate_request = self.chat_request(request)
        response = await self.generate(generate_request)
        return chat_completion_of(self._chat_format(), request, generate_request, response)

    async def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """See `StreamingEndpoint.chat_completion_stream`."""
        generate_request = self.chat_request(request)
        if request.logprobs:
            raise InvalidRequestError("logprobs=true cannot be streamed; every chunk carries token_logprobs")
        writer = ChatChunkWriter(self._chat_format(), request)
        async for chunk in self.generate_stream(generate_request):
            yield writer.write(chunk)

    def chat_request(self, request: ChatCompletionRequest) -> GenerateRequest:
        """Return the token-in request that a chat request is rendered to."""
        if request.model != self._name:
            raise InvalidRequestError(f"model {request.model!r} is not served here, {self._name!r} is")
        return self._chat_format().render(request)

    def _refuse_non_finite(self, logprobs: Iterable[float]) -> None:
        if not all(map(math.isfinite, logprobs)):
            raise NonFiniteError(
                f"sampled logprobs are not finite: the weights served now (version {self._session.version}) or before "
                "are broken; publish whole ones"
            )

    def _chat_format(self) -> ChatFormat:
        if self._chat is None:
            raise UnsupportedError("this model has no chat template; use /v1/generate with token ids")
        return self._chat

    async def aclose(self) -> None:
        """Abort what is running and end the engine."""
        self._stop_lease()
        if self._receiver is not None:
            self._receiver.abort()
        await run_abandonable(self._engine.close, "inflight-close")


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(call)
