"""Calls become rollouts by their tokens, against a plain reading of what was sampled."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.environments.recording import EpisodeRecording, PlayedEpisode
from inflight.types import OBSERVED, Turn
from inflight.wire import Completion, VersionSpan


def said(*token_ids: int, version: int = 0) -> Completion:
    return Completion(
        index=0,
        token_ids=token_ids,
        logprobs=tuple(-token_id / 1000 for token_id in token_ids),
        version_spans=(VersionSpan(version=version, start=0, end=len(token_ids)),),
        finish_reason="stop",
    )


def test_turns_of_a_conversation_become_one_stream_with_observations_between_them() -> None:
    recording = EpisodeRecording()
    recording.add([1, 2], said(10, 11, version=3))
    number = recording.add([1, 2, 10, 11, 5, 6], said(12, version=4))
    recording.reward(number, 0.5)
    played = PlayedEpisode(calls=recording.calls, reward=2.0)
    (rollout,) = played.rollouts(7, 0.9)
    assert rollout.prompt_token_ids == (1, 2)
    assert rollout.completion_token_ids == [10, 11, 5, 6, 12]
    assert rollout.behaviour_logprobs == [-0.01, -0.011, 0.0, 0.0, -0.012]
    assert rollout.token_versions() == [3, 3, OBSERVED, OBSERVED, 4]
    assert rollout.turns == [Turn(0, 2), Turn(4, 5, 0.5)]
    assert (rollout.reward, rollout.temperature, rollout.episode) == (2.0, 0.9, 7)
    assert (rollout.num_tokens, rollout.num_sampled_tokens, rollout.num_context_tokens) == (7, 3, 4)


def test_branches_are_rollouts_of_their_own_and_no_token_is_trained_on_twice() -> None:
    recording = EpisodeRecording()
    recording.add([1], said(10))
    recording.add([1, 10, 2], said(11))
    recording.add([1, 10, 3], said(12))  # a retry with another observation
    recording.add([9, 9], said(13))  # a sub-agent
    first, second, third = PlayedEpisode(calls=recording.calls).rollouts(0, 1.0)
    assert (first.completion_token_ids, first.token_versions()) == ([10, 2, 11], [0, OBSERVED, 0])
    assert (second.completion_token_ids, second.token_versions()) == ([10, 3, 12], [OBSERVED, OBSERVED, 0])
    assert (third.prompt_token_ids, third.completion_token_ids) == ((9, 9), [13])


def test_the_same_prompt_in_another_role_is_another_conversation() -> None:
    recording = EpisodeRecording()
    recording.add([1], said(10), role="asks")
    recording.add([1, 10, 2], said(11), role="answers")
    played = PlayedEpisode(calls=recording.calls, reward=1.0, role_rewards={"answers": -1.0})
    asks, answers = played.rollouts(0, 1.0)
    assert (asks.role, asks.reward, asks.completion_token_ids) == ("asks", 1.0, [10])
    assert (answers.role, answers.reward, answers.completion_token_ids) == ("answers", -1.0, [11])


@settings(max_examples=200)
@given(st.data())
def test_every_sampled_token_is_trained_on_once_in_any_tree_of_calls(data: st.DataObject) -> None:
    """Few different tokens, so that many prompts begin with several earlier calls."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=3)
    recording = EpisodeRecording()
    for version in range(data.draw(st.integers(1, 8))):
        earlier = [(*call.prompt_token_ids, *call.completion.token_ids) for call in recording.calls]
        start = data.draw(st.sampled_from([(), *earlier]))
        recording.add((*start, *data.draw(tokens)), said(*data.draw(tokens), version=version))
    played = PlayedEpisode(calls=recording.calls)
    rollouts = played.rollouts(0, 1.0)
    trained = sorted(
        (span.version, rollout.completion_token_ids[i], rollout.behaviour_logprobs[i])
        for rollout in rollouts
        for span in rollout.version_spans
        for i in range(span.start, span.end)
    )
    sampled = sorted(
        (version, token_id, logprob)
        for version, call in enumerate(recording.calls)
        for token_id, logprob in zip(call.completion.token_ids, call.completion.logprobs, strict=True)
    )
    assert trained == sampled
    for rollout in rollouts:  # what each token was sampled after is what a call was given
        stream = (*rollout.prompt_token_ids, *rollout.completion_token_ids)
        for turn in rollout.turns:
            version = rollout.token_versions()[turn.start]
            before = stream[: len(rollout.prompt_token_ids) + turn.start]
            assert before == recording.calls[version].prompt_token_ids


def test_an_episode_is_the_same_after_a_checkpoint() -> None:
    recording = EpisodeRecording()
    recording.add([1], said(10))
    recording.reward(0, 0.25)
    played = PlayedEpisode(calls=recording.calls, reward=1.0, num_rewritten=2)
    assert PlayedEpisode.model_validate_json(played.model_dump_json()) == played


@pytest.mark.parametrize("reward", [float("nan"), 1e308])
def test_the_reward_of_a_turn_must_be_usable(reward: float) -> None:
    recording = EpisodeRecording()
    recording.add([1], said(10))
    with pytest.raises(ValueError, match=re.escape(f"finite number of at most 1e+09 in magnitude, not {reward}")):
        recording.reward(0, reward)
