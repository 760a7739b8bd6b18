"""The recording proxy as a Starlette application: agents play episodes through OpenAI's or Anthropic's API.

Each episode has a secret key, in the path (``/e/KEY/v1/...``) or as the API key. Errors have Anthropic's format under
``/v1/messages``, and OpenAI's elsewhere. If a client disconnects, its request ends and is not recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from inflight.base.tasks import EndedByOwnerError, TaskOwner, cancel_and_wait, start
from inflight.environments.playing import PlayingEpisode
from inflight.environments.proxy.answers import Answer, AnswerPiece, Answers
from inflight.environments.proxy.formats import AnswerFormat, error_json, format_of
from inflight.environments.proxy.messages import MessagesFormat, MessagesRequest, as_messages_error
from inflight.environments.proxy.requests import (
    ChatRequest,
    CompletionRequest,
    ProxyGenerateRequest,
    Request,
    RewardRequest,
)
from inflight.environments.proxy.response_items import ResponsesFormat
from inflight.environments.proxy.responses import ResponsesRequest
from inflight.errors import (
    EpisodeOverError,
    InflightError,
    InvalidRequestError,
    UnauthorizedError,
    UnsupportedError,
)
from inflight.http.bodies import message_of
from inflight.http.incoming_requests import content_of, run_while_connected
from inflight.http.routes import MB, Size
from inflight.wire import MAX_IMAGES_LENGTH

T = TypeVar("T")
_QUIET_S = 10.0
"""Seconds without an event after which a stream sends a comment."""
Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[HttpRequest, "ServedEpisode"], Awaitable[Response]]

_BODY = Size(MB, 64, MAX_IMAGES_LENGTH)
"""Limit of a request body: 64 bytes of JSON contain at least one token, except in runs of white space."""
_REWARD = Size(64 * 1024)
_OVERRIDDEN = "x-inflight-overridden"


@dataclass(eq=False)
class ServedEpisode:
    """An episode that clients reach by its key."""

    answers: Answers
    model: str
    """Name of the served model."""
    running: TaskOwner = field(default_factory=TaskOwner)
    is_over: bool = False
    last_used: float = field(default_factory=time.monotonic)
    """When the episode was opened, or when its last request arrived or ended."""

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call. Raises `EpisodeOverError` if the episode ends first."""
        try:
            return await self.running.run(call)
        except EndedByOwnerError:
            raise EpisodeOverError("the episode has ended") from None
        finally:
            self.last_used = time.monotonic()

    def end(self) -> None:
        """End all requests that are being answered."""
        self.is_over = True
        self.running.cancel()


class ServedEpisodes:
    """The episodes that one proxy serves, by key."""

    def __init__(self) -> None:
        # Keys are looked up by digest, so that the time of a lookup reveals nothing about a key.
        self._episodes: dict[bytes, ServedEpisode] = {}

    def __len__(self) -> int:
        return len(self._episodes)

    def open(self, episode: PlayingEpisode, model: str, role: str = "") -> str:
        """Serve an episode to one of its roles, and return the key."""
        key = secrets.token_urlsafe(24)
        self._episodes[_digest(key)] = ServedEpisode(Answers(episode, role), model)
        return key

    def find(self, key: str) -> ServedEpisode | None:
        return self._episodes.get(_digest(key))

    def close(self, key: str) -> None:
        """Stop serving an episode, and end its requests."""
        served = self._episodes.pop(_digest(key), None)
        if served is not None:
            served.end()

    def close_idle(self, since: float) -> list[ServedEpisode]:
        """Close the episodes that have not been used since a time on the monotonic clock, and return them."""
        used = {one.answers.episode for one in self._episodes.values() if one.running or one.last_used >= since}
        idle = [key for key, served in self._episodes.items() if served.answers.episode not in used]
        closed = [self._episodes.pop(key) for key in idle]
        for served in closed:
            served.end()
        return closed

    @contextlib.contextmanager
    def serving(self, episode: PlayingEpisode, model: str, role: str) -> Iterator[str]:
        """Serve an episode to a role while the context is open, under the key that it yields."""
        key = self.open(episode, model, role)
        try:
            yield key
        finally:
            self.close(key)


def proxy_routes(episodes: ServedEpisodes, note: Callable[[str], None] | None = None) -> list[Route]:
    """Return the routes that agents call. ``note`` is called once, if a client requests sampling settings that differ
    from the run's.
    """
    has_noted = False

    async def chat(request: HttpRequest, served: ServedEpisode) -> Response:
        return await answered(request, served, await _body(request, served, ChatRequest))

    async def complete(request: HttpRequest, served: ServedEpisode) -> Response:
        return await answered(request, served, await _body(request, served, CompletionRequest))

    async def generate(request: HttpRequest, served: ServedEpisode) -> Response:
        return await answered(request, served, await _body(request, served, ProxyGenerateRequest))

    async def messages(request: HttpRequest, served: ServedEpisode) -> Response:
        body = await _body(request, served, MessagesRequest)
        return await answered(request, served, body.as_chat(), MessagesFormat(body.model or served.model))

    async def count_tokens(request: HttpRequest, served: ServedEpisode) -> Response:
        body = await _body(request, served, MessagesRequest)
        return _json({"input_tokens": await served.answers.num_prompt_tokens(body.as_chat())})

    async def responses(request: HttpRequest, served: ServedEpisode) -> Response:
        body = await _body(request, served, ResponsesRequest)
        chat = body.as_chat(served.answers.turn)
        form = ResponsesFormat(body, served.model, chat.sampling(served.answers.episode.sampling))
        return await answered(request, served, chat, form)

    async def answered(
        request: HttpRequest, served: ServedEpisode, body: Request, form: AnswerFormat | None = None
    ) -> Response:
        nonlocal has_noted
        form = form or format_of(body, body.model or served.model, served.answers.episode.template.pieces)
        _refuse_if_over(served)
        overridden = served.answers.overridden(body)
        if overridden and note is not None and not has_noted:
            has_noted = True
            note(
                f"an agent's request for {overridden} was ignored, because training requires the sampling settings "
                "of the run"
            )
        headers = {_OVERRIDDEN: overridden} if overridden else {}
        try:
            if body.stream:
                return await _streamed(request, served, body, form, headers)
            answer = await run_while_connected(request, served.run(served.answers.answer(body)))
        except (InflightError, ClientDisconnect):
            _refuse_if_over(served)
            raise
        return _json(form.whole(answer), headers=headers)

    async def models(request: HttpRequest, served: ServedEpisode) -> Response:
        name = served.model
        card: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "inflight"}
        card["max_model_len"] = served.answers.episode.max_tokens
        if "anthropic-version" in request.headers:
            card = {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            return _json({"data": [card], "has_more": False, "first_id": name, "last_id": name})
        return _json({"object": "list", "data": [card]})

    async def reward(request: HttpRequest, served: ServedEpisode) -> Response:
        served.answers.reward(await body_message(RewardRequest, await content_of(request, _REWARD.fixed_bytes)))
        return _json({"ok": True})

    def mounted(path: str, method: str, handler: Handler) -> list[Route]:
        async def handle(request: HttpRequest) -> Response:
            return await handler(request, _served(request, episodes))

        return [proxy_route(prefix + path, method, handle) for prefix in ("/e/{key}", "")]

    return [
        *mounted("/v1/chat/completions", "POST", chat),
        *mounted("/v1/completions", "POST", complete),
        *mounted("/inference/v1/generate", "POST", generate),
        *mounted("/v1/messages", "POST", messages),
        *mounted("/v1/messages/count_tokens", "POST", count_tokens),
        *mounted("/v1/responses", "POST", responses),
        *mounted("/v1/models", "GET", models),
        *mounted("/reward", "POST", reward),
    ]


def proxy_route(path: str, method: str, handler: Callable[[HttpRequest], Awaitable[Response]]) -> Route:
    """Return a route whose errors have the format of the API that its path belongs to."""

    async def handle(request: HttpRequest) -> Response:
        try:
            return await handler(request)
        except InflightError as error:
            return _error_response(request, error)
        except HTTPException as error:
            return _error_response(request, InvalidRequestError(_without_key(request, error.detail)), error.status_code)
        except ClientDisconnect:
            return Response(status_code=499)  # the client has disconnected

    return Route(path, handle, methods=[method])


def proxy_app(routes: list[Route]) -> Starlette:
    """Return an application with these routes."""
    handlers: dict[Any, Any] = {Exception: _unexpected, HTTPException: _unknown}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _error_response(request: HttpRequest, error: InflightError, status: int | None = None) -> Response:
    """Return an error in the format of the API that the path belongs to. A header keeps clients from retrying."""
    status, body = error_json(error, status)
    if "/v1/messages" in request.url.path:
        body = as_messages_error(status, body)
    return _json(body, status, {"x-should-retry": "false"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _served(request: HttpRequest, episodes: ServedEpisodes) -> ServedEpisode:
    """Return the episode of a request. Raises `UnauthorizedError` if the key is missing or unknown."""
    given = request.headers.get("x-api-key") or request.headers.get("authorization", "")
    key = request.path_params.get("key") or given.removeprefix("Bearer ")
    served = episodes.find(key)
    if served is None:
        what = "does not belong to an episode that is being played" if key else "is missing"
        raise UnauthorizedError(f"the key {what}: use the base URL of the episode, or its key as the API key")
    served.last_used = time.monotonic()
    return served


def _refuse_if_over(served: ServedEpisode) -> None:
    """Raise `EpisodeOverError` if further turns would not count."""
    error = served.answers.episode.error
    if error is not None:
        raise EpisodeOverError(f"the episode is lost because its endpoint failed: {error}") from error
    if served.is_over:
        raise EpisodeOverError("the episode has ended")


async def _body(request: HttpRequest, served: ServedEpisode, kind: type[Body]) -> Body:
    episode = served.answers.episode
    size_bytes = _BODY.bytes_for(episode.max_tokens, images=episode.template.takes_images)
    return await body_message(kind, await content_of(request, size_bytes))


async def body_message(kind: type[Body], content: bytes) -> Body:
    """Parse a request body. Raises `InvalidRequestError` if it cannot be parsed."""
    try:
        return await message_of(kind, content)
    except ValueError as error:
        raise InvalidRequestError(f"the request body cannot be read: {error}") from error


async def _streamed(
    request: HttpRequest, served: ServedEpisode, body: Request, form: AnswerFormat, headers: dict[str, str]
) -> Response:
    """Answer with server-sent events. An error before the first event is raised here; a later one becomes an event.

    While nothing is sampled, comments keep the connection alive, because relays close it after about a minute of
    silence.
    """
    parts: asyncio.Queue[AnswerPiece | Answer | BaseException] = asyncio.Queue()

    async def sample() -> None:
        try:
            async with contextlib.aclosing(served.answers.stream(body)) as stream:
                async for part in stream:
                    parts.put_nowait(part)
        except Exception as error:
            parts.put_nowait(error)

    async def run() -> None:
        try:
            await served.run(sample())
        except EpisodeOverError as error:
            parts.put_nowait(error)

    async def next_part() -> AnswerPiece | Answer | BaseException | None:
        """Return the next part; None if it does not arrive in time."""
        try:
            return await asyncio.wait_for(parts.get(), _QUIET_S)
        except TimeoutError:
            return None

    running = start(run())
    try:
        first = await run_while_connected(request, next_part())
        if isinstance(first, BaseException):
            raise first
    except BaseException:
        await cancel_and_wait(running)
        raise

    async def lines() -> AsyncIterator[str]:
        has_streamed = False
        part: AnswerPiece | Answer | BaseException | None = first
        while part is None or isinstance(part, AnswerPiece):
            if part is None:
                yield ": waiting\n\n"
            else:
                has_streamed |= part.chunk is not None
                for event in form.piece(part):
                    yield _event(event, is_named=form.is_named)
            part = await next_part()
        if isinstance(part, Answer):
            for event in form.end(part, has_streamed=has_streamed):
                yield _event(event, is_named=form.is_named)
            if not form.is_named:
                yield "data: [DONE]\n\n"
        else:
            error = part if isinstance(part, InflightError) else InflightError(f"{type(part).__name__}: {part}")
            for event in form.failed(error):
                yield _event(event, is_named=form.is_named)

    return _StreamedAnswer(running, lines(), media_type="text/event-stream", headers=headers)


class _StreamedAnswer(StreamingResponse):
    """The events of an answer; ``sampling`` has ended once they are sent or the client has disconnected."""

    def __init__(self, sampling: asyncio.Task[None], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sampling = sampling

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            await cancel_and_wait(self._sampling)


def _event(event: dict[str, Any], *, is_named: bool) -> str:
    name = f"event: {event['type']}\n" if is_named else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(value, status_code=status, headers=headers)


def _without_key(request: HttpRequest, message: str) -> str:
    key = request.path_params.get("key")
    return message.replace(key, "KEY") if key else message


async def _unknown(request: HttpRequest, error: HTTPException) -> Response:
    message = f"{request.method} is not served under this path: call a path such as /e/KEY/v1/chat/completions"
    return _error_response(request, UnsupportedError(message), error.status_code)


async def _unexpected(request: HttpRequest, error: Exception) -> Response:
    return _error_response(request, InflightError(f"the request failed: {type(error).__name__}: {error}"), 500)
