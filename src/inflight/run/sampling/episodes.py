"""Groups of episodes of an environment. Environments are user code; an error in one fails only its episode."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.base.tasks import TaskOwner
from inflight.contracts import Environment, StreamingEndpoint
from inflight.environments.moving import MovingSampler, TurnSampler
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import PlayingEpisode, Proxy, play
from inflight.environments.recording import PlayedEpisode
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import EndpointError
from inflight.rollouts.driver_commands import ScoredGroup
from inflight.run.sampling.sampling_endpoint import SamplingEndpoint, SlowRequest
from inflight.run.sampling.user_code import in_thread, item_of
from inflight.run.sampling.work import Order, Sampled, Work
from inflight.types import TaskItem
from inflight.wire import Completion, GenerateRequest, SamplingParams

_MIN_EPISODES = 2
"""The smallest useful group: a single episode has nothing to be compared with."""


@dataclass(eq=False)
class _RunningEpisode:
    """An episode in progress, on an endpoint or waiting for one."""

    moving: MovingSampler
    playing: PlayingEpisode
    task: asyncio.Future[PlayedEpisode]
    failed: asyncio.Future[None]
    """Receives the error of the current endpoint if the endpoint fails."""

    async def at(self, endpoint: SamplingEndpoint) -> PlayedEpisode:
        """Continue on an endpoint, and return the episode once it is over. The endpoint's exceptions propagate."""
        self.failed = asyncio.get_running_loop().create_future()
        self.moving.go_to(await _turn_sampler(endpoint))
        try:
            ends: list[asyncio.Future[Any]] = [self.task, self.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self.task.done():
                self.failed.result()
            return self.task.result()
        finally:
            self.moving.leave()
            if not self.failed.cancel():
                self.failed.exception()  # mark the error as retrieved

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


async def _turn_sampler(endpoint: SamplingEndpoint) -> TurnSampler:
    async def generate(request: GenerateRequest) -> Completion:
        (completion,) = await endpoint.sample(request)
        return completion

    streams = (await endpoint.capabilities()).streaming and isinstance(endpoint.endpoint, StreamingEndpoint)
    return TurnSampler(generate, endpoint.stream if streams else None)


@dataclass(frozen=True)
class Episodes(Work):
    """Plays ``size`` episodes of each item. The first ``num_needed`` that do not fail form a group."""

    environment: Environment
    template: ChatTemplate
    sampling: SamplingParams
    """The sampling parameters of every turn."""
    num_needed: int
    num_extra: int
    """Number of additional episodes to start; episodes that still run when enough have finished are abandoned."""
    max_sequence_tokens: int
    timeout_s: float
    """How long an episode may take."""
    proxy: Proxy | None = None
    """Serves the episodes that ask for a URL."""
    routed_experts: bool = False
    """Whether requests ask for the experts that computed each token; if so, nothing is streamed."""
    loop: PlayLoop = field(default_factory=PlayLoop)
    _played: dict[tuple[int, int], _RunningEpisode] = field(default_factory=dict)
    """Episodes in progress, by item and number; those without an endpoint wait for one."""
    _plays: TaskOwner = field(default_factory=TaskOwner)

    is_one_request = False

    @property
    def name(self) -> str:
        return self.environment.name

    @property
    def size(self) -> int:
        return self.num_needed + self.num_extra

    async def item(self, index: int) -> TaskItem:
        what = f"making item {index} of environment {self.name!r}"
        return await in_thread(what, lambda: item_of(self.environment, index), self.timeout_s)

    def prompt_of(self, item: TaskItem) -> tuple[int, ...]:
        """Return numbers that identify the start state; the environment itself determines the actual prompt."""
        text = item.prompt or f"item {item.index}"
        return tuple(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).digest())

    def too_long(self, prompt_token_ids: Sequence[int]) -> str | None:
        return None

    async def sample(self, endpoint: SamplingEndpoint, order: Order) -> list[Sampled]:
        """Play an episode, or continue one that has lost its endpoint.

        Raises the same errors as `SamplingEndpoint.sample`.

        An episode that ended just as its endpoint was lost is kept for the next call. An episode that is cancelled
        because another one blocks the shared thread of all episodes is played again in its own thread.
        """
        key = (order.item.index, order.numbers[0])
        while True:
            played = self._played.get(key)
            if played is None:
                played = self._played[key] = await self._begin_episode(endpoint, order)
            try:
                sampled = await played.at(endpoint)
            except asyncio.CancelledError:
                is_forgotten = self._played.get(key) is not played
                asking = asyncio.current_task()
                if is_forgotten or not played.task.cancelled() or (asking is not None and asking.cancelling()):
                    raise
                del self._played[key]
            else:
                self._played.pop(key, None)
                return [sampled]

    async def _begin_episode(self, endpoint: SamplingEndpoint, order: Order) -> _RunningEpisode:
        declared = await endpoint.capabilities()
        streams = declared.streaming and isinstance(endpoint.endpoint, StreamingEndpoint)
        moving = MovingSampler((EndpointError, SlowRequest), lambda error: played.fail(error))
        episode = PlayingEpisode(
            order.request_id,
            order.seed,
            self.template,
            moving.generate,
            self.sampling,
            max_tokens=min(self.max_sequence_tokens, declared.max_model_len),
            proxy=self.proxy,
            stream=moving.stream if streams and not self.routed_experts else None,
            routed_experts=self.routed_experts,
        )
        task = self._plays.start(play(self.environment, order.item, episode, self.loop, self.timeout_s))
        played = _RunningEpisode(moving, episode, task, asyncio.get_running_loop().create_future())
        return played

    def first_version(self, index: int, number: int) -> int | None:
        played = self._played.get((index, number))
        calls = () if played is None else played.playing.recording.calls
        return calls[0].completion.first_version if calls else None

    def forget(self, index: int) -> None:
        for key in [key for key in self._played if key[0] == index]:
            self._played.pop(key).task.cancel()

    def is_enough(self, sampled: Sequence[Sampled | None]) -> bool:
        played = [one for one in sampled if isinstance(one, PlayedEpisode)]
        return len(played) == self.size or sum(one.failure is None for one in played) >= self.num_needed

    async def score(self, item: TaskItem, prompt_token_ids: Sequence[int], sampled: Sequence[Sampled]) -> ScoredGroup:
        played = [one for one in sampled if isinstance(one, PlayedEpisode)]
        good = [one for one in played if one.failure is None][: self.num_needed]
        failures = [(one.failure_kind or "", one.failure) for one in played if one.failure is not None]
        rollouts = [
            rollout for number, one in enumerate(good) for rollout in one.rollouts(number, self.sampling.temperature)
        ]
        return ScoredGroup(
            rollouts if len(good) >= _MIN_EPISODES else [],
            tuple(one.num_tokens for one in good),
            tuple(one.reward for one in good),
            failures=failures,
            num_rewritten=sum(one.num_rewritten for one in good),
        )

    async def aclose(self) -> None:
        await self._plays.aclose()
        for played in self._played.values():
            if played.task.done() and not played.task.cancelled():
                played.task.exception()  # mark as retrieved: the episode is not continued
        await self.loop.aclose()

    def parse(self, saved: Any) -> PlayedEpisode:
        return PlayedEpisode.model_validate(saved)
