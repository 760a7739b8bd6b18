"""The Protocols of an inference endpoint and of its optional capabilities."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from inflight.types import EngineStats
from inflight.wire import (
    AbortRequests,
    BucketTransfer,
    Capabilities,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionChunk,
    DraftHistory,
    GenerateRequest,
    GenerateResponse,
    ScoreRequest,
    ScoreResponse,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)


@runtime_checkable
class InferenceEndpoint(Protocol):
    """An inference server: these methods are all that inflight needs.

    docs/contract.md contains the table of its states. If an update fails after its first byte was applied, the state is
    POISONED: `generate` raises `PoisonedError` until an update completes or the server restarts. If an update has a
    ``session_id``, its calls are idempotent. Every method may raise `UnreachableError`, `DeadlineError` or
    `ProtocolError`; the state is then unknown.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of this endpoint in reports and errors: its URL, or a name that is unique in the process."""

    @abstractmethod
    async def capabilities(self) -> Capabilities:
        """Return this endpoint's capabilities, which never change while this object exists."""

    @abstractmethod
    async def init_process_group(self, spec: TransportSpec) -> None:
        """Leave any earlier group and join the one that ``spec`` describes; returns when all ranks have joined.

        The sender joins concurrently. From then on the endpoint accepts updates only from the run that owns the group.
        Raises `TransferError` if the group is not formed within ``spec.timeout_s`` seconds; the endpoint then belongs
        to no group and serves as before. Raises `FencedError` if a later incarnation of the run's trainer has already
        called this endpoint.
        """

    @abstractmethod
    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Accept an update and, unless it is staged, pause sampling as ``update.in_flight`` specifies.

        If sampling is paused, no token is being sampled on return. Raises `UpdateRefusedError` if the manifest does not
        fit the model, the version is not newer, the run does not own the group, another update is open, or the drain
        does not end within ``update.deadline_s`` seconds: the old weights are still served, and nothing may be sent.
        """

    @abstractmethod
    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """Receive one bucket while the sender sends it, and verify its checksum. Buckets arrive in order.

        Raises `TransferError` if the transfer fails, and `UpdateRefusedError` if the bucket's update is not open. See
        `abort_weight_update` for what the endpoint then serves.
        """

    @abstractmethod
    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """Switch to the new weights and resume: every later token is sampled from ``ref.version``.

        A staged update pauses sampling here, as ``in_flight`` specifies. Raises `UpdateRefusedError` if buckets are
        missing, or if a drain does not end in time: the update has then ended, and the old weights are still served.
        Raises `PoisonedError` if applying the weights fails.
        """

    @abstractmethod
    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """End the update. If none of its bytes was applied, the old weights are still served (READY).

        Otherwise the state is POISONED. Idempotent: if no update is open, the call only returns the current version.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Return the completions of one prompt, with token ids, behaviour logprobs, version spans and finish reasons.

        Raises `InvalidRequestError` if the prompt does not fit in the model's context. Cancelling the call ends the
        request on the endpoint.
        """

    @abstractmethod
    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Return a completion in the OpenAI format, with token ids, logprobs and version spans.

        Raises `UnsupportedError` if chat is not supported.
        """

    @abstractmethod
    async def weight_version(self) -> WeightVersion:
        """Return the version of the served weights, and the endpoint's state."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release this object's resources; a remote server keeps running. Called last.

        If a context manager made the endpoint, the manager exits after this call.
        """


@runtime_checkable
class StreamingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that supports ``streaming``."""

    @abstractmethod
    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        """Yield tokens as they are sampled; the last chunk of each completion carries its finish reason."""

    @abstractmethod
    def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """Yield text as it is sampled, in the OpenAI format. Raises `UnsupportedError` if chat is not supported."""


@runtime_checkable
class AbortingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that supports ``partial_rollouts``."""

    @abstractmethod
    async def abort_requests(self, requests: AbortRequests) -> None:
        """End these requests: each `generate` call returns what it has sampled so far.

        Unfinished completions have the finish reason ``abort``; a completion without tokens has no version span. Ids of
        requests that are not running are ignored. Returns once no further token of these requests will be sampled. If
        an update has paused sampling, an engine may wait for the end of the pause before it returns.
        """


@runtime_checkable
class ReleasingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that supports ``releases_memory``. Repeating either call changes nothing."""

    @abstractmethod
    async def release_memory(self) -> WeightVersion:
        """Release the memory of the weights and the KV cache to other processes; on return the state is RELEASED.

        The endpoint keeps its weights elsewhere, under the same version, and discards cached prefixes. Raises
        `BusyError` if requests are running or waiting, or an update is open, and `PoisonedError` if the state is
        POISONED; in both cases nothing has changed. After any other error, the state may be RELEASED: call
        `restore_memory`.
        """

    @abstractmethod
    async def restore_memory(self) -> WeightVersion:
        """Reacquire the memory; on return the weights from before the release are served again.

        Raises `EndpointError` if the memory cannot be allocated; the state is then still RELEASED.
        """


@runtime_checkable
class DraftingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that supports ``drafts``."""

    @abstractmethod
    async def record_history(self, history: DraftHistory) -> None:
        """Remember finished completions, from which later requests with the same prompts are drafted.

        Replaces the earlier history of these prompts. Raises `UnsupportedError` if drafts are not supported.
        """


@runtime_checkable
class ScoringEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that supports ``scoring``."""

    @abstractmethod
    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Return the logprobs of given tokens under the served weights.

        Nothing that was cached under other weights is used. Raises `InvalidRequestError` if the request does not fit in
        the model's context, and `UnsupportedError` if it asks for more than ``max_top_k`` of the most likely tokens, or
        for candidates from an endpoint that does not support them. Cancelling the call ends the request on the
        endpoint.
        """


@runtime_checkable
class CountingEndpoint(Protocol):
    """An endpoint whose engine runs in this process and keeps counters."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the counters that the route ``/metrics`` reports."""
