"""A real pretrained model, SmolLM2-135M-Instruct: it chats, is published while it generates, agrees with the trainer,
and trains. `make test` fetches it; without it these tests fail.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from inflight import HttpEndpoint, WeightPublisher, publish_weights
from inflight.losses import collate
from inflight.types import Rollout, Sample
from inflight.wire import AbortRequests, Completion, GenerateRequest, SamplingParams
from inflight_fsdp import FsdpWorker, create_worker
from tests.gates import until
from tests.run.runs import RunProcess
from tests.servers import TOKEN, ServerProcess

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2"
PROMPT = tuple(range(1000, 1012))
TOLERANCE = 2e-3
"""Nats, float32 on both sides: 30 layers, a vocabulary of 49,152, and kernels that sum in different orders."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    assert (MODEL / "SOURCE").is_file(), f"{MODEL} is missing: run inflight pretrained-model {MODEL}"
    server = ServerProcess(MODEL, tmp_path_factory.mktemp("smollm2"), "--max-model-len", "512")
    server.wait_until_ready()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def worker() -> Iterator[FsdpWorker]:
    torch.set_num_threads(1)
    worker = create_worker({"model_path": str(MODEL), "learning_rate": 1e-5, "device": "cpu"})
    yield worker
    worker.close()


def trained_logprobs(worker: FsdpWorker, completion: Completion) -> torch.Tensor:
    """The worker's logprobs of a completion of `PROMPT`."""
    num_tokens = len(completion.token_ids)
    rollout = Rollout(
        PROMPT, completion.token_ids, completion.logprobs, completion.version_spans, completion.finish_reason, 0.0, 1.0
    )
    batch = collate([Sample(rollout, [1.0] * num_tokens, [True] * num_tokens)])
    return worker.forward(batch)[len(PROMPT) :]


def test_it_answers_in_a_chat(server: ServerProcess) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    assert "5" in answer["choices"][0]["message"]["content"], answer


def test_tokens_carry_the_version_that_sampled_them_and_the_logprobs_of_the_trainer(
    server: ServerProcess, worker: FsdpWorker
) -> None:
    """One publish while completions are running: the tokens before it have the old weights, those after it the new."""

    async def generate() -> tuple[Completion, ...]:
        """Completions of two versions, which are ended as soon as they have some tokens of the second one."""
        endpoint = HttpEndpoint(server.url, token=TOKEN)
        sampling = SamplingParams(n=2, max_tokens=480, seed=1, ignore_eos=True)
        request = GenerateRequest(request_id="long", prompt_token_ids=PROMPT, sampling=sampling)

        async def follow(request_id: str) -> None:
            """Return once the request, which is sampled along with the long one, has ended."""
            brief = sampling.model_copy(update={"n": 1, "max_tokens": 8})
            await endpoint.generate(GenerateRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=brief))

        async def is_running() -> bool:
            return (await endpoint.weight_version()).num_running > 0

        running = asyncio.create_task(endpoint.generate(request))
        await until(is_running, "the request does not run")
        await follow("before the publish")
        await asyncio.to_thread(publish)
        await follow("after the publish")
        await endpoint.abort_requests(AbortRequests(request_ids=("long",)))
        response = await running
        await endpoint.aclose()
        return tuple(response.completions)

    def publish() -> None:
        report = publish_weights(worker, publisher, in_flight="recompute", deadline_s=120.0)
        assert report.endpoints[0].timings is not None

    with WeightPublisher.connect([server.url], run_id="smollm2", token=TOKEN) as publisher:
        publish()
        request = GenerateRequest(
            request_id="before", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=24, seed=3)
        )

        async def sample() -> Completion:
            endpoint = HttpEndpoint(server.url, token=TOKEN)
            response = await endpoint.generate(request)
            await endpoint.aclose()
            return response.completions[0]

        before = asyncio.run(sample())
        old_T = trained_logprobs(worker, before)
        assert float((old_T.detach() - torch.tensor(before.logprobs)).abs().max()) < TOLERANCE
        worker.backward(-old_T.sum())
        assert worker.step().version == 1
        completions = asyncio.run(generate())
    for completion in completions:
        spans = completion.version_spans
        assert completion.finish_reason == "abort"
        assert [span.version for span in spans] == [0, 1]
        assert all(span.end - span.start >= 4 for span in spans)
        assert spans[0].start == 0 and spans[0].end == spans[1].start and spans[1].end == len(completion.token_ids)
        new_T = trained_logprobs(worker, completion).detach()
        differences_T = (new_T - torch.tensor(completion.logprobs)).abs()
        assert float(differences_T[spans[1].start :].max()) < TOLERANCE
        assert float(differences_T[: spans[0].end].max()) > TOLERANCE


@pytest.mark.timeout(420)
def test_the_demo_trains_it_for_two_steps(tmp_path: Path) -> None:
    words = ("--run.num_steps", "2", "--sampling.group_size", "2", "--sampling.max_tokens", "12")
    words += ("--servers.max_concurrent", "4", "--train.tokens_per_worker", "100", "--evaluation.num_items", "2")
    words += ("--task.answer_pattern", "(\\d)", "--train.train_on_equal_rewards", "true")
    run = RunProcess(tmp_path, MODEL, *words, config=ROOT / "examples" / "sums.toml")
    try:
        assert run.wait(300) == 0, run.output()
    finally:
        run.kill()
    rows = run.rows()
    assert [row["version"] for row in rows] == [1, 2]
    assert all(0.5 < row["effective_sample_size"] <= 1 + 1e-6 for row in rows)
    assert rows[0]["mismatch_k3"] < 0.05  # bfloat16 on both sides
    lines = (run.directory / "evaluation.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [0, 0, 2, 2]
