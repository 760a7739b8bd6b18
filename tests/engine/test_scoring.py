"""Scores of given tokens by the embedded engine against plain transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import BusyError, InvalidRequestError, PoisonedError
from inflight.wire import ScoreRequest, ScoreResponse
from tests.engine.reference import (
    WAIT_S,
    assert_close,
    generate_all,
    load_reference,
    log_softmax_at,
    make_request,
    random_prompt,
    serving,
)
from tests.gates import until
from tests.models import FAMILIES, make_model


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("scored") / request.param, request.param, tied=False)


def score_request(i: int, length: int, start: int = 1, **fields: Any) -> ScoreRequest:
    return ScoreRequest(request_id=f"s{i}", token_ids=random_prompt(length, i), start=start, **fields)


@torch.no_grad()
def reference_logprobs(model: Any, request: ScoreRequest) -> torch.Tensor:
    """Float64 [N, V], from one forward of the whole sequence."""
    logits = model(torch.tensor([request.token_ids]), use_cache=False).logits[0, request.start - 1 : -1]
    return log_softmax_at(logits, 1.0)


async def score_all(endpoint: EmbeddedEndpoint, requests: list[ScoreRequest]) -> list[ScoreResponse]:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*map(endpoint.score, requests))


def test_scores_equal_a_plain_forward_whatever_else_is_scored_and_sampled(checkpoint: Path) -> None:
    shapes = [(2, 1), (3, 2), (40, 1), (40, 39), (63, 20), (200, 1), (300, 250), (7, 3)]
    requests = [
        score_request(
            i,
            length,
            start,
            top_k=i % 4,
            candidates=tuple((j % 256, (7 * j) % 256) for j in range(length - start)) if i % 2 else (),
        )
        for i, (length, start) in enumerate(shapes)
    ]

    async def run() -> list[ScoreResponse]:
        async with serving(checkpoint, max_concurrent=3) as endpoint:
            sampling = [make_request(f"g{i}", random_prompt(20, i), max_tokens=40, seed=i) for i in range(3)]
            scored, _ = await asyncio.gather(score_all(endpoint, requests), generate_all(endpoint, sampling))
            return scored

    model = load_reference(checkpoint)
    for request, response in zip(requests, asyncio.run(run()), strict=True):
        logprobs_NV = reference_logprobs(model, request)
        targets = torch.tensor(request.token_ids[request.start :])
        assert_close(response.logprobs, logprobs_NV.gather(1, targets[:, None])[:, 0].tolist())
        assert [(it.version, it.start, it.end) for it in response.version_spans] == [(0, 0, request.num_scored)]
        assert (response.request_id, response.start) == (request.request_id, request.start)
        assert len(response.top_logprobs) == (request.num_scored if request.top_k else 0)
        for row_V, ids, found in zip(logprobs_NV, response.top_token_ids, response.top_logprobs, strict=False):
            best = row_V.topk(request.top_k)
            assert_close(found, best.values.tolist())
            assert_close(found, row_V[list(ids)].tolist())
        assert len(response.candidate_logprobs) == len(request.candidates)
        for row_V, ids, found in zip(logprobs_NV, request.candidates, response.candidate_logprobs, strict=False):
            assert_close(found, row_V[list(ids)].tolist())


def test_scores_of_a_sampled_completion_are_its_behaviour_logprobs_at_temperature_1(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            prompt = random_prompt(30, 1)
            (response,) = await generate_all(endpoint, [make_request("g", prompt, max_tokens=50, ignore_eos=True)])
            (completion,) = response.completions
            scored = await endpoint.score(
                ScoreRequest(request_id="s", token_ids=(*prompt, *completion.token_ids), start=len(prompt))
            )
            assert_close(scored.logprobs, completion.logprobs)

    asyncio.run(run())


def test_long_requests_are_scored_in_tiles_of_logits(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.engines.embedded.scoring._MAX_LOGITS", 1000)
    request = score_request(0, 100, top_k=2)

    async def run() -> ScoreResponse:
        async with serving(model_dir) as endpoint:
            return await endpoint.score(request)

    response = asyncio.run(run())
    logprobs_NV = reference_logprobs(load_reference(model_dir), request)
    assert_close(response.logprobs, logprobs_NV.gather(1, torch.tensor(request.token_ids[1:])[:, None])[:, 0].tolist())
    assert len(response.top_token_ids) == 99


def test_a_request_that_fails_alone_does_not_fail_those_in_its_forward(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            queue: Any = endpoint._engine.scoring
            scored = queue._scored

            def failing(requests: list[ScoreRequest], version: int) -> list[ScoreResponse]:
                if any(request.request_id == "s1" for request in requests):
                    raise RuntimeError("it does not fit")
                return scored(requests, version)

            queue._scored = failing
            found = await asyncio.gather(
                *(endpoint.score(score_request(i, 10)) for i in range(3)), return_exceptions=True
            )
            assert [type(it) for it in found] == [ScoreResponse, InvalidRequestError, ScoreResponse]
            assert "request 's1' failed: RuntimeError: it does not fit" in str(found[1])

    asyncio.run(run())


def test_a_cancelled_request_is_not_scored_and_memory_is_released_once_none_waits(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            engine = endpoint._engine
            engine.pauses.paused_since = 0.0  # nothing is scored meanwhile
            waiting = asyncio.ensure_future(endpoint.score(score_request(0, 10)))
            await until(lambda: len(engine.scoring))
            with pytest.raises(BusyError, match="1 requests are running or waiting"):
                await endpoint.release_memory()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await endpoint.release_memory()
            assert engine.stats().num_scored_tokens == 0

    asyncio.run(run())


def test_requests_that_wait_while_weights_are_torn_fail(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            endpoint._engine.pauses.paused_since = 0.0
            waiting = asyncio.ensure_future(endpoint.score(score_request(0, 10)))
            await until(lambda: len(endpoint._engine.scoring))
            await endpoint.fail_requests()
            with pytest.raises(PoisonedError, match="weights were torn while the request waited"):
                await waiting

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": (1, 2), "start": 2}, "start is 2, but there are only 2 tokens"),
        ({"token_ids": (1, 2, 3), "candidates": ((1,),)}, "2 tokens are scored, but candidates has 1 rows"),
        ({"token_ids": (1, 2, 3), "candidates": ((1,), (1, 2))}, "rows of candidates have different lengths"),
        ({"token_ids": (1,)}, "at least 2 items"),
        ({"token_ids": (1, 2), "start": 0}, "greater than or equal to 1"),
        ({"token_ids": (1, 2), "top_k": 129}, "less than or equal to 128"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoreRequest(request_id="s", **fields)
