"""Behaviour logprobs and greedy tokens of the embedded engine against plain transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from inflight.wire import GenerateRequest
from tests.engine.reference import (
    assert_close,
    forward_logprobs,
    generate_all,
    load_reference,
    make_request,
    random_prompt,
    serving,
)
from tests.models import FAMILIES, make_model

CHECKPOINTS = [(family, (i + j) % 2 == 1) for j in range(2) for i, family in enumerate(FAMILIES)]
"""Every family with tied embeddings and without."""


@pytest.fixture(
    scope="module",
    params=[
        *CHECKPOINTS[: len(FAMILIES)],
        *(pytest.param(it, marks=pytest.mark.exhaustive) for it in CHECKPOINTS[len(FAMILIES) :]),
    ],
    ids=str,
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, tied = request.param
    return make_model(tmp_path_factory.mktemp("checkpoint") / family, family, tied=tied)


def ragged_requests() -> list[GenerateRequest]:
    """Prompts of 1 to 300 tokens; completions that cross capacities of 64, 128, 256 and 512; more than 6 sequences."""
    shapes = [(1, 70, 1), (2, 5, 2), (3, 1, 3), (40, 60, 2), (63, 3, 1), (64, 65, 1), (120, 20, 2), (128, 2, 1)]
    shapes += [(200, 80, 1), (255, 4, 1), (300, 230, 1), (7, 130, 1)]
    temperatures = (1.0, 0.7, 1.5, 1.0)
    return [
        make_request(
            f"r{i}",
            random_prompt(prompt, i),
            max_tokens=length,
            n=n,
            temperature=temperatures[i % 4],
            ignore_eos=True,
            seed=i,
        )
        for i, (prompt, length, n) in enumerate(shapes)
    ]


def test_behaviour_logprobs_equal_a_plain_forward_over_ragged_sequences(checkpoint: Path) -> None:
    requests = ragged_requests()

    async def run() -> list:
        async with serving(checkpoint, max_concurrent=6) as endpoint:
            return await generate_all(endpoint, requests)

    responses = asyncio.run(run())
    model = load_reference(checkpoint)
    for request, response in zip(requests, responses, strict=True):
        assert [c.index for c in response.completions] == list(range(request.sampling.n))
        for completion in response.completions:
            assert len(completion.token_ids) == request.sampling.max_tokens
            assert completion.finish_reason == "length"
            assert [(s.version, s.start, s.end) for s in completion.version_spans] == [
                (0, 0, len(completion.token_ids))
            ]
            expected = forward_logprobs(
                model, request.prompt_token_ids, completion.token_ids, request.sampling.temperature
            )
            assert_close(completion.logprobs, expected)


def test_greedy_tokens_equal_those_of_transformers_generate(checkpoint: Path) -> None:
    prompts = [random_prompt(length, 3) for length in (1, 2, 17, 62, 130)]

    async def run() -> list:
        async with serving(checkpoint, max_concurrent=3) as endpoint:
            return await generate_all(
                endpoint,
                [make_request(f"r{i}", p, max_tokens=80, temperature=0.0) for i, p in enumerate(prompts)],
            )

    responses = asyncio.run(run())
    model = load_reference(checkpoint)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False, eos_token_id=257
        )
        completion = response.completions[0]
        assert list(completion.token_ids) == generated[0, len(prompt) :].tolist()
        # Greedy decoding reports the log-softmax of the unscaled logits.
        assert_close(completion.logprobs, forward_logprobs(model, prompt, completion.token_ids))


@pytest.mark.parametrize(("num_prompt", "n"), [(1, 2), (2, 2), (3, 3), (5, 5), (4, 2), (2, 7)])
def test_first_tokens_of_a_lone_group_come_from_the_end_of_its_prompt(model_dir: Path, num_prompt: int, n: int) -> None:
    prompt = random_prompt(num_prompt, 11)

    async def run() -> list:
        async with serving(model_dir) as endpoint:
            return await generate_all(endpoint, [make_request("group", prompt, n=n, max_tokens=3, ignore_eos=True)])

    (response,) = asyncio.run(run())
    model = load_reference(model_dir)
    assert len(response.completions) == n
    for completion in response.completions:
        assert_close(completion.logprobs, forward_logprobs(model, prompt, completion.token_ids))


def test_one_sequence_crosses_every_capacity_up_to_the_end_of_the_context(model_dir: Path) -> None:
    prompt = random_prompt(3, 5)

    async def run() -> list:
        async with serving(model_dir) as endpoint:
            return await generate_all(endpoint, [make_request("long", prompt, ignore_eos=True, seed=1)])

    (response,) = asyncio.run(run())
    completion = response.completions[0]
    assert len(prompt) + len(completion.token_ids) == 1024
    assert completion.finish_reason == "length"
    assert_close(completion.logprobs, forward_logprobs(load_reference(model_dir), prompt, completion.token_ids))


def test_a_context_that_is_no_power_of_two_is_filled_to_its_last_position(model_dir: Path) -> None:
    prompts = [random_prompt(length, 6) for length in (1, 64, 98, 99)]

    async def run() -> list:
        async with serving(model_dir, max_model_len=100) as endpoint:
            assert (await endpoint.capabilities()).max_model_len == 100
            return await generate_all(
                endpoint, [make_request(f"r{i}", p, ignore_eos=True) for i, p in enumerate(prompts)]
            )

    model = load_reference(model_dir)
    for prompt, response in zip(prompts, asyncio.run(run()), strict=True):
        completion = response.completions[0]
        assert len(completion.token_ids) == 100 - len(prompt)
        assert_close(completion.logprobs, forward_logprobs(model, prompt, completion.token_ids))


def test_prompts_beyond_one_prefill_are_admitted_over_several_steps(model_dir: Path) -> None:
    prompts = [random_prompt(1000, seed) for seed in range(7)]

    async def run() -> list:
        async with serving(model_dir) as endpoint:
            return await generate_all(
                endpoint, [make_request(f"r{i}", p, max_tokens=6, ignore_eos=True) for i, p in enumerate(prompts)]
            )

    model = load_reference(model_dir)
    for prompt, response in zip(prompts, asyncio.run(run()), strict=True):
        completion = response.completions[0]
        assert_close(completion.logprobs, forward_logprobs(model, prompt, completion.token_ids))


def test_a_bfloat16_checkpoint_is_served_as_stored_and_as_float32_when_asked(tmp_path: Path) -> None:
    path = make_model(tmp_path / "bf16", dtype=torch.bfloat16)
    prompt = random_prompt(20, 2)

    async def run(dtype: str | None) -> tuple[str, list]:
        async with serving(path, dtype=dtype) as endpoint:
            request = make_request("r", prompt, max_tokens=20, ignore_eos=True, seed=1)
            return (await endpoint.capabilities()).dtype, await generate_all(endpoint, [request])

    model = load_reference(path)
    # bfloat16 has 8 bits of mantissa: logits of about 10 are off by some 0.1.
    for dtype, tolerance in ((None, 0.5), ("float32", 1e-4)):
        declared, (response,) = asyncio.run(run(dtype))
        assert declared == (dtype or "bfloat16")
        completion = response.completions[0]
        assert_close(completion.logprobs, forward_logprobs(model, prompt, completion.token_ids), tolerance)
