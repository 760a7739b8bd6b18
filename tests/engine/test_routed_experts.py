"""The experts that completions come with are those that transformers' own routers choose for the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from inflight.errors import UnsupportedError
from inflight.model.checkpoints import stored_names
from inflight.rollouts import continuation, joined
from inflight.wire import Completion, GenerateRequest, InFlightPolicy, RoutedExperts
from tests.engine.reference import load_reference, make_request, random_prompt, serving
from tests.gates import slowed, until
from tests.models import make_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe") / "qwen3_moe", "qwen3_moe", num_layers=3)


def asking(request_id: str, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    sampling = {"ignore_eos": True, **sampling}
    return make_request(request_id, prompt, **sampling).model_copy(update={"routed_experts": True})


def numbers_of(record: RoutedExperts | None) -> np.ndarray:
    assert record is not None
    shape = (record.num_tokens, record.num_layers, record.num_chosen)
    return np.frombuffer(record.to_bytes(), np.dtype(record.dtype).newbyteorder("<")).reshape(shape)


@torch.no_grad()
def chosen_by_transformers(path: Path, token_ids: Sequence[int]) -> np.ndarray:
    """[T, L, K] from the router logits that transformers returns for a whole sequence."""
    model = load_reference(path)
    logits = model(torch.tensor([list(token_ids)]), output_router_logits=True).router_logits
    return np.stack([layer.topk(2, dim=-1).indices.numpy() for layer in logits], axis=1)


def assert_chosen(path: Path, prompt: Sequence[int], completion: Completion) -> None:
    sequence = [*prompt, *completion.token_ids]
    found = numbers_of(completion.routed_experts)
    expected = chosen_by_transformers(path, sequence)[:-1]
    assert found.shape == expected.shape
    assert np.array_equal(np.sort(found, axis=-1), np.sort(expected, axis=-1))


@pytest.mark.parametrize("drafts", [None, "siblings"])
def test_experts_of_prompts_and_completions_are_those_of_transformers(model_path: Path, drafts: str | None) -> None:
    async def run() -> None:
        prompts = [random_prompt(length, length) for length in (1, 7, 30)]
        async with serving(model_path, drafts=drafts) as endpoint:
            assert (await endpoint.capabilities()).routed_experts
            asked = [asking(f"{i}", prompt, n=2, max_tokens=12 + 9 * i, seed=i) for i, prompt in enumerate(prompts)]
            silent = make_request("silent", prompts[1], max_tokens=20)
            *answers, without = await asyncio.gather(*(endpoint.generate(it) for it in [*asked, silent]))
        assert without.completions[0].routed_experts is None
        for prompt, answer in zip(prompts, answers, strict=True):
            for completion in answer.completions:
                assert_chosen(model_path, prompt, completion)

    asyncio.run(run())


def test_a_stop_leaves_no_rows_of_tokens_behind_it(model_path: Path) -> None:
    async def run() -> None:
        prompt = random_prompt(5, 5)
        async with serving(model_path, drafts="siblings") as endpoint:
            (whole,) = (await endpoint.generate(asking("whole", prompt, max_tokens=30, temperature=0.0))).completions
            stop = whole.token_ids[17]
            request = asking("cut", prompt, max_tokens=30, temperature=0.0, n=3, stop_token_ids=[stop])
            for completion in (await endpoint.generate(request)).completions:
                assert completion.finish_reason == "stop"
                assert_chosen(model_path, prompt, completion)

    asyncio.run(run())


def test_an_update_leaves_the_experts_that_computed_earlier_tokens(model_path: Path, tmp_path: Path) -> None:
    async def run() -> None:
        changed = load_reference(make_model(tmp_path / "changed", "qwen3_moe", num_layers=3, seed=1))
        prompt = random_prompt(9, 9)
        async with serving(model_path) as endpoint:
            engine = endpoint._engine
            stack = contextlib.ExitStack()
            stack.enter_context(slowed(endpoint, after=20))
            running = asyncio.ensure_future(endpoint.generate(asking("r", prompt, max_tokens=400)))
            await until(lambda: engine.stats().num_tokens > 20)

            def update() -> None:
                engine.pauses.pause(InFlightPolicy.RECOMPUTE, lambda: None)
                stored = stored_names(changed)
                named = {stored[name]: parameter for name, parameter in changed.named_parameters()}
                engine.load(
                    engine.weights.prepare([(name, named[name].data) for name in engine.weights.by_name]),
                    1,
                    InFlightPolicy.RECOMPUTE,
                )
                engine.pauses.resume()

            await asyncio.wrap_future(engine.call(update))
            stack.close()
            (completion,) = (await running).completions
        assert [span.version for span in completion.version_spans] == [0, 1]
        end = len(prompt) + completion.version_spans[0].end - 1
        found = numbers_of(completion.routed_experts)
        assert len(found) == len(prompt) + completion.num_tokens - 1
        before = chosen_by_transformers(model_path, [*prompt, *completion.token_ids])[:end]
        assert np.array_equal(np.sort(found[:end], axis=-1), np.sort(before, axis=-1))

    asyncio.run(run())


def test_a_continued_completion_has_the_experts_of_both_parts(model_path: Path) -> None:
    async def run() -> None:
        prompt = random_prompt(6, 6)
        async with serving(model_path) as endpoint:
            request = asking("first", prompt, max_tokens=300)
            engine = endpoint._engine
            with slowed(endpoint, after=10):
                running = asyncio.ensure_future(endpoint.generate(request))
                await until(lambda: endpoint.stats().num_tokens > 10)
                await asyncio.wrap_future(engine.call(lambda: engine.scheduler.abort(["first"])))
            (first,) = (await running).completions
            (rest,) = (await endpoint.generate(continuation(request, first, "rest"))).completions
        whole = joined(first, rest)
        assert whole.num_tokens == 300
        assert_chosen(model_path, prompt, whole)

    asyncio.run(run())


def test_experts_are_refused_where_they_are_not_declared(model_path: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(make_model(tmp_path / "dense")) as endpoint:
            assert not (await endpoint.capabilities()).routed_experts
            with pytest.raises(UnsupportedError, match="does not support routed_experts"):
                await endpoint.generate(asking("r", (1, 2), max_tokens=2))
        async with serving(model_path) as endpoint:
            with pytest.raises(UnsupportedError, match="cannot be streamed"):
                await anext(aiter(endpoint.generate_stream(asking("r", (1, 2), max_tokens=2))))

    asyncio.run(run())
