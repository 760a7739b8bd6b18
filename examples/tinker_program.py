"""Reinforcement learning with the SDK of Tinker against a server of your own, which samples while weights change.

pip install tinker
INFLIGHT_TOKEN=secret inflight tinker models/tiny --name tiny
TINKER_BASE_URL=http://127.0.0.1:8080 TINKER_API_KEY=tml-secret python examples/tinker_program.py tiny letters
"""

import argparse
import asyncio
import json
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker import types

GROUP_SIZE = 8


def letters() -> tuple[str, Any]:
    """A prompt, and a reward for the letter e."""
    return random.choice(["first", "second", "third"]), lambda text: text.count("e") / max(1, len(text))


def sums() -> tuple[str, Any]:
    """A sum of two digits, and a reward for the right number after an explanation of at least 70 characters."""
    a, b = random.randint(1, 9), random.randint(1, 9)

    def reward(text: str) -> float:
        found = re.fullmatch(r".{70,}?(?<!\d)(\d+)\D*", text, re.DOTALL)
        return float(found is not None and int(found[1]) == a + b)

    return f"Explain how to solve it. Calculate {a} + {b}.", reward


TASKS = {"letters": (letters, 128), "sums": (sums, 64)}
"""Each task with the tokens that a completion may have."""


async def sample_group(sampler: Any, tokenizer: Any, task: str) -> dict[str, Any]:
    """Sample a group of completions; return their rewards, sequence ids and training data."""
    make_item, max_tokens = TASKS[task]
    prompt, reward = make_item()
    if tokenizer.chat_template:
        message = {"role": "user", "content": prompt}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        prompt_ids = tokenizer.encode(prompt)
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[tokenizer.eos_token_id])
    answer = await sampler.sample(types.ModelInput.from_ints(prompt_ids), GROUP_SIZE, params)
    texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in answer.sequences]
    rewards = [reward(text) for text in texts]
    data = []
    for sequence, mine in zip(answer.sequences, rewards, strict=True):
        advantage = mine - (sum(rewards) - mine) / (GROUP_SIZE - 1)
        if advantage:
            data.append(make_datum(prompt_ids, list(sequence.tokens), list(sequence.logprobs), advantage))
    return {"data": data, "rewards": rewards, "ids": [sequence.sequence_id for sequence in answer.sequences]}


def make_datum(prompt: list[int], completion: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """Return a datum of which only the completion counts."""
    token_ids, before = prompt + completion, [0.0] * (len(prompt) - 1)
    inputs = {"logprobs": before + logprobs, "advantages": before + [advantage] * len(completion)}
    tensors = {name: types.TensorData(data=it, dtype="float32", shape=[len(it)]) for name, it in inputs.items()}
    targets = types.TensorData(data=token_ids[1:], dtype="int64", shape=[len(token_ids) - 1])
    return types.Datum(
        model_input=types.ModelInput.from_ints(token_ids[:-1]), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def versions_of(ids: list[str]) -> Iterator[set[int]]:
    """Ask inflight's own route which versions of the weights sampled each sequence."""
    headers = {"X-API-Key": os.environ["TINKER_API_KEY"]}
    with httpx.Client(base_url=os.environ["TINKER_BASE_URL"], headers=headers) as client:
        for sequence_id in ids:
            spans = client.get(f"/api/v1/inflight/sequences/{sequence_id}").raise_for_status().json()["version_spans"]
            yield {span["version"] for span in spans}


async def train(service: tinker.ServiceClient, options: argparse.Namespace) -> None:
    random.seed(options.seed)
    training = await service.create_lora_training_client(options.model, rank=options.rank, seed=options.seed)
    tokenizer = training.get_tokenizer()
    sampler = await training.save_weights_and_get_sampling_client(kind="inflight")
    adam = types.AdamParams(learning_rate=options.learning_rate, beta1=0.9, beta2=0.95, grad_clip_norm=1.0)
    running: set[asyncio.Task[dict[str, Any]]] = set()
    began, groups = time.monotonic(), []

    def keep_sampling() -> None:
        while len(running) < options.in_flight:
            running.add(asyncio.create_task(sample_group(sampler, tokenizer, options.task)))

    for step in range(options.steps):
        # A group with equal rewards teaches nothing; others are sampled in its place, up to four times as many.
        while sum(bool(group["data"]) for group in groups) < options.groups and len(groups) < 4 * options.groups:
            keep_sampling()
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            groups.extend(task.result() for task in done)
        data = [datum for group in groups for datum in group["data"]]
        if not data:
            print(f"every completion of {len(groups)} groups has the same reward: nothing is left to learn")
            break
        keep_sampling()  # while the model trains
        calls = training.forward_backward(data, "cispo"), training.optim_step(adam)
        await asyncio.gather(*calls)
        # Running generations continue with these weights.
        sampler = await training.save_weights_and_get_sampling_client(kind="inflight")
        versions = list(versions_of([it for group in groups for it in group["ids"]]))
        rewards = [reward for group in groups for reward in group["rewards"]]
        row = {
            "step": step,
            "seconds": round(time.monotonic() - began, 1),
            "reward": round(sum(rewards) / len(rewards), 3),
            "completions": len(rewards),
            "several_versions": round(sum(len(it) > 1 for it in versions) / len(versions), 3),
        }
        groups = []
        print(json.dumps(row), flush=True)
        if options.log:
            with options.log.open("a") as log:
                print(json.dumps(row), file=log)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    print((await training.save_state("final")).path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of the base model, as the server has it")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=2, help="groups of a step whose rewards differ")
    parser.add_argument("--in-flight", type=int, default=8, help="groups that are sampled at a time")
    parser.add_argument("--rank", type=int, default=8, help="rank of the LoRA; 0 trains all weights")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="append a line of JSON for each step to this file")
    options, service, status = parser.parse_args(), tinker.ServiceClient(), "errored"
    try:
        asyncio.run(train(service, options))
        status = "success"
    finally:
        service.close(status).result()  # makes room for another model at once, not after a minute


if __name__ == "__main__":
    main()
