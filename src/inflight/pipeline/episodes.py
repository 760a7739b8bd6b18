"""Groups of episodes of an environment. Environments are users' code: what one does wrong costs its episode only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.contracts import Environment, StreamingEndpoint
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import PlayingEpisode, Proxy, play
from inflight.environments.recording import PlayedEpisode
from inflight.environments.transcripts import ChatTemplate
from inflight.errors import TaskError
from inflight.pipeline.seats import Seat
from inflight.pipeline.work import Order, Sampled, ScoredGroup, Work
from inflight.types import TaskItem
from inflight.wire import Completion, GenerateRequest, SamplingParams

_MIN_EPISODES = 2
"""A group of fewer has nothing to compare."""


@dataclass(frozen=True)
class Episodes(Work):
    """Plays ``size`` episodes of each item, of which ``num_needed`` that did not fail make a group."""

    environment: Environment
    template: ChatTemplate
    sampling: SamplingParams
    """Of every turn."""
    num_needed: int
    num_extra: int
    """Episodes that are begun beyond those that are needed; the last to finish are given up."""
    max_sequence_tokens: int
    timeout_s: float
    """Longest that an episode may take."""
    proxy: Proxy | None = None
    """Serves those that ask for a URL."""
    loop: PlayLoop = field(default_factory=PlayLoop)

    is_one_request = False

    @property
    def name(self) -> str:
        return self.environment.name

    @property
    def size(self) -> int:
        return self.num_needed + self.num_extra

    def item(self, index: int) -> TaskItem:
        try:
            return self.environment.item(index)
        except Exception as error:  # environments are user code
            raise TaskError(f"environment {self.name!r} failed to make item {index}: {error!r}") from error

    def prompt_of(self, item: TaskItem) -> tuple[int, ...]:
        """Return numbers that are the same for the same start state; what is said first is up to the environment."""
        text = item.prompt or f"item {item.index}"
        return tuple(hashlib.blake2b(text.encode(), digest_size=12).digest())

    def too_long(self, prompt_token_ids: Sequence[int]) -> str | None:
        return None

    async def sample(self, seat: Seat, order: Order) -> list[Sampled]:
        declared = await seat.capabilities()

        async def generate(request: GenerateRequest) -> Completion:
            (completion,) = await seat.sample(request)
            return completion

        streams = declared.streaming and isinstance(seat.endpoint, StreamingEndpoint)
        episode = PlayingEpisode(
            order.request_id,
            order.seed,
            self.template,
            generate,
            self.sampling,
            max_tokens=min(self.max_sequence_tokens, declared.max_model_len),
            proxy=self.proxy,
            stream=seat.stream if streams else None,
        )
        return [await play(self.environment, order.item, episode, self.loop, self.timeout_s)]

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
        await self.loop.aclose()

    def parse(self, saved: Any) -> PlayedEpisode:
        return PlayedEpisode.model_validate(saved)
