"""Episodes for other codebases: opened, played by agents through the proxy, and finished over HTTP.

    POST   /episodes                {"temperature"?, "max_tokens"?, "seed"?, "roles"?}  ->  {"key", "openai_url"}
    POST   /episodes/KEY/finish     {"reward"?}                                         ->  {"reward", "rollouts"}
    DELETE /episodes/KEY

These routes require a bearer token. An episode stays on one endpoint, whose cache holds its conversations. If that
endpoint fails, the requested turn is sampled on another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import to_jsonable_python
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from inflight.contracts import InferenceEndpoint, StreamingEndpoint
from inflight.environments.moving import MovingSampler, TurnSampler, without_unsupported_seed
from inflight.environments.playing import PlayingEpisode
from inflight.environments.proxy.app import (
    ServedEpisode,
    ServedEpisodes,
    body_message,
    proxy_app,
    proxy_route,
    proxy_routes,
)
from inflight.environments.proxy.requests import Reward
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import BusyError, EndpointError, EpisodeOverError, InvalidRequestError, UnauthorizedError
from inflight.http.incoming_requests import content_of
from inflight.http.tokens import carries_token
from inflight.types import Rollout
from inflight.wire import (
    MIN_TEMPERATURE,
    Capabilities,
    Completion,
    CompletionChunk,
    GenerateRequest,
    Items,
    SamplingParams,
    Seed,
    TokenCount,
)

_NUM_FINISHED = 256
_MAX_FINISHED_BYTES = 256 << 20
"""Limits on the number and total size of the answers to ``/finish`` that are kept for repeated calls. The latest answer
is always kept.
"""
_MAX_BODY_BYTES = 64 * 1024
_FAILED_S = 30.0
"""For this many seconds after an episode has failed on an endpoint, the endpoint receives new episodes only if all
other endpoints have failed, too.
"""


def _distinct(roles: tuple[str, ...]) -> tuple[str, ...]:
    if twice := next((role for role in roles if roles.count(role) > 1), None):
        raise ValueError(f"the role {twice!r} occurs more than once: name each role once")
    return roles


class OpenRequest(BaseModel):
    """Body of ``/episodes``: the settings of this episode that differ from the service's."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    temperature: float | None = Field(default=None, ge=MIN_TEMPERATURE, le=100)
    max_tokens: TokenCount | None = None
    seed: Seed | None = None
    roles: Annotated[
        Items[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64), AfterValidator(_distinct)
    ] = ()
    """Each role has its own URL."""


class FinishRequest(BaseModel):
    """Body of ``/finish``. Without ``reward``, the reward that the agent has posted counts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    reward: Reward | None = None


@dataclass(frozen=True, slots=True)
class _Host:
    """An endpoint, and what it supports."""

    endpoint: InferenceEndpoint
    declared: Capabilities


class EpisodeService:
    """Opens a limited number of episodes, each on the endpoint with the fewest open episodes, and closes idle ones."""

    def __init__(
        self,
        template: ChatTemplate,
        settings: SamplingParams,
        *,
        token: str,
        model: str,
        max_episodes: int,
        idle_timeout_s: float,
    ) -> None:
        self._template = template
        self._settings = settings
        self._token = token
        self._model = model
        self._max_episodes = max_episodes
        self._idle_timeout_s = idle_timeout_s
        self._hosts: list[_Host] = []
        self._load: Counter[int] = Counter()
        """Number of open episodes on each endpoint, by the endpoint's index."""
        self._host_of: dict[PlayingEpisode, int] = {}
        """The index of the endpoint that each episode is on."""
        self._role_keys: dict[PlayingEpisode, list[str]] = {}
        self._failed: dict[int, float] = {}
        """When an episode last failed on each endpoint, by the endpoint's index."""
        self._finished: OrderedDict[str, bytes] = OrderedDict()
        """The answers to the latest calls to ``/finish``, for clients that repeat a call."""
        self._numbers = itertools.count(1)
        self.episodes = ServedEpisodes()

    async def attach(self, endpoints: Sequence[InferenceEndpoint]) -> None:
        """Query the endpoints' capabilities. Errors from the endpoints propagate."""
        for endpoint in endpoints:
            self._hosts.append(_Host(endpoint, await endpoint.capabilities()))

    def app(self, note: Callable[[str], None] | None = None) -> Starlette:
        """Return the application, which also serves agents."""
        own = [
            proxy_route("/episodes", "POST", self._open),
            proxy_route("/episodes/{key}/finish", "POST", self._finish),
            proxy_route("/episodes/{key}", "DELETE", self._drop),
        ]
        return proxy_app([*own, *proxy_routes(self.episodes, note)])

    async def expire(self) -> None:
        """Close idle episodes, until cancelled."""
        while True:
            await asyncio.sleep(min(10.0, self._idle_timeout_s / 4))
            for served in self.episodes.close_idle(time.monotonic() - self._idle_timeout_s):
                if served.answers.episode in self._host_of:  # not yet forgotten under the key of another role
                    self._forget(served)

    async def _open(self, request: HttpRequest) -> Response:
        self._check_token(request)
        body = await body_message(OpenRequest, await content_of(request, _MAX_BODY_BYTES) or b"{}")
        if len(self._host_of) >= self._max_episodes:
            raise BusyError(f"{self._max_episodes} episodes are open: finish or delete some, or raise --max-episodes")
        number, place = next(self._numbers), self._next_place()
        update = {name: value for name in ("temperature", "max_tokens") if (value := getattr(body, name)) is not None}

        def move(error: Exception) -> None:
            moving.go_to(_place(self._hosts[self._moved(episode, error)]))

        moving = MovingSampler((EndpointError,), move)
        moving.go_to(_place(self._hosts[place]))
        episode = PlayingEpisode(
            f"episode-{number}",
            number if body.seed is None else body.seed,
            self._template,
            moving.generate,
            self._settings.model_copy(update=update),
            max_tokens=min(host.declared.max_model_len for host in self._hosts),
            stream=moving.stream if self._hosts[place].declared.streaming else None,
        )
        self._load[place] += 1
        self._host_of[episode] = place
        key = self.episodes.open(episode, self._model)
        roles = {role: self.episodes.open(episode, self._model, role) for role in body.roles}
        self._role_keys[episode] = [*roles.values()]
        return JSONResponse(
            {
                **_opened(request, key),
                **({"roles": {role: _opened(request, key) for role, key in roles.items()}} if roles else {}),
            }
        )

    def _moved(self, episode: PlayingEpisode, error: Exception) -> int:
        """Move an episode from its failed endpoint to another one. Raises ``error`` if all endpoints have failed
        recently.
        """
        self._failed[self._host_of[episode]] = time.monotonic()
        place = self._next_place()
        if self._failed.get(place, -math.inf) > time.monotonic() - _FAILED_S:
            raise error
        self._load[self._host_of[episode]] -= 1
        self._load[place] += 1
        self._host_of[episode] = place
        return place

    async def _finish(self, request: HttpRequest) -> Response:
        self._check_token(request)
        body = await body_message(FinishRequest, await content_of(request, _MAX_BODY_BYTES) or b"{}")
        if (known := self._finished.get(request.path_params["key"])) is not None:
            return Response(known, media_type="application/json")  # the answer was lost
        key, served = self._named(request)
        episode = served.answers.episode
        reward = body.reward if body.reward is not None else episode.posted_reward
        if reward is None and episode.error is None:
            raise InvalidRequestError("the episode has no reward: send one with /finish, or let the agent post it")
        self.episodes.close(key)
        self._forget(served)
        if episode.error is not None or reward is None:
            raise EpisodeOverError(f"the episode is lost because its endpoint failed: {episode.error}")
        rollouts = episode.played(reward).rollouts(0, episode.sampling.temperature)
        answer = JSONResponse({"reward": reward, "rollouts": [rollout_json(rollout) for rollout in rollouts]})
        self._finished[key] = bytes(answer.body)
        sizes = [len(content) for content in self._finished.values()]
        while len(sizes) > 1 and (len(sizes) > _NUM_FINISHED or sum(sizes) > _MAX_FINISHED_BYTES):
            self._finished.popitem(last=False)
            sizes.pop(0)
        return answer

    async def _drop(self, request: HttpRequest) -> Response:
        key, served = self._named(request)
        self.episodes.close(key)
        self._forget(served)
        return JSONResponse({"ok": True})

    def _named(self, request: HttpRequest) -> tuple[str, ServedEpisode]:
        self._check_token(request)
        key = request.path_params["key"]
        served = self.episodes.find(key)
        if served is None or served.answers.role:
            raise InvalidRequestError("no such episode is open: it was finished, deleted, or closed while idle")
        return key, served

    def _next_place(self) -> int:
        """Return the endpoint with the fewest episodes, preferably one that has not failed recently."""
        recently = time.monotonic() - _FAILED_S
        return min(range(len(self._hosts)), key=lambda i: (self._failed.get(i, -math.inf) > recently, self._load[i]))

    def _forget(self, served: ServedEpisode) -> None:
        episode = served.answers.episode
        for key in self._role_keys.pop(episode):
            self.episodes.close(key)
        place = self._host_of.pop(episode)
        self._load[place] -= 1
        if episode.error is not None:
            self._failed[place] = time.monotonic()

    def _check_token(self, request: HttpRequest) -> None:
        given = request.headers.get("authorization", "")
        if not carries_token(given, self._token):
            raise UnauthorizedError(f"the bearer token for /episodes is {'wrong' if given else 'missing'}")


def rollout_json(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as a JSON value with all fields of `inflight.types.Rollout`."""
    value: dict[str, Any] = to_jsonable_python(rollout)
    return value


def _opened(request: HttpRequest, key: str) -> dict[str, str]:
    return {"key": key, "openai_url": f"{request.base_url}e/{key}/v1"}


def _place(host: _Host) -> TurnSampler:
    async def generate(request: GenerateRequest) -> Completion:
        (completion,) = (await host.endpoint.generate(without_unsupported_seed(request, host.declared))).completions
        return completion

    async def stream(request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        assert isinstance(host.endpoint, StreamingEndpoint)
        streamed = without_unsupported_seed(request, host.declared).model_copy(update={"stream": True})
        chunks: Any = host.endpoint.generate_stream(streamed)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    return TurnSampler(generate, stream if host.declared.streaming else None)
