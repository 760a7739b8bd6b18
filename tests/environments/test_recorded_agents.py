"""Requests that real agents have sent, without their texts, through the proxy again: each is one rollout."""

from __future__ import annotations

import pytest

from tests.environments.proxied import Open, on_script, post
from tests.real_agents.recorded_requests import CALLS, read, texts_of

PATHS = {"MessagesRequest": "/v1/messages", "ResponsesRequest": "/v1/responses"}


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_conversation_is_one_rollout(name: str) -> None:
    async def play(it: Open) -> None:
        for request in read(name):
            answer = await post(it.url.removesuffix("/v1"), PATHS[request["kind"]], request["body"])
            assert answer.status_code == 200, answer.text
        (rollout,) = it.episode.played(1.0).rollouts(0, 1.0)
        assert len(rollout.turns) == len(read(name)) == 2 and it.episode.num_rewritten == 0

    on_script(texts_of(name), play, streams=True)
