"""The oracle of version spans over HTTP: weights whose final norm is zero give every token the same probability.

A token's logprob is then -ln(vocabulary) exactly if these weights sampled it, and the reported spans must agree token
by token. The layers stay unchanged, so keys and values are those of the true weights under every policy.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import pytest
import torch

from inflight import WeightPublisher, publish_weights
from inflight.http.client import HttpEndpoint
from inflight.wire import Completion, GenerateResponse
from tests.engine.reference import (
    VOCAB_SIZE,
    CheckpointWorker,
    assert_close,
    forward_logprobs,
    load_reference,
    make_request,
    random_prompt,
)
from tests.gates import BrakedServer
from tests.servers import TOKEN

NUM_REQUESTS = 18
UNIFORM = -math.log(VOCAB_SIZE)


@pytest.fixture
def server(model_dir: Path, tmp_path: Path) -> Iterator[BrakedServer]:
    server = BrakedServer(model_dir, tmp_path, "--max-concurrent", "16")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_every_token_has_the_logprob_of_the_version_that_its_span_names(
    server: BrakedServer, model_dir: Path, policy: str
) -> None:
    model = load_reference(model_dir)
    true = {name: parameter.detach() for name, parameter in model.named_parameters()}
    zeroed = {**true, "model.norm.weight": torch.zeros_like(true["model.norm.weight"])}
    # Two more requests than slots, some in groups; of so many tokens that all live through both updates.
    requests = [
        make_request(
            f"r{i}", random_prompt(1 + 11 * i, i), max_tokens=300, ignore_eos=True, temperature=(1.0, 0.7)[i % 2]
        )
        for i in range(NUM_REQUESTS)
    ]
    answers: Future[list[GenerateResponse]] = Future()

    async def generate() -> list[GenerateResponse]:
        endpoint = HttpEndpoint(server.url)
        try:
            async with asyncio.timeout(60):
                return await asyncio.gather(*(endpoint.generate(request) for request in requests))
        finally:
            await endpoint.aclose()

    def work() -> None:
        try:
            answers.set_result(asyncio.run(generate()))
        except BaseException as error:
            answers.set_exception(error)

    with WeightPublisher.connect([server.url], run_id="run", token=TOKEN) as publisher:
        Thread(target=work, daemon=True).start()
        with server.brake:
            server.brake.wait_for_forwards(20)  # one for each prompt, and some for all together
            for version, tensors in ((1, zeroed), (2, true)):
                worker = CheckpointWorker(tensors, version)
                report = publish_weights(worker, publisher, in_flight=policy, deadline_s=30)  # type: ignore[arg-type]
                assert report is not None
                assert report.applied_everywhere
                server.brake.put_on()
                server.brake.wait_for_forwards(3)
        completions = [response.completions[0] for response in answers.result(60)]
    with_all_versions = 0
    for request, completion in zip(requests, completions, strict=True):
        Completion.model_validate(completion.model_dump())
        versions = [span.version for span in completion.version_spans]
        assert versions == sorted(versions)
        with_all_versions += versions == [0, 1, 2]
        expected = forward_logprobs(model, request.prompt_token_ids, completion.token_ids, request.sampling.temperature)
        for span in completion.version_spans:
            if span.version == 1:
                expected[span.start : span.end] = [UNIFORM] * (span.end - span.start)
        assert_close(completion.logprobs, expected)
        for i in (i for span in completion.version_spans if span.version == 1 for i in range(span.start, span.end)):
            # float32: the logits are exactly 0, and the logarithm of 258 is rounded once or twice.
            assert completion.logprobs[i] == pytest.approx(UNIFORM, abs=1e-6)
    assert with_all_versions >= 16
