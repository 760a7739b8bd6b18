"""Episodes as they are played: conversations with one endpoint, recorded turn by turn."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from inflight.base.clock import unix_time
from inflight.contracts import Conversation, Environment, Episode
from inflight.environments.play_loop import BlockedError, OverdueError, PlayLoop
from inflight.environments.recording import EpisodeRecording, PlayedEpisode, completion_of
from inflight.environments.role_urls import RoleUrls
from inflight.environments.tools.reasoning import opens_reasoning
from inflight.environments.transcripts import ChatTemplate, Prompt, Transcript
from inflight.errors import ContextFullError, InvalidRequestError, UnsupportedError
from inflight.types import Message, Reply, TaskItem, Tool
from inflight.wire import (
    MAX_REWARD,
    Completion,
    CompletionChunk,
    GenerateRequest,
    PromptImage,
    SamplingParams,
    is_reward,
)

Generate = Callable[[GenerateRequest], Awaitable[Completion]]
"""Samples the single completion of a request."""
Stream = Callable[[GenerateRequest], AsyncGenerator[CompletionChunk, None]]
"""Samples a completion token by token; closing the iterator ends the request."""
Proxy = Callable[["PlayingEpisode", str], AbstractAsyncContextManager[str]]
"""Serves an episode to the OpenAI API clients of a role, under the URL that the context yields."""

T = TypeVar("T")

_MAX_WHY = 500
_MAX_TURNS = 10_000
_MAX_PROMPT_TOKENS = 1 << 26
"""Maximum number of prompt tokens in all turns of an episode together (half a gigabyte), because each turn keeps its
whole prompt.
"""
_LATE_S = 1.0


@dataclass(eq=False)
class PlayingEpisode(Episode):
    """An episode that is being played on one endpoint. It can be used from any event loop; its requests run in the loop
    in which it was created.

    The first error of ``generate`` is kept in ``error``, because the episode has failed even if its environment catches
    the error.
    """

    request_id: str
    number: int
    """Seed of the episode."""
    template: ChatTemplate
    generate: Generate
    sampling: SamplingParams
    """The sampling parameters of every turn; ``max_tokens`` is lowered if less of the context is left."""
    max_tokens: int
    """The maximum number of tokens in a conversation."""
    proxy: Proxy | None = None
    stream: Stream | None = None
    """None if the endpoint does not support streaming."""
    routed_experts: bool = False
    """Whether the routed experts of each token are requested. These cannot be streamed."""
    whole_reward: float | None = None
    """The reward that a client has posted for the episode."""
    recording: EpisodeRecording = field(default_factory=EpisodeRecording)
    role_rewards: dict[str, float] = field(default_factory=dict)
    num_rewritten: int = 0
    error: BaseException | None = None
    _num_requests: int = 0
    _urls: RoleUrls = field(default_factory=RoleUrls)
    _home: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _is_over: bool = False

    @property
    def seed(self) -> int:
        return self.number

    def conversation(self, *, system: str = "", tools: Sequence[Tool] = (), role: str = "") -> Conversation:
        return PlayedConversation(self, system, tuple(tools), role)

    @property
    def posted_reward(self) -> float | None:
        if self.whole_reward is not None or not self.role_rewards:
            return self.whole_reward
        return sum(self.role_rewards.values()) / len(self.role_rewards)

    async def openai_url(self, role: str = "") -> str:
        proxy = self.proxy
        if proxy is None:
            raise UnsupportedError("this episode is not served to clients of OpenAI's API: no proxy is running")
        return await self._at_home(lambda: self._urls.url(role, lambda: proxy(self, role)))

    async def _at_home(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a coroutine, run in the event loop in which the episode was created."""
        if asyncio.get_running_loop() is self._home:
            return await call()
        if self._is_over:  # that loop may be closed
            raise InvalidRequestError("the episode has ended: no further turn can be sampled")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._home))

    async def aclose(self) -> None:
        """Stop serving the episode; nothing more is sampled for it."""
        self._is_over = True
        await self._urls.aclose()

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        role: str = "",
        sampling: SamplingParams | None = None,
        images: Sequence[PromptImage] = (),
    ) -> tuple[int, Completion]:
        """Sample one turn and record it; return the turn's number and completion.

        Raises `ContextFullError` if the prompt fills the context, and `InvalidRequestError` if the episode has ended.
        """
        return await self._at_home(lambda: self._sample(prompt_token_ids, role, sampling, images))

    async def _sample(
        self,
        prompt_token_ids: Sequence[int],
        role: str,
        sampling: SamplingParams | None,
        images: Sequence[PromptImage],
    ) -> tuple[int, Completion]:
        request, began = self._request(prompt_token_ids, sampling, images), unix_time()
        try:
            completion = await self.generate(request)
        except Exception as error:
            self.error = self.error or error
            raise
        return self.recording.add(prompt_token_ids, completion, role, images, (began, unix_time())), completion

    async def sample_stream(
        self,
        prompt_token_ids: Sequence[int],
        role: str = "",
        sampling: SamplingParams | None = None,
        images: Sequence[PromptImage] = (),
    ) -> AsyncGenerator[CompletionChunk | tuple[int, Completion], None]:
        """Yield the chunks of one turn as they are sampled; at the end, record it and yield what `sample` returns.

        Call this in the event loop in which the episode was created. If the endpoint does not stream, there are no
        chunks. Closing the iterator before the end ends the request, and nothing is recorded. Raises the same errors as
        `sample`.
        """
        if self.stream is None:
            yield await self.sample(prompt_token_ids, role, sampling, images)
            return
        request, began = self._request(prompt_token_ids, sampling, images), unix_time()
        chunks: list[CompletionChunk] = []
        try:
            async with aclosing(self.stream(request)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    yield chunk
            completion = completion_of(chunks)
        except Exception as error:
            self.error = self.error or error
            raise
        yield self.recording.add(prompt_token_ids, completion, role, images, (began, unix_time())), completion

    def _request(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams | None, images: Sequence[PromptImage]
    ) -> GenerateRequest:
        if self._is_over:
            raise InvalidRequestError("the episode has ended: no further turn can be sampled")
        if len(self.recording) >= _MAX_TURNS or self.recording.num_prompt_tokens > _MAX_PROMPT_TOKENS:
            raise ContextFullError(
                f"the episode has {len(self.recording)} turns with {self.recording.num_prompt_tokens} prompt tokens, "
                f"but may have at most {_MAX_TURNS} turns and {_MAX_PROMPT_TOKENS} prompt tokens: end it earlier"
            )
        sampling = sampling or self.sampling
        room = self.max_tokens - len(prompt_token_ids)
        if room < 1:
            raise ContextFullError(
                f"the conversation has {len(prompt_token_ids)} tokens, but at most {self.max_tokens} fit "
                "(train.max_tokens_per_micro_batch, or the model's context): end episodes earlier"
            )
        self._num_requests += 1
        update = {
            "n": 1,
            "max_tokens": min(room, sampling.max_tokens or room),
            "seed": _seed(self.number, self._num_requests),
        }
        return GenerateRequest(
            request_id=f"{self.request_id}-{self._num_requests}",
            prompt_token_ids=tuple(prompt_token_ids),
            images=tuple(images),
            sampling=sampling.model_copy(update=update),
            routed_experts=self.routed_experts,
        )

    def played(self, reward: float) -> PlayedEpisode:
        """Return the record of the episode."""
        return PlayedEpisode(
            calls=self.recording.calls,
            reward=reward,
            role_rewards=self.role_rewards,
            num_rewritten=self.num_rewritten,
        )


@dataclass(eq=False)
class PlayedConversation(Conversation):
    """One conversation of an episode."""

    episode: PlayingEpisode
    system: str
    tools: tuple[Tool, ...]
    role: str
    transcript: Transcript | None = None
    _last: int | None = None
    _is_talking: bool = False

    async def say(self, *messages: Message | str) -> Reply:
        given = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
        template = self.episode.template
        if self.transcript is not None:
            prompt = template.following(self.transcript, given)
        else:
            opening = [{"role": "system", "content": self.system}] if self.system else []
            prompt = template.opening([*opening, *given], self.tools)
        return await self._answer(prompt)

    async def observe(self, token_ids: Sequence[int]) -> Reply:
        before = self.transcript
        text = "" if before is None else before.text
        ids = (() if before is None else before.token_ids) + tuple(token_ids)
        if not ids:
            raise InvalidRequestError("a conversation cannot begin with an empty prompt")
        added = self.episode.template.decode_reply(token_ids, "length").raw
        messages, images = ((), ()) if before is None else (before.messages, before.images)
        return await self._answer(Prompt(messages, self.tools, text + added, ids, images))

    async def _answer(self, prompt: Prompt) -> Reply:
        if self._is_talking:
            raise InvalidRequestError(
                "the conversation is already waiting for an answer: begin another one with Episode.conversation"
            )
        self._is_talking = True
        try:
            number, completion = await self.episode.sample(prompt.token_ids, self.role, images=prompt.images)
        finally:
            self._is_talking = False
        self.episode.num_rewritten += prompt.rewritten is not None
        template = self.episode.template
        self._last = number
        is_open = opens_reasoning(prompt.text)
        reply_text = template.decode_reply(completion.token_ids, completion.finish_reason, is_open=is_open)
        self.transcript = template.transcript(prompt, completion.token_ids, completion.finish_reason, reply_text)
        return Reply(
            text=reply_text.text,
            tool_calls=reply_text.tool_calls,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            version_spans=completion.version_spans,
            finish_reason=completion.finish_reason,
        )

    def reward_turn(self, reward: float) -> None:
        if self._last is None:
            raise InvalidRequestError("the conversation has no turn to reward yet")
        self.episode.recording.reward(self._last, reward)

    def reward(self, reward: float) -> None:
        self.episode.role_rewards[self.role] = float(reward)


async def play(
    environment: Environment, item: TaskItem, episode: PlayingEpisode, loop: PlayLoop, timeout_s: float
) -> PlayedEpisode:
    """Play one episode to its end. Errors from the environment become the ``failure`` of the returned episode.

    Errors from the endpoint are raised: the episode can then be played again.
    """

    async def whole() -> tuple[Any, tuple[str, str] | None]:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                reward = await environment.play(item, episode)
            return reward, _problem(reward, episode)
        except ContextFullError as error:
            return None, ("context full", str(error))
        except BaseException as error:  # environments are users' code, which may even call sys.exit
            playing = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and playing is not None and playing.cancelling():
                raise
            late = ("timeout", f"it took longer than {timeout_s:g} s")
            return None, late if limit.expired() else ("raised", f"{error!r}")

    reward: Any = None
    try:
        reward, failure = await loop.run(whole, timeout_s + _LATE_S)
    except OverdueError as error:
        failure = ("timeout", f"it took longer than {timeout_s:g} s, and {error}")
    except BlockedError as error:
        failure = ("blocked", str(error))
    finally:
        await episode.aclose()
    if episode.error is not None:
        raise episode.error
    if failure is None:
        return episode.played(float(reward))
    kind, why = failure
    return PlayedEpisode(
        failure_kind=kind, failure=f"episode of {environment.name!r}, item {item.index}: {why}"[:_MAX_WHY]
    )


def _problem(reward: Any, episode: PlayingEpisode) -> tuple[str, str] | None:
    rewards = {"": reward, **episode.role_rewards}
    for value in rewards.values():
        if not is_reward(value):
            return "bad reward", f"its reward is {value!r}, not a finite number of at most {MAX_REWARD:g} in magnitude"
    if not len(episode.recording):
        return "no turn", "it ended before the model had a turn"
    return None


def _seed(seed: int, number: int) -> int:
    """Return a seed for one turn of an episode."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=6).digest())
