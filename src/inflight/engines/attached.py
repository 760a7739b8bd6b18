"""The base class of endpoints that call an engine's own server: attaching, the version label, aborts and chat."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from inflight.base.requirements import require
from inflight.base.tasks import TaskOwner
from inflight.engines.detached_calls import AttachOnce
from inflight.engines.requests import RequestGate
from inflight.engines.routes import EngineRoutes
from inflight.engines.streams import TokenStream
from inflight.engines.timings import LastUpdate
from inflight.engines.version_labels import ServedVersion, parse_label
from inflight.errors import InflightError, UnsupportedError
from inflight.http.chat import chat_completion_of, check_chat, generate_request_of
from inflight.http.streamed_text import chat_chunks_of
from inflight.wire import (
    AbortRequests,
    Capabilities,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionChunk,
    GenerateRequest,
    GenerateResponse,
    Needs,
    PromptImage,
    SamplingParams,
    TransportSpec,
    WeightVersion,
)

if TYPE_CHECKING:
    from inflight.weights.receive.receiver import UpdateReceiver
    from inflight.weights.receive.releasing import MemoryRelease


class AttachedEndpoint(ABC):
    """One engine's server, called through ``routes``. Its route ``label_path`` returns the label of the weights.

    A subclass lists `ReceivingEndpoint`, `AbortingEndpoint` and `ReleasingEndpoint` as base classes after this one.

    An instance belongs to the event loop in which it is first used. Its state is read from the server, so other
    instances may publish to the same server, and a replaced server is detected. Closing waits up to ``close_s`` seconds
    for calls in progress.
    """

    _release_arguments: Sequence[str]
    """See `EngineKind.release_arguments`."""

    def __init__(self, routes: EngineRoutes, *, label_path: str, close_s: float) -> None:
        self._routes = routes
        self._label_path = label_path
        self._close_s = close_s
        self._gate = RequestGate()
        self._background = TaskOwner()
        self._last = LastUpdate()
        self._attaching = AttachOnce(self._attach)
        self._was_replaced = False
        # Set by `_attach`:
        self._updates: UpdateReceiver
        self._memory: MemoryRelease

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        return self._routes.url

    @abstractmethod
    async def _attach(self) -> Capabilities:
        """Set ``_updates`` and return the server's capabilities.

        Raises `ConfigError` if the server was not started correctly.
        """

    def _is_torn(self, served: ServedVersion) -> bool:
        """Return whether the weights are torn, given the server's parsed label."""
        return served.torn

    async def capabilities(self) -> Capabilities:
        """Return the server's capabilities. Raises `ConfigError` if the server was not started correctly."""
        return await self._attaching.result()

    async def receiver(self) -> UpdateReceiver:
        await self.capabilities()
        return self._updates

    async def init_process_group(self, spec: TransportSpec) -> None:
        """Form the group, after aborting any update that another client left open on the server."""
        await (await self.receiver()).join(spec)
        await self._refresh_label()
        self._was_replaced = False  # the group just formed belongs to the process that answers now

    async def _refresh_label(self, timeout_s: float | None = None) -> str:
        """Return the server's label for its weights.

        Also adopt the state that the label describes, unless this instance may have changed the weights since the
        request.
        """
        session, num_changes = self._updates.session, self._updates.session.num_changes
        label = str((await self._routes.get(self._label_path, timeout_s))["weight_version"])
        served = parse_label(label)
        if session.update is None and num_changes == session.num_changes:
            if session.run_id is not None and served.run_id is None:  # a new process, with its checkpoint
                self._was_replaced, self._last.timings = True, None
            session.adopt_report(
                served.version,
                served.run_id,
                torn=self._is_torn(served),
                released=served.released,
                session_id=served.session_id,
            )
        return label

    async def _label(self, timeout_s: float | None = None) -> str:
        """Return the server's label for its weights.

        Raises the same errors as `UpdateStateMachine.refuse_to_sample`.
        """
        label = await self._refresh_label(timeout_s)
        self._updates.session.refuse_to_sample()
        return label

    async def release_memory(self) -> WeightVersion:
        await (await self._memory_release()).release()
        return await self.weight_version()

    async def restore_memory(self) -> WeightVersion:
        await (await self._memory_release()).restore()
        return await self.weight_version()

    async def _memory_release(self) -> MemoryRelease:
        if not (await self.capabilities()).releases_memory:
            raise UnsupportedError(
                f"{self.name} was started without {' '.join(self._release_arguments)}, which need a GPU, so it "
                "cannot release its memory; restart it with them"
            )
        await self._refresh_label()
        return self._memory

    @abstractmethod
    def _check_sampling(self, sampling: SamplingParams, can: Capabilities) -> None:
        """Raise `UnsupportedError` if the server does not support these sampling parameters, whatever the prompt."""

    @abstractmethod
    async def weight_version(self) -> WeightVersion: ...

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResponse: ...

    def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Yield chunks; closing the iterator ends the request. Raises `UnsupportedError` without streaming support."""
        stream = TokenStream(request, lambda: self._updates.session.version)

        async def sample() -> None:
            require(await self.capabilities(), Needs(streaming=True), "this endpoint")
            for index, item in enumerate(await self._stream(request, stream)):
                if item is None:  # aborted before any token
                    stream.add(index, (), (), (), "abort")

        return stream.read(sample)

    @abstractmethod
    async def _stream(self, request: GenerateRequest, stream: TokenStream) -> Sequence[object]:
        """Add the tokens that the server samples to ``stream``. Return the result of `RequestGate.sample`."""

    async def abort_requests(self, requests: AbortRequests) -> None:
        """End requests that this instance has sent; ids are unique only among one caller's requests."""
        require(await self.capabilities(), Needs(partial_rollouts=True), self.name)
        await self._gate.abort(requests.request_ids, self._end)

    @abstractmethod
    async def _end(self, names: Sequence[str]) -> None:
        """Ask the server to end the completions with these names; see `inflight.engines.requests.SentRequest`."""

    @abstractmethod
    async def _render(self, request: ChatCompletionRequest) -> tuple[Sequence[int], Sequence[PromptImage]]:
        """Return the messages as token ids, with their images.

        Raises `InvalidRequestError` if the messages are refused.
        """

    @abstractmethod
    async def _decode(self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> Sequence[str]:
        """Return the text of each token sequence."""

    async def _rendered(self, request: ChatCompletionRequest, *, streamed: bool) -> GenerateRequest:
        """Return the request with its messages as token ids, after checking all of its options."""
        can = await self.capabilities()
        check_chat(request, can, streamed=streamed)
        self._check_sampling(request.sampling(), can)
        return generate_request_of(request, *await self._render(request))

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Render the messages and decode the tokens on the server."""
        generate_request = await self._rendered(request, streamed=False)
        response = await self.generate(generate_request)
        sampled = [completion.token_ids for completion in response.completions]
        texts = await self._decode(sampled, True)
        pieces = [await self._decode([[token_id] for token_id in ids], False) for ids in sampled if request.logprobs]
        return chat_completion_of(request, generate_request, response, texts, pieces)

    async def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncGenerator[ChatCompletionChunk, None]:
        generate_request = await self._rendered(request, streamed=True)

        async def decode(token_ids: Sequence[int]) -> str:
            (text,) = await self._decode([token_ids], True)
            return text

        chunks = chat_chunks_of(request, self.generate_stream(generate_request), decode)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def aclose(self) -> None:
        """Close the endpoint. First end any open update, so that the server does not stay paused."""
        if self._attaching.has_succeeded:
            if (update := self._updates.session.update) is not None:
                with contextlib.suppress(InflightError):
                    await self._updates.abort(update.ref)
            await self._updates.aclose()
        await self._attaching.aclose()
        await self._background.aclose(self._close_s)
        await self._routes.aclose()
