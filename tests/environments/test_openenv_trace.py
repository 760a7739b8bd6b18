"""Episodes in OpenEnv's schema, against its fields as they are written there."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, ConfigDict, Field

from inflight.environments.adapters.openenv_trace import training_trace
from inflight.environments.recording import EpisodeRecording, PlayedEpisode
from inflight.wire import Completion, VersionSpan


class Turn(BaseModel):
    """The fields of ``TrainingTurn`` in openenv/core/harness/training.py, 0.10."""

    model_config = ConfigDict(strict=True, extra="forbid")

    node_id: str = Field(min_length=1)
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, object] = {}
    response: dict[str, object] = {}
    metadata: dict[str, object] = {}


class Trace(BaseModel):
    """The fields of ``TrainingTrace``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_version: int
    turns: list[Turn]


def played() -> PlayedEpisode:
    recording = EpisodeRecording()
    spans = (VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=3))
    for prompt, token_ids, role in (([1, 2], (10, 11, 12), "asks"), ([5], (13,), "answers"), ([6], (), "asks")):
        recording.add(
            prompt,
            Completion(
                index=0,
                token_ids=token_ids,
                logprobs=tuple(-token_id / 100 for token_id in token_ids),
                version_spans=spans if len(token_ids) == 3 else spans[: len(token_ids)],
                finish_reason="stop" if token_ids else "abort",
            ),
            role,
        )
    recording.reward(0, 0.25)
    return PlayedEpisode(calls=recording.calls, reward=1.0, role_rewards={"answers": -1.0})


def test_every_call_is_a_turn_whose_tokens_carry_their_versions() -> None:
    trace = Trace.model_validate_json(json.dumps(training_trace(played(), "e7")))
    assert trace.schema_version == 1
    first, second = trace.turns  # the call without a token is none
    assert (first.node_id, second.node_id) == ("e7-0", "e7-1")
    assert (first.prompt_token_ids, first.completion_token_ids) == ([1, 2], [10, 11, 12])
    assert first.per_token_logps == [-0.1, -0.11, -0.12]
    assert first.loss_mask == [0, 0, 1, 1, 1]
    assert first.metadata["version_spans"] == [
        {"version": 3, "start": 0, "end": 1},
        {"version": 4, "start": 1, "end": 3},
    ]
    assert [first.metadata[name] for name in ("role", "reward", "turn_reward")] == ["asks", 1.0, 0.25]
    assert [second.metadata[name] for name in ("role", "reward", "turn_reward")] == ["answers", -1.0, None]


def test_an_episode_that_failed_has_no_trace() -> None:
    with pytest.raises(ValueError, match="it hung"):
        training_trace(PlayedEpisode(failure="it hung", failure_kind="timeout"), "e7")
