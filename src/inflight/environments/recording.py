"""The sampled turns of an episode, and the rollouts that they form.

Calls are joined by token ids: a call whose prompt begins with all tokens of an earlier call continues it. Several calls
that continue the same call (a retry, a sub-agent, a compacted context) become separate rollouts, and no sampled token
is trained on twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field

from inflight.errors import ProtocolError
from inflight.types import Rollout, Turn
from inflight.wire import (
    MAX_REWARD,
    Completion,
    CompletionChunk,
    PromptImage,
    RoutedExperts,
    VersionSpan,
    WireModel,
    is_empty,
    is_reward,
    longest_record,
)


class RecordedCall(WireModel):
    """One sampled turn: the model's prompt and its reply."""

    prompt_token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = Field(default=(), exclude_if=is_empty)
    completion: Completion
    role: str = ""
    model: str = Field(default="", exclude_if=is_empty)
    """The model that a client of the proxy specified."""
    has_tools: bool = Field(default=False, exclude_if=is_empty)
    """Whether a client of the proxy offered tools."""
    reward: float | None = None
    """The reward of this turn alone."""
    span: tuple[float, float] | None = None
    """When the call was requested and when it was complete, in seconds since 1970; None if unknown."""


class PlayedEpisode(WireModel):
    """A finished episode. If it failed, ``failure`` states why it does not count."""

    calls: tuple[RecordedCall, ...] = ()
    reward: float = 0.0
    role_rewards: Mapping[str, float] = Field(default_factory=dict)
    """The rewards of those roles whose reward differs from the episode's."""
    num_rewritten: int = 0
    """How often a template rendered the history differently, so that a conversation continued as a new rollout."""
    failure: str | None = None
    failure_kind: str | None = None
    """The category by which failures are counted."""

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(call.completion.num_tokens for call in self.calls)

    @property
    def first_version(self) -> int | None:
        """Version that sampled the first token; None if the episode failed."""
        return self.calls[0].completion.first_version if self.calls else None

    @property
    def is_whole(self) -> bool:
        return True

    def rollouts(self, episode: int, temperature: float) -> list[Rollout]:
        """Return the token streams to train on; ``episode`` is the number of this episode in its group.

        An agent's background calls, for example to generate a title, are omitted: these are calls that offer no tools
        and specify a different model from the first call with tools.
        """
        main = next((call.model for call in self.calls if call.has_tools), "")
        return [
            _rollout(self.calls, path, is_new, self._reward_of(last.role), episode, temperature)
            for path, is_new in _streams(self.calls)
            if (last := self.calls[path[-1]]).has_tools or not main or last.model in ("", main)
        ]

    def _reward_of(self, role: str) -> float:
        return self.role_rewards.get(role, self.reward)


class EpisodeRecording:
    """Collects the calls of one episode while it is played."""

    def __init__(self) -> None:
        self._calls: list[RecordedCall] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        completion: Completion,
        role: str = "",
        images: Sequence[PromptImage] = (),
        span: tuple[float, float] | None = None,
    ) -> int:
        """Record a turn and return its number."""
        self._calls.append(
            RecordedCall(
                prompt_token_ids=tuple(prompt_token_ids),
                images=tuple(images),
                completion=completion,
                role=role,
                span=span,
            )
        )
        self.num_prompt_tokens += len(prompt_token_ids)
        return len(self._calls) - 1

    def describe(self, number: int, *, model: str, has_tools: bool) -> None:
        """Record which model a client of the proxy specified in a turn, and whether it offered tools."""
        update = {"model": model, "has_tools": has_tools}
        self._calls[number] = self._calls[number].model_copy(update=update)

    def reward(self, number: int, reward: float) -> None:
        """Give a turn its own reward. Raises ``ValueError`` if the reward cannot be trained on."""
        if not is_reward(reward):
            raise ValueError(
                f"the reward of a turn must be a finite number of at most {MAX_REWARD:g} in magnitude, not {reward}"
            )
        self._calls[number] = self._calls[number].model_copy(update={"reward": float(reward)})

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        return tuple(self._calls)


def completion_of(chunks: Sequence[CompletionChunk]) -> Completion:
    """Return the completion whose chunks were streamed. Raises `ProtocolError` if a part of it is missing."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    finish_reason = None
    for chunk in chunks:
        start = len(token_ids)
        if chunk.start != start or finish_reason is not None:
            raise ProtocolError(f"a chunk begins at token {chunk.start}, but {start} tokens have arrived before it")
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
        finish_reason = chunk.finish_reason
        if spans and spans[-1].version == chunk.version:
            start = spans.pop().start
        if len(token_ids) > start:
            spans.append(VersionSpan(version=chunk.version, start=start, end=len(token_ids)))
    if finish_reason is None:
        raise ProtocolError(f"the stream ended after {len(token_ids)} tokens without a finish reason")
    return Completion(
        index=0,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        version_spans=tuple(spans),
        finish_reason=finish_reason,
    )


def _streams(calls: Sequence[RecordedCall]) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield, for each stream, the numbers of its calls in order, and which of these calls are in no earlier stream."""
    parents = [_parent(calls, number) for number in range(len(calls))]
    taken: set[int] = set()
    for leaf in sorted(set(range(len(calls))) - {parent for parent in parents if parent is not None}):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.insert(0, at)
            at = parents[at]
        yield path, [number not in taken for number in path]
        taken.update(path)


def _parent(calls: Sequence[RecordedCall], number: int) -> int | None:
    """Return the earlier call of the same role that a call continues: the longest one, or the latest of several with
    equal length.
    """
    prompt, role = calls[number].prompt_token_ids, calls[number].role
    best, longest = None, 0
    for earlier in reversed(range(number)):
        call = calls[earlier]
        num_before, num_sampled = len(call.prompt_token_ids), call.completion.num_tokens
        end = num_before + num_sampled
        if (
            longest < end <= len(prompt)
            and call.role == role
            and prompt[num_before:end] == call.completion.token_ids
            and prompt[:num_before] == call.prompt_token_ids
            and [image for image in calls[number].images if image.start < end] == list(call.images)
        ):
            best, longest = earlier, end
    return best


def _rollout(
    calls: Sequence[RecordedCall],
    path: Sequence[int],
    is_new: Sequence[bool],
    reward: float,
    episode: int,
    temperature: float,
) -> Rollout:
    prompt = calls[path[0]].prompt_token_ids
    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    turns: list[Turn] = []
    experts: RoutedExperts | None = None
    for number, is_trained in zip(path, is_new, strict=True):
        call = calls[number]
        experts = longest_record(experts, call.completion.routed_experts)
        observed = call.prompt_token_ids[len(prompt) + len(token_ids) :]
        token_ids += observed
        logprobs += [0.0] * len(observed)
        start = len(token_ids)
        token_ids += call.completion.token_ids
        if is_trained:
            logprobs += call.completion.logprobs
            turns.append(Turn(start, len(token_ids), call.reward))
            spans += [
                VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
                for span in call.completion.version_spans
            ]
        else:
            logprobs += [0.0] * call.completion.num_tokens
    return Rollout(
        prompt_token_ids=prompt,
        completion_token_ids=token_ids,
        behaviour_logprobs=logprobs,
        version_spans=spans,
        finish_reason=calls[path[-1]].completion.finish_reason,
        reward=reward,
        temperature=temperature,
        turns=turns,
        episode=episode,
        role=calls[path[-1]].role,
        images=calls[path[-1]].images,
        routed_experts=experts,
    )
