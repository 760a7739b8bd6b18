"""An `InferenceEndpoint` over HTTP, for any server that speaks the contract. Knows nothing of engines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import pydantic

from inflight.contracts import StreamingEndpoint
from inflight.errors import InflightError, ProtocolError, error_from_code
from inflight.http import routes
from inflight.http.bodies import message_of
from inflight.http.connection import MAX_RESPONSE_BYTES, HttpConnection
from inflight.http.routes import Route
from inflight.wire import (
    Acknowledgement,
    BucketTransfer,
    Capabilities,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    CompletionChunk,
    ErrorBody,
    GenerateRequest,
    GenerateResponse,
    Health,
    SamplingParams,
    TransportSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
    WireModel,
)

Response = TypeVar("Response", bound=WireModel)

_MAX_EVENT_BYTES = 1024 * 1024
_SLACK_S = 5.0
"""How much longer than the server's own deadline the client waits, so that the server's reason arrives."""


class HttpEndpoint(StreamingEndpoint):
    """One inference server at ``url``.

    ``token`` is sent to control routes only. ``control_timeout_s`` bounds each control call that carries no deadline of
    its own, ``generate_timeout_s`` each generation; a commit may take the time that its update was given. An answer
    that is longer than what was asked for can be, or than ``max_response_bytes``, raises `ProtocolError`. An instance
    belongs to the event loop in which it is first used.
    """

    def __init__(
        self,
        url: str,
        *,
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
        self._http = HttpConnection(self._url, max_response_bytes=max_response_bytes)

    def __repr__(self) -> str:
        return f"HttpEndpoint({self._url!r})"

    @property
    def name(self) -> str:
        """The server's URL."""
        return self._url

    async def capabilities(self) -> Capabilities:
        return await self._call(routes.CAPABILITIES, None, Capabilities, self._control_timeout_s)

    async def init_process_group(self, spec: TransportSpec) -> None:
        await self._send(routes.INIT_PROCESS_GROUP, spec, spec.timeout_s + _SLACK_S)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        self._commit_timeout_s = max(self._control_timeout_s, update.deadline_s + update.lease_s)
        await self._send(routes.REQUEST_WEIGHT_UPDATE, update, update.deadline_s + _SLACK_S)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        await self._send(routes.RECEIVE_WEIGHTS, bucket, bucket.timeout_s + _SLACK_S)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        return await self._call(routes.COMMIT_WEIGHT_UPDATE, ref, WeightVersion, self._commit_timeout_s)

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        return await self._call(routes.ABORT_WEIGHT_UPDATE, ref, WeightVersion, self._control_timeout_s)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        return await self._call(
            routes.GENERATE,
            request,
            GenerateResponse,
            self._generate_timeout_s,
            num_tokens=_num_tokens(request.sampling),
        )

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        request = request.model_copy(update={"stream": True})
        async for chunk in self._events(routes.GENERATE, request, CompletionChunk):
            yield chunk

    async def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        request = request.model_copy(update={"stream": True})
        async for chunk in self._events(routes.CHAT_COMPLETIONS, request, ChatCompletionChunk):
            yield chunk

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        return await self._call(
            routes.CHAT_COMPLETIONS,
            request,
            ChatCompletion,
            self._generate_timeout_s,
            num_tokens=_num_tokens(request.sampling()),
        )

    async def weight_version(self) -> WeightVersion:
        return await self._call(routes.WEIGHT_VERSION, None, WeightVersion, self._control_timeout_s)

    async def health(self, timeout_s: float = 5.0) -> Health:
        """Return the server's health; ``ok`` is false while it cannot generate."""
        return await self._call(routes.HEALTH, None, Health, timeout_s, statuses=(200, 503))

    async def aclose(self) -> None:
        """Close the connections; the server goes on."""
        await self._http.aclose()

    async def _send(self, route: Route, body: WireModel, timeout_s: float) -> None:
        await self._call(route, body, Acknowledgement, timeout_s)

    async def _call(
        self,
        route: Route,
        body: WireModel | None,
        answer: type[Response],
        timeout_s: float,
        statuses: tuple[int, ...] = (200,),
        num_tokens: int | None = 0,
    ) -> Response:
        """Return the answer; ``num_tokens`` is how many it may speak of, None if that was left to the server."""
        content = None if body is None else body.model_dump_json()
        bound = MAX_RESPONSE_BYTES
        if num_tokens is not None:  # the prompt comes back from a chat
            bound = route.response_size.bytes_for(num_tokens) + (0 if content is None else 64 * len(content))
        status, received = await self._http.exchange(
            route.method,
            route.path,
            content=content,
            headers=self._headers(route),
            timeout_s=timeout_s,
            max_response_bytes=bound,
        )
        if status not in statuses:
            raise self._error(route, status, received)
        try:
            return await message_of(answer, received)
        except ValueError as error:
            raise ProtocolError(
                f"{route.method} {route.path} answered no {answer.__name__}: {error}", self.name
            ) from error

    async def _events(self, route: Route, body: WireModel, kind: type[Response]) -> AsyncIterator[Response]:
        """Yield the server-sent events of a streamed answer."""
        content, headers = body.model_dump_json(), self._headers(route)
        rest, is_done = bytearray(), False
        parts = self._http.parts(
            route.method,
            route.path,
            content=content,
            headers=headers,
            timeout_s=self._generate_timeout_s,
            on_refusal=lambda status, answer: self._error(route, status, answer),
        )
        async with contextlib.aclosing(parts):
            async for part in parts:
                rest += part
                if len(rest) > _MAX_EVENT_BYTES + len(part):
                    raise ProtocolError(f"the stream has an event of more than {_MAX_EVENT_BYTES} bytes", self.name)
                if b"\n" not in part:
                    continue
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    if line == b"data: [DONE]":
                        is_done = True
                    elif line.startswith(b"data: "):
                        yield self._event(line.removeprefix(b"data: "), kind)
        if not is_done:
            raise ProtocolError(f"{route.method} {route.path} answered a stream that ends early", self.name)

    def _headers(self, route: Route) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if route.control and self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        return headers

    def _event(self, data: bytearray, kind: type[Response]) -> Response:
        try:
            return kind.model_validate_json(data)
        except pydantic.ValidationError as error:
            try:
                detail = ErrorBody.model_validate_json(data).error
            except pydantic.ValidationError:
                text = data[:200].decode(errors="replace")
                raise ProtocolError(f"the stream carries no {kind.__name__}: {text!r}", self.name) from error
            raise error_from_code(detail.code, detail.message, self.name) from None

    def _error(self, route: Route, status: int, content: bytes) -> InflightError:
        try:
            detail = ErrorBody.model_validate_json(content).error
        except pydantic.ValidationError:
            text = content[:200].decode(errors="replace")
            return ProtocolError(f"{route.method} {route.path} answered status {status}: {text!r}", self.name)
        return error_from_code(detail.code, detail.message, self.name)


def _num_tokens(sampling: SamplingParams) -> int | None:
    return None if sampling.max_tokens is None else sampling.n * sampling.max_tokens
