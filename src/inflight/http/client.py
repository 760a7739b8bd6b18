"""An `InferenceEndpoint` over HTTP, for any server that implements the contract."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pydantic

from inflight.base.transfer_time import MOVE_S
from inflight.contracts import (
    AbortingEndpoint,
    DraftingEndpoint,
    ReleasingEndpoint,
    ScoringEndpoint,
    StreamingEndpoint,
)
from inflight.errors import InflightError, ProtocolError, UnauthorizedError, error_from_code
from inflight.http import routes
from inflight.http.bodies import message_of
from inflight.http.bounded_client import MAX_RESPONSE_BYTES, BoundedClient
from inflight.http.routes import Response, Route
from inflight.http.tokens import TOKEN_VARIABLE
from inflight.wire import (
    AbortRequests,
    BucketTransfer,
    Capabilities,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionChunk,
    DraftHistory,
    ErrorBody,
    GenerateRequest,
    GenerateResponse,
    Health,
    SamplingParams,
    ScoreRequest,
    ScoreResponse,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
    WireModel,
)

_SLACK_S = 5.0
"""Extra seconds that the client waits beyond the server's deadline, so that the server's own error arrives."""
_TOKEN_HINT = f". Pass the server's token as token=, or to a command with --token-file or ${TOKEN_VARIABLE}"


class HttpEndpoint(StreamingEndpoint, AbortingEndpoint, ReleasingEndpoint, DraftingEndpoint, ScoringEndpoint):
    """One inference server at ``url``.

    ``client`` sends the requests, with its headers, authentication and proxies but without its timeouts, and is not
    closed. Without one, the endpoint keeps its own connections and ignores the environment's proxy settings. ``token``
    is sent with control and generation requests. ``control_timeout_s`` limits each control call that has no deadline of
    its own, and ``generate_timeout_s`` each generation; a commit may take as long as its update's deadline and lease
    together. A response that is longer than the request allows, or longer than ``max_response_bytes``, raises
    `ProtocolError`. An instance belongs to the event loop in which it is first used.
    """

    def __init__(
        self,
        url: str,
        *,
        client: httpx.AsyncClient | None = None,
        token: str | None = None,
        control_timeout_s: float = 30.0,
        generate_timeout_s: float = 600.0,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._control_timeout_s = control_timeout_s
        self._commit_timeout_s = control_timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._http = BoundedClient(self._url, client=client, max_response_bytes=max_response_bytes)

    def __repr__(self) -> str:
        return f"HttpEndpoint({self._url!r})"

    @property
    def name(self) -> str:
        return self._url

    async def capabilities(self) -> Capabilities:
        return await self._call(routes.CAPABILITIES, None, self._control_timeout_s)

    async def init_process_group(self, spec: TransportSpec) -> None:
        await self._call(routes.INIT_PROCESS_GROUP, spec, spec.timeout_s + _SLACK_S)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        self._commit_timeout_s = max(self._control_timeout_s, update.deadline_s + update.lease_s)
        await self._call(routes.REQUEST_WEIGHT_UPDATE, update, update.deadline_s + _SLACK_S)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        await self._call(routes.RECEIVE_WEIGHTS, bucket, bucket.timeout_s + _SLACK_S)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        return await self._call(routes.COMMIT_WEIGHT_UPDATE, ref, self._commit_timeout_s)

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        return await self._call(routes.ABORT_WEIGHT_UPDATE, ref, self._control_timeout_s)

    async def abort_requests(self, requests: AbortRequests) -> None:
        await self._call(routes.ABORT_REQUESTS, requests, self._control_timeout_s)

    async def release_memory(self) -> WeightVersion:
        return await self._call(routes.RELEASE_MEMORY, None, MOVE_S)

    async def restore_memory(self) -> WeightVersion:
        return await self._call(routes.RESTORE_MEMORY, None, MOVE_S)

    async def record_history(self, history: DraftHistory) -> None:
        await self._call(routes.RECORD_HISTORY, history, self._control_timeout_s)

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        num_logprobs = request.num_scored * (1 + request.top_k + request.num_candidates)
        return await self._call(routes.SCORE, request, self._generate_timeout_s, num_tokens=num_logprobs)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        num_tokens = _num_tokens(request.sampling)
        num_routed = request.sampling.n * len(request.prompt_token_ids) + (num_tokens or 0)
        return await self._call(
            routes.GENERATE,
            request,
            self._generate_timeout_s,
            num_tokens=num_tokens,
            num_routed=num_routed if request.routed_experts else 0,
        )

    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        return self._events(routes.GENERATE, request.model_copy(update={"stream": True}), CompletionChunk)

    def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        return self._events(routes.CHAT_COMPLETIONS, request.model_copy(update={"stream": True}), ChatCompletionChunk)

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        num_tokens = _num_tokens(request.sampling())
        return await self._call(routes.CHAT_COMPLETIONS, request, self._generate_timeout_s, num_tokens=num_tokens)

    async def weight_version(self) -> WeightVersion:
        return await self._call(routes.WEIGHT_VERSION, None, self._control_timeout_s)

    async def health(self, timeout_s: float = 5.0) -> Health:
        """Return the server's health; ``ok`` is false while the server cannot generate."""
        return await self._call(routes.HEALTH, None, timeout_s, statuses=(200, 503))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _call(
        self,
        route: Route[Response],
        body: WireModel | None,
        timeout_s: float,
        statuses: tuple[int, ...] = (200,),
        num_tokens: int | None = 0,
        num_routed: int = 0,
    ) -> Response:
        """Return the response, which may have at most ``num_tokens`` tokens, or any number if that is None.

        ``num_routed`` is the number of tokens whose experts are returned.
        """
        content = None if body is None else body.model_dump_json()
        bound = MAX_RESPONSE_BYTES
        if num_tokens is not None:  # a chat response contains the prompt, in which an image is few tokens
            asked = 0 if content is None else len(content) - _length_of_images(body)
            bound = route.response_size.bytes_for(num_tokens, num_routed=num_routed) + 64 * asked
        status, received = await self._http.request(
            route.method,
            route.path,
            content=content,
            headers=self._headers(),
            timeout_s=timeout_s,
            max_response_bytes=bound,
        )
        if status not in statuses:
            raise self._error(route, status, received)
        assert route.response is not None  # no method calls a route that answers with text
        try:
            return await message_of(route.response, received)
        except ValueError as error:
            raise ProtocolError(
                f"the response to {route.method} {route.path} is not a valid {route.response.__name__}: {error}",
                self.name,
            ) from error

    async def _events(self, route: Route[Any], body: WireModel, kind: type[Response]) -> AsyncIterator[Response]:
        """Yield the server-sent events of a streamed answer."""
        events = self._http.events(
            route.method,
            route.path,
            content=body.model_dump_json(),
            headers=self._headers(),
            timeout_s=self._generate_timeout_s,
            on_refusal=lambda status, answer: self._error(route, status, answer),
        )
        async with contextlib.aclosing(events):
            async for data in events:
                yield self._event(data, kind)

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self._token is not None:  # even where it is not required: any call with the token renews a server's lease
            headers["authorization"] = f"Bearer {self._token}"
        return headers

    def _event(self, data: bytearray, kind: type[Response]) -> Response:
        try:
            return kind.model_validate_json(data)
        except pydantic.ValidationError as error:
            raise self._error_in(data, f"the stream contains an event that is not a valid {kind.__name__}") from error

    def _error(self, route: Route[Any], status: int, content: bytes) -> InflightError:
        return self._error_in(content, f"{route.method} {route.path} answered status {status}")

    def _error_in(self, content: bytes | bytearray, otherwise: str) -> InflightError:
        """Return the error in an `ErrorBody`; for other content, a `ProtocolError` that begins with ``otherwise``."""
        try:
            detail = ErrorBody.model_validate_json(content).error
        except pydantic.ValidationError:
            return ProtocolError(f"{otherwise}: {content[:200].decode(errors='replace')!r}", self.name)
        hint = _TOKEN_HINT if detail.code == UnauthorizedError.code else ""
        return error_from_code(detail.code, f"{detail.message}{hint}", self.name)


def _num_tokens(sampling: SamplingParams) -> int | None:
    return None if sampling.max_tokens is None else sampling.n * sampling.max_tokens


def _length_of_images(body: WireModel | None) -> int:
    """Return the total length of the image data URLs in a message, in characters."""
    match body:
        case GenerateRequest():
            return sum(len(image.url) for image in body.images)
        case ChatCompletionRequest():
            return sum(len(url) for message in body.messages for url in message.image_urls)
    return 0
