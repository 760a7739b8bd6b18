"""GRPO in your own loop: an inference server, a trainer, and weights that change while the server keeps running.

inflight tiny-model models/tiny
INFLIGHT_TOKEN=secret inflight serve models/tiny
INFLIGHT_TOKEN=secret python examples/own_loop.py models/tiny http://127.0.0.1:8000
"""

import asyncio
import os
import sys

from inflight import HttpEndpoint, WeightPublisher, group_advantages, publish_weights
from inflight.losses import collate, prepare, preset
from inflight.types import Rollout, Sample
from inflight.wire import GenerateRequest, SamplingParams
from inflight_fsdp import create_worker

PROMPTS = ["first", "second", "third", "fourth"]


def reward(text: str) -> float:
    return text.count("e") / max(1, len(text))


async def sample_groups(url: str, step: int) -> list[list[Rollout]]:
    endpoint = HttpEndpoint(url, token=os.environ["INFLIGHT_TOKEN"])
    sampling = SamplingParams(n=8, max_tokens=32)
    requests = [
        GenerateRequest(request_id=f"{step}-{i}", prompt_token_ids=tuple(prompt.encode()), sampling=sampling)
        for i, prompt in enumerate(PROMPTS)
    ]
    responses = await asyncio.gather(*(endpoint.generate(request) for request in requests))
    await endpoint.aclose()
    return [
        [
            Rollout(
                prompt_token_ids=request.prompt_token_ids,
                completion_token_ids=completion.token_ids,
                behaviour_logprobs=completion.logprobs,
                version_spans=completion.version_spans,
                finish_reason=completion.finish_reason,
                reward=reward(bytes(token for token in completion.token_ids if token < 256).decode(errors="replace")),
                temperature=sampling.temperature,
            )
            for completion in response.completions
        ]
        for request, response in zip(requests, responses, strict=True)
    ]


def main(model: str, url: str, num_steps: int = 5) -> None:
    loss = preset("pipelinerl_paper").loss
    worker = create_worker({"model_path": model, "learning_rate": 1e-3})
    with WeightPublisher.connect([url], run_id="own-loop", token=os.environ["INFLIGHT_TOKEN"]) as publisher:
        publish_weights(worker, publisher)  # the server may still serve the weights of an earlier run
        for step in range(num_steps):
            samples = []
            for group in asyncio.run(sample_groups(url, step)):
                advantages = group_advantages([rollout.reward for rollout in group], "leave_one_out")
                for rollout, advantage in zip(group, advantages, strict=True):
                    num_tokens = len(rollout.completion_token_ids)
                    samples.append(Sample(rollout, [advantage] * num_tokens, [True] * num_tokens))
            batch = collate(samples)
            plan = prepare(loss, [batch])
            logprobs = worker.forward(batch)
            worker.backward(loss(batch, logprobs, plan).loss)
            result = worker.step()
            report = publish_weights(worker, publisher, in_flight="keep", deadline_s=30.0)
            mean_reward = sum(sample.rollout.reward for sample in samples) / len(samples)
            paused_ms = 1000 * report.endpoints[0].timings.paused_s
            print(f"version {result.version}: reward {mean_reward:.3f}, server paused for {paused_ms:.1f} ms")
    worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
