"""Episodes of several turns on real engines are trained on what was sampled, with an update between the turns too."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.contracts import Environment, Episode, InferenceEndpoint
from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.environments.play_loop import PlayLoop
from inflight.environments.playing import PlayingEpisode, play
from inflight.environments.proxy.run_server import ProxyServer
from inflight.environments.recording import PlayedEpisode
from inflight.environments.transcripts import ChatTemplate
from inflight.run.sampling.sampling_endpoint import SamplingEndpoint
from inflight.types import OBSERVED, TaskItem
from inflight.wire import Completion, GenerateRequest, SamplingParams
from tests.real_engines.servers import FINAL_NORM, RealEngine, publish, run

NUM_EPISODES = 4
NUM_TURNS = 3


class UpdatedBetweenTurns(Environment):
    """Waits, after the first turn of each episode, until the weights have been published again."""

    name = "updated_between_turns"

    def __init__(self) -> None:
        self.num_waiting = 0
        self.is_published = asyncio.Event()

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, f"item {index}")

    async def play(self, item: TaskItem, episode: Episode) -> float:
        conversation = episode.conversation()
        for turn in range(NUM_TURNS):
            await conversation.say(f"{item.prompt}, turn {turn}")
            if turn == 0:
                self.num_waiting += 1
                await self.is_published.wait()
        return 1.0


def test_turns_before_and_after_an_update_have_the_logprobs_and_versions_of_their_weights(engine: RealEngine) -> None:
    environment = UpdatedBetweenTurns()

    async def sample(endpoint: InferenceEndpoint) -> list[PlayedEpisode]:
        sampling_endpoint = SamplingEndpoint(endpoint)

        async def generate(request: GenerateRequest) -> Completion:
            (completion,) = await sampling_endpoint.sample(request)
            return completion

        async def played(index: int) -> PlayedEpisode:
            episode = PlayingEpisode(
                f"item-{index}",
                index,
                ChatTemplate(byte_tokenizer()),
                generate,
                SamplingParams(max_tokens=12),
                max_tokens=400,
            )
            return await play(environment, environment.item(index), episode, loop, 120.0)

        async def update() -> None:
            async with asyncio.timeout(120):
                while environment.num_waiting < NUM_EPISODES:  # noqa: ASYNC110 - in another thread
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(publish, publisher, changed, 2)
            environment.is_published.set()

        loop = PlayLoop()
        try:
            *episodes, _ = await asyncio.gather(*(played(index) for index in range(NUM_EPISODES)), update())
        finally:
            await loop.aclose()
        return episodes

    # Keys and values do not depend on the final norm, so each version has exact logprobs under any in-flight policy.
    changed = {**engine.tensors, FINAL_NORM: engine.tensors[FINAL_NORM] * 1.5}
    with engine.publisher() as publisher:
        publish(publisher, engine.tensors, 1)
        episodes = run(engine.endpoint(generate_timeout_s=150.0), sample)
        publish(publisher, engine.tensors, 3)

    for episode in episodes:
        assert episode.failure is None
        rollouts = episode.rollouts(0, 1.0)
        assert sum(len(rollout.turns) for rollout in rollouts) == NUM_TURNS
        versions = [rollout.token_versions()[turn.start] for rollout in rollouts for turn in rollout.turns]
        assert versions == [1, 2, 2]
        for rollout in rollouts:
            stream = torch.tensor([[*rollout.prompt_token_ids, *rollout.completion_token_ids]])
            expected = {
                1: logprobs_of(engine, engine.tensors, stream),
                2: logprobs_of(engine, changed, stream),
            }
            start = len(rollout.prompt_token_ids)
            for i, version in enumerate(rollout.token_versions()):
                if version != OBSERVED:
                    assert abs(rollout.behaviour_logprobs[i] - expected[version][start + i]) < 2e-3


def logprobs_of(engine: RealEngine, tensors: dict[str, torch.Tensor], stream: torch.Tensor) -> list[float]:
    """Return transformers' logprob of each token of a stream behind those before it, in float32; 0 for the first."""
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    assert model.load_state_dict(dict(tensors), strict=False).unexpected_keys == []
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(stream).logits[0, :-1], dim=-1)
    return [0.0, *logprobs_TV.gather(1, stream[0, 1:, None])[:, 0].tolist()]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_agent_behind_the_proxy_is_trained_on_the_tokens_that_the_engine_sampled(
    engine: RealEngine, streams: bool
) -> None:
    """The official client keeps its own history. Each turn is compared with what the engine answered."""
    record: list[tuple[GenerateRequest, Completion]] = []

    async def agent(endpoint: InferenceEndpoint) -> PlayingEpisode:
        sampling_endpoint = SamplingEndpoint(endpoint)

        async def generate(request: GenerateRequest) -> Completion:
            (completion,) = await sampling_endpoint.sample(request)
            record.append((request, completion))
            return completion

        async with ProxyServer("tiny") as proxy:
            episode = PlayingEpisode(
                *("agent", 0, ChatTemplate(byte_tokenizer()), generate, SamplingParams(max_tokens=12)),
                max_tokens=400,
                proxy=proxy.serve,
            )
            url = await episode.openai_url()
            async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
                messages: list[Any] = []
                for turn in range(NUM_TURNS):
                    messages.append({"role": "user", "content": f"turn {turn}"})
                    asked = {"model": "tiny", "messages": messages}
                    if streams:
                        parts = [part async for part in await client.chat.completions.create(**asked, stream=True)]
                        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
                    else:
                        said = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
                    messages.append({"role": "assistant", "content": said})
            await episode.aclose()
        return episode

    with engine.publisher() as publisher:
        publish(publisher, engine.tensors, 1)
        played = run(engine.endpoint(generate_timeout_s=150.0), agent).played(1.0)
    assert len(record) == NUM_TURNS
    turns = [(rollout, turn) for rollout in played.rollouts(0, 1.0) for turn in rollout.turns]
    for (rollout, turn), (request, completion) in zip(turns, record, strict=True):
        start, end = turn.start, turn.end
        before = (*rollout.prompt_token_ids, *rollout.completion_token_ids[:start])
        assert before == request.prompt_token_ids
        assert tuple(rollout.completion_token_ids[start:end]) == completion.token_ids
        assert tuple(rollout.behaviour_logprobs[start:end]) == completion.logprobs
        assert {*rollout.token_versions()[start:end]} == {span.version for span in completion.version_spans} == {1}
