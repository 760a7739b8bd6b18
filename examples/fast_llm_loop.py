"""Samples for Fast-LLM's trainer, which updates the server while they are sampled.

inflight tiny-model models/tiny
redis-server --save ''
INFLIGHT_TOKEN=secret inflight serve models/tiny
INFLIGHT_TOKEN=secret inflight dialect fast_llm http://127.0.0.1:8000 --model models/tiny --group tcp://127.0.0.1:23456
INFLIGHT_TOKEN=secret python examples/fast_llm_loop.py http://127.0.0.1:8000 redis://127.0.0.1:6379 512

Fast-LLM reads the samples and broadcasts its weights: data.datasets.training and callbacks.streaming of its
configuration name the same Redis server, and callbacks.streaming.broadcast the group, with the backend gloo.
"""

import asyncio
import os
import sys

from inflight import GenerateRequest, SamplingParams, connect_endpoint, group_advantages
from inflight.dialects.fast_llm.redis_streams import RedisStreams
from inflight.dialects.fast_llm.samples import SampleStream, document_of
from inflight.types import Rollout

PROMPT = tuple(b"Once upon a time")
SAMPLING = SamplingParams(n=8, max_tokens=300, ignore_eos=True)
NUM_RUNNING = 4
"""Groups that are sampled at a time."""
MAX_AHEAD = 96
"""Documents by which sampling may be ahead of training. Versions count the documents that the trainer has seen."""


def reward_of(token_ids: tuple[int, ...]) -> float:
    return sum(token < 128 for token in token_ids) / len(token_ids)


async def main(url: str, redis_url: str, num_documents: int) -> None:
    endpoint = connect_endpoint(url, token=os.environ.get("INFLIGHT_TOKEN"))
    stream = SampleStream(RedisStreams(redis_url))
    groups = iter(range(num_documents // SAMPLING.n))
    num_spanning = 0

    async def sample_groups() -> None:
        nonlocal num_spanning
        num_seen = 0
        for group in groups:
            while (group + 1) * SAMPLING.n > num_seen + MAX_AHEAD:
                await asyncio.sleep(0.02)
                num_seen = (await endpoint.weight_version()).version
            request = GenerateRequest(request_id=f"group-{group}", prompt_token_ids=PROMPT, sampling=SAMPLING)
            completions = (await endpoint.generate(request)).completions
            rewards = [reward_of(completion.token_ids) for completion in completions]
            advantages = group_advantages(rewards, "mean")
            for completion, reward, advantage in zip(completions, rewards, advantages, strict=True):
                rollout = Rollout(
                    prompt_token_ids=PROMPT,
                    completion_token_ids=completion.token_ids,
                    behaviour_logprobs=completion.logprobs,
                    version_spans=completion.version_spans,
                    finish_reason=completion.finish_reason,
                    reward=reward,
                    temperature=SAMPLING.temperature,
                )
                await asyncio.to_thread(stream.write, document_of(rollout, advantage=advantage))
            spanning = [it for it in completions if len(it.version_spans) > 1]
            num_spanning += len(spanning)
            last = completions[0].version_spans[-1].version
            print(f"group {group}: reward {sum(rewards) / len(rewards):.3f}, version {last}, {len(spanning)} spanning")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_RUNNING):
            tasks.create_task(sample_groups())
    await endpoint.aclose()
    print(f"{num_spanning} of {num_documents} completions were sampled by more than one version")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
