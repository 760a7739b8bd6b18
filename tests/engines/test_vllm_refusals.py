"""Requests that vLLM 0.33 refuses while it is paused, which earlier releases keep until it resumes. No engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeadlineError, InvalidRequestError, PoisonedError, ProtocolError, ReleasedError
from inflight.wire import AbortRequests, GenerateRequest, SamplingParams, ScoreRequest
from inflight_vllm import VllmEndpoint
from tests.engines.labelled_servers import ENGINE_PAUSED, LabelledVllm, Refused
from tests.engines.test_others_updates import require_fresh, run, sample, served_model
from tests.gates import until


class AbortableVllm(LabelledVllm):
    """Also lists the route that ends requests, and scores prompts."""

    def answer(self, path: str, body: Any) -> Any:
        found = super().answer(path, body)
        if path == "/openapi.json":
            found["paths"]["/abort_requests"] = None
        if path == "/inference/v1/generate" and isinstance(found, dict):
            found["prompt_logprobs"] = [None, *({str(token): {"logprob": -1.0}} for token in body["token_ids"][1:])]
        return found


@pytest.fixture
def server(tmp_path: Path) -> AbortableVllm:
    server = AbortableVllm(served_model(tmp_path))
    server.refusal = ENGINE_PAUSED
    return server


def test_requests_that_are_refused_during_a_pause_of_another_client_are_sampled_once_it_ends(
    server: AbortableVllm,
) -> None:
    async def call(client: Any) -> None:
        server.label = "1/s@run"
        require_fresh(await sample(client), 1)
        server.is_paused = True
        waiting = [asyncio.ensure_future(sample(client, n=2)) for _ in range(20)]
        await until(lambda: server.num_refused == 20)
        server.label, server.is_paused = "2/s@run", False
        for completions in await asyncio.gather(*waiting):
            require_fresh(completions, 2)
        assert server.num_refused == 20, "they are sent again when the server has resumed, not before"

    run(server, call)


def test_requests_that_wait_for_the_same_pause_share_the_calls_that_find_out_when_it_ends(
    server: AbortableVllm,
) -> None:
    async def call(client: Any) -> None:
        await client.capabilities()
        server.is_paused = True
        waiting = [asyncio.ensure_future(sample(client)) for _ in range(50)]
        await until(lambda: server.num_refused == 50)
        server.asked.clear()
        await until(lambda: server.asked.count("/is_paused") >= 4)
        server.is_paused = False
        await asyncio.gather(*waiting)
        assert server.asked.count("/is_paused") < 50

    run(server, call)


def test_a_request_that_arrives_just_after_a_pause_began_is_not_lost(server: AbortableVllm) -> None:
    """The client looks at the label, and the pause comes before the request."""

    async def call(client: Any) -> None:
        await client.capabilities()

        def paused() -> None:
            server.is_paused, server.on_label = True, None

        server.on_label = paused
        waiting = asyncio.ensure_future(sample(client))
        await until(lambda: server.num_refused)
        server.label, server.is_paused = "1/s@run", False
        require_fresh(await waiting, 1)

    run(server, call)


def test_completions_that_were_answered_are_kept_when_others_of_the_request_are_refused(server: AbortableVllm) -> None:
    """Four run at a time, so six are two requests of vLLM; the pause comes between them."""
    answer = server.answer

    def paused_behind_the_first(path: str, body: Any) -> Any:
        found = answer(path, body)
        if path == "/inference/v1/generate" and isinstance(found, dict) and not server.num_refused:
            server.is_paused = True
        return found

    async def call(client: Any) -> None:
        await client.capabilities()
        server.answer = paused_behind_the_first  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(sample(client, n=6))
        await until(lambda: server.num_refused == 1)
        num_sampled = server.num_sampled
        assert num_sampled in (2, 4)
        server.is_paused = False
        completions = await waiting
        require_fresh(completions, 0)
        assert [completion.index for completion in completions] == list(range(6))
        assert server.num_sampled == 6

    run(server, call)


@pytest.mark.parametrize(
    ("label", "error"), [("torn:1/s@run", PoisonedError), ("released:1/s@run", ReleasedError)], ids=["torn", "released"]
)
def test_a_pause_that_ends_in_torn_or_released_weights_ends_the_requests_that_wait(
    server: AbortableVllm, label: str, error: type[Exception]
) -> None:
    async def call(client: Any) -> None:
        server.label = "1/s@run"
        await client.capabilities()
        server.is_paused = True
        waiting = asyncio.ensure_future(sample(client))
        await until(lambda: server.num_refused)
        server.label = label
        with pytest.raises(error):
            await waiting

    run(server, call)


def test_a_refused_request_can_be_aborted_while_it_waits(server: AbortableVllm) -> None:
    async def call(client: Any) -> None:
        await client.capabilities()
        server.is_paused = True
        request = GenerateRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(n=2))
        waiting = asyncio.ensure_future(client.generate(request))
        await until(lambda: server.num_refused)
        await client.abort_requests(AbortRequests(request_ids=("a",)))
        completions = (await waiting).completions
        assert [(it.token_ids, it.finish_reason) for it in completions] == [((), "abort")] * 2

    run(server, call)


def test_refused_scores_are_computed_once_the_pause_ends_and_can_be_aborted(server: AbortableVllm) -> None:
    async def call(client: Any) -> None:
        await client.capabilities()
        server.is_paused = True
        kept, aborted = (
            asyncio.ensure_future(client.score(ScoreRequest(request_id=name, token_ids=(1, 2, 3)))) for name in "ab"
        )
        await until(lambda: server.num_refused == 2)
        await client.abort_requests(AbortRequests(request_ids=("b",)))
        with pytest.raises(InvalidRequestError, match="aborted before its tokens were scored"):
            await aborted
        server.label, server.is_paused = "4/s@run", False
        scores = await kept
        assert [span.version for span in scores.version_spans] == [4]

    run(server, call)


def test_a_pause_that_does_not_end_ends_the_request_at_its_deadline(server: AbortableVllm) -> None:
    async def call(client: Any) -> None:
        patient = VllmEndpoint(client.name, generate_timeout_s=0.3)
        try:
            await patient.capabilities()
            server.is_paused = True
            with pytest.raises(DeadlineError, match=r"paused and refused a request for 0\.3 s"):
                await sample(patient)
        finally:
            await patient.aclose()

    run(server, call)


@pytest.mark.parametrize(
    "refusal", [Refused(503, "Service Unavailable", "the queue is full"), Refused(500, "InternalServerError", "no")]
)
def test_other_refusals_are_errors_at_once(server: AbortableVllm, refusal: Refused) -> None:
    async def call(client: Any) -> None:
        await client.capabilities()
        server.refusal, server.is_paused = refusal, True
        with pytest.raises(ProtocolError, match=refusal.message):
            await sample(client)
        assert server.num_refused == 1

    run(server, call)
