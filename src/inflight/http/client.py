"""An `InferenceEndpoint` over HTTP, for any server that speaks the contract. Knows nothing of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import httpx
import pydantic

from inflight.errors import (
    DeadlineError,
    EndpointError,
    InflightError,
    ProtocolError,
    UnreachableError,
    error_from_code,
)
from inflight.http import routes
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
    ProcessGroupSpec,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
    WireModel,
)

Response = TypeVar("Response", bound=WireModel)

_SLACK_S = 5.0
"""How much longer than the server's own deadline the client waits, so that the server's reason arrives."""


class HttpEndpoint:
    """One inference server at ``url``.

    ``token`` is sent to control routes only. ``control_timeout_s`` bounds each control call that carries no deadline of
    its own, ``generate_timeout_s`` each generation. Answers longer than ``max_response_bytes`` raise `ProtocolError`.
    An instance belongs to the event loop in which it is first used.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        control_timeout_s: float = 30.0,
        generate_timeout_s: float = 600.0,
        max_response_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._control_timeout_s = control_timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._max_response_bytes = max_response_bytes
        # Deadlines are kept around whole calls; idle connections are dropped before a server would do it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=3.0)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits, trust_env=False)

    def __repr__(self) -> str:
        return f"HttpEndpoint({self._url!r})"

    @property
    def name(self) -> str:
        """The server's URL."""
        return self._url

    async def capabilities(self) -> Capabilities:
        """See `InferenceEndpoint.capabilities`."""
        return await self._call(routes.CAPABILITIES, None, Capabilities, self._control_timeout_s)

    async def init_process_group(self, spec: ProcessGroupSpec) -> None:
        """See `InferenceEndpoint.init_process_group`."""
        await self._send(routes.INIT_PROCESS_GROUP, spec, spec.timeout_s + _SLACK_S)

    async def request_weight_update(self, update: WeightUpdate) -> None:
        """See `InferenceEndpoint.request_weight_update`."""
        await self._send(routes.REQUEST_WEIGHT_UPDATE, update, update.deadline_s + _SLACK_S)

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        """See `InferenceEndpoint.receive_weights`."""
        await self._send(routes.RECEIVE_WEIGHTS, bucket, bucket.timeout_s + _SLACK_S)

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.commit_weight_update`."""
        return await self._call(routes.COMMIT_WEIGHT_UPDATE, ref, WeightVersion, self._control_timeout_s)

    async def abort_weight_update(self, ref: UpdateRef) -> WeightVersion:
        """See `InferenceEndpoint.abort_weight_update`."""
        return await self._call(routes.ABORT_WEIGHT_UPDATE, ref, WeightVersion, self._control_timeout_s)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """See `InferenceEndpoint.generate`."""
        return await self._call(routes.GENERATE, request, GenerateResponse, self._generate_timeout_s)

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        """See `StreamingEndpoint.generate_stream`."""
        request = request.model_copy(update={"stream": True})
        async for chunk in self._events(routes.GENERATE, request, CompletionChunk):
            yield chunk

    async def chat_completion_stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        """See `StreamingEndpoint.chat_completion_stream`."""
        request = request.model_copy(update={"stream": True})
        async for chunk in self._events(routes.CHAT_COMPLETIONS, request, ChatCompletionChunk):
            yield chunk

    async def chat_completion(self, request: ChatCompletionRequest) -> ChatCompletion:
        """See `InferenceEndpoint.chat_completion`."""
        return await self._call(routes.CHAT_COMPLETIONS, request, ChatCompletion, self._generate_timeout_s)

    async def weight_version(self) -> WeightVersion:
        """See `InferenceEndpoint.weight_version`."""
        return await self._call(routes.WEIGHT_VERSION, None, WeightVersion, self._control_timeout_s)

    async def health(self, timeout_s: float = 5.0) -> Health:
        """Return the server's health; ``ok`` is false while it cannot generate."""
        return await self._call(routes.HEALTH, None, Health, timeout_s, statuses=(200, 503))

    async def aclose(self) -> None:
        """Close the connections; the server goes on."""
        await self._client.aclose()

    async def _send(self, route: Route, body: WireModel, timeout_s: float) -> None:
        await self._call(route, body, Acknowledgement, timeout_s)

    async def _call(
        self,
        route: Route,
        body: WireModel | None,
        answer: type[Response],
        timeout_s: float,
        statuses: tuple[int, ...] = (200,),
    ) -> Response:
        content = await self._exchange(route, body, timeout_s, statuses)
        try:
            return answer.model_validate_json(content)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise ProtocolError(
                f"{route.method} {route.path} answered no {answer.__name__}: {problem['msg']} at {problem['loc']}",
                self.name,
            ) from error

    async def _exchange(
        self, route: Route, body: WireModel | None, timeout_s: float, statuses: tuple[int, ...]
    ) -> bytes:
        """Return the body of an answer of one of ``statuses``; here and in `_events` lower errors become ours."""
        content = None if body is None else body.model_dump_json()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(
                    route.method, route.path, content=content, headers=self._headers(route)
                ) as response,
            ):
                answer = b"".join([part async for part in self._parts(response)])
        except TimeoutError as error:
            raise self._deadline(route, timeout_s) from error
        except httpx.HTTPError as error:
            raise self._failed(route, error) from error
        if response.status_code not in statuses:
            raise self._error(route, response.status_code, answer)
        return answer

    async def _events(self, route: Route, body: WireModel, kind: type[Response]) -> AsyncIterator[Response]:
        """Yield the server-sent events of a streamed answer."""
        content = body.model_dump_json()
        try:
            async with (
                asyncio.timeout(self._generate_timeout_s),
                self._client.stream(
                    route.method, route.path, content=content, headers=self._headers(route)
                ) as response,
            ):
                if response.status_code != 200:
                    answer = b"".join([part async for part in self._parts(response)])
                    raise self._error(route, response.status_code, answer)
                rest, is_done = b"", False
                async for part in self._parts(response):
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        if line == b"data: [DONE]":
                            is_done = True
                        elif line.startswith(b"data: "):
                            yield self._event(line.removeprefix(b"data: "), kind)
                if not is_done:
                    raise ProtocolError(f"{route.method} {route.path} answered a stream that ends early", self.name)
        except TimeoutError as error:
            raise self._deadline(route, self._generate_timeout_s) from error
        except httpx.HTTPError as error:
            raise self._failed(route, error) from error

    async def _parts(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Yield the body piece by piece, up to the bound."""
        size_bytes = 0
        async for part in response.aiter_bytes():
            size_bytes += len(part)
            if size_bytes > self._max_response_bytes:
                raise ProtocolError(f"the answer is longer than {self._max_response_bytes} bytes", self.name)
            yield part

    def _headers(self, route: Route) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if route.control and self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        return headers

    def _event(self, data: bytes, kind: type[Response]) -> Response:
        try:
            return kind.model_validate_json(data)
        except pydantic.ValidationError as error:
            try:
                detail = ErrorBody.model_validate_json(data).error
            except pydantic.ValidationError:
                text = data[:200].decode(errors="replace")
                raise ProtocolError(f"the stream carries no {kind.__name__}: {text!r}", self.name) from error
            raise error_from_code(detail.code, detail.message, self.name) from None

    def _deadline(self, route: Route, timeout_s: float) -> EndpointError:
        return DeadlineError(f"{route.method} {route.path} gave no answer within {timeout_s:g} s", self.name)

    def _failed(self, route: Route, error: httpx.HTTPError) -> EndpointError:
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        # A connection that was closed early is a RemoteProtocolError too; nothing but its text tells it apart.
        is_closed = "closed" in str(error) or "disconnected" in str(error)
        if isinstance(error, httpx.DecodingError) or (isinstance(error, httpx.RemoteProtocolError) and not is_closed):
            return ProtocolError(f"{route.method} {route.path} answered no HTTP ({cause})", self.name)
        return UnreachableError(f"{route.method} {route.path} failed ({cause}); is the server running?", self.name)

    def _error(self, route: Route, status: int, content: bytes) -> InflightError:
        try:
            detail = ErrorBody.model_validate_json(content).error
        except pydantic.ValidationError:
            text = content[:200].decode(errors="replace")
            return ProtocolError(f"{route.method} {route.path} answered status {status}: {text!r}", self.name)
        return error_from_code(detail.code, detail.message, self.name)
