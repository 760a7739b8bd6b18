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

    docs/contract.md has the table of its states. A failure after the first byte was applied leads to POISONED, where
    `generate` raises `PoisonedError` until a complete update or a restart. Calls of an update whose session has a name
    are idempotent. Every method may raise `UnreachableError`, `DeadlineError` or `ProtocolError`, after which the state
    is unknown.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of this endpoint in reports and errors: its URL, or a name that is unique in the process."""

    @abstractmethod
    async def capabilities(self) -> Capabilities:
        """Return this endpoint's capabilities, which never change while it exists."""

    @abstractmethod
    async def init_process_group(self, spec: TransportSpec) -> None:
        """Leave any earlier group and receive weights as ``spec`` specifies; returns when all ranks have joined.

        The sender joins concurrently. From now on the endpoint accepts updates only from the run that owns the group.
        Raises `TransferError` if the group is not formed within ``spec.timeout_s`` seconds. The endpoint then belongs
        to no group and serves as before. Raises `FencedError` if a later incarnation of the run's trainer has called.
        """

    @abstractmethod
    async def request_weight_update(self, update: WeightUpdate) -> None:
        """Accept an update and pause sampling as ``update.in_flight`` specifies; on return no token is being sampled.

        If the update is staged, sampling continues. Raises `UpdateRefusedError` if the manifest does not fit
        the model, the version is not newer, the run does not own the group, another update is open, or the drain did
        not end before ``update.deadline_s``: the old weights keep being served and nothing may be sent.
        """

    @abstractmethod
    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """Receive one bucket, while the sender sends it, and compare its checksum. Buckets come in order.

        Raises `TransferError`, or `UpdateRefusedError` if no such update is open; `abort_weight_update` states what the
        endpoint serves then.
        """

    @abstractmethod
    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """Switch to the new weights and resume: every later token is sampled from ``ref.version``.

        A staged update pauses sampling here, as ``in_flight`` specifies. Raises `UpdateRefusedError` if buckets are
        missing, or if a drain does not end in time: the update has then ended and the old weights keep being served.
        Raises `PoisonedError` if applying the weights fails.
        """

    @abstractmethod
    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """End the update. If no byte was applied, the old weights keep being served (READY); otherwise POISONED.

        Idempotent: without an open update it returns the current version.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Return the completions of one prompt: token ids, behaviour logprobs, version spans, finish reason.

        Raises `InvalidRequestError` if the prompt does not fit. Cancelling the call ends the request on the endpoint.
        """

    @abstractmethod
    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """Return a completion in the OpenAI format, with token ids, logprobs and version spans.

        Raises `UnsupportedError` if chat is not supported.
        """

    @abstractmethod
    async def weight_version(self) -> WeightVersion:
        """Return the version of the served weights, and the state."""

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
        """End these requests: each `generate` returns what it has sampled so far.

        Unfinished completions receive the finish reason ``abort``; without any token, they have no span. Ids that are
        not running are ignored. Returns once no further token of these requests will be sampled, which an engine may
        delay until the pause of an update ends.
        """


@runtime_checkable
class ReleasingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that supports ``releases_memory``. Both calls may be repeated, and then change nothing."""

    @abstractmethod
    async def release_memory(self) -> WeightVersion:
        """Release the memory of weights, keys and values for other processes; on return the state is RELEASED.

        The endpoint keeps its weights elsewhere, under the same version, and forgets cached prefixes. Raises
        `BusyError` if requests run or wait, or an update is open, and `PoisonedError` if the weights are torn: nothing
        changed. After any other error the state may be RELEASED, which `restore_memory` ends.
        """

    @abstractmethod
    async def restore_memory(self) -> WeightVersion:
        """Reacquire the memory; on return the weights from before the release are served again.

        Raises `EndpointError` if the memory cannot be allocated: the state is still RELEASED.
        """


@runtime_checkable
class DraftingEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that supports ``drafts``."""

    @abstractmethod
    async def record_history(self, history: DraftHistory) -> None:
        """Remember finished completions, from which later requests with these prompts are drafted.

        Replaces the earlier history of those prompts. Raises `UnsupportedError` if drafts are not supported.
        """


@runtime_checkable
class ScoringEndpoint(InferenceEndpoint, Protocol):
    """An endpoint that supports ``scoring``."""

    @abstractmethod
    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Return the logprobs of given tokens under the served weights.

        Nothing that was cached under other weights is used. Raises `InvalidRequestError` if the request does not fit,
        and `UnsupportedError` if it asks for more of the most likely tokens than ``max_top_k``, or for candidates where
        they are not supported. Cancelling the call ends the request on the endpoint.
        """


@runtime_checkable
class CountingEndpoint(Protocol):
    """An endpoint whose engine runs in this process and keeps counters."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the counters that the route ``/metrics`` reports."""
