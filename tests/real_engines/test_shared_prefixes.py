"""A long prefix that many requests share, while another process publishes: nothing of older weights is left in it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inflight.conformance.endpoint.subject import TOLERANCES
from inflight.conformance.reference import ReferenceCheckpoint, ReferenceWeights, chosen, distribution
from inflight.contracts import InferenceEndpoint
from inflight.http.kinds import connect_endpoint
from inflight.wire import Completion, GenerateRequest, InFlightPolicy, SamplingParams
from tests.real_engines.servers import RealEngine, python_of
from tests.servers import TOKEN, ServerProcess
from tests.zygote import python

TOLERANCE = TOLERANCES["float32"]
VOCAB_SIZE = 258
PREFIX = tuple(torch.randint(VOCAB_SIZE - 2, (330,), generator=torch.Generator().manual_seed(5)).tolist())
"""Longer than the largest page of an engine's cache, which is 256."""
NUM_RUNNING = 4
NUM_UPDATES = 3
_serial = itertools.count()


@dataclass(frozen=True)
class Served:
    """Where a server is reached, and with what."""

    url: str
    token: str

    def client(self) -> InferenceEndpoint:
        return connect_endpoint(self.url, token=self.token or None, control_timeout_s=60.0, generate_timeout_s=300.0)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> ReferenceCheckpoint:
    return ReferenceCheckpoint(tiny_model)


@pytest.fixture(
    scope="module",
    params=[
        "attached vllm",
        "attached sglang",
        "served sglang",
        pytest.param("served vllm", marks=pytest.mark.exhaustive),
    ],
)
def server(
    request: pytest.FixtureRequest,
    engine_of: Callable[[str], RealEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """An engine's own server, or another one with the contract in front of it."""
    how, name = request.param.split()
    engine = engine_of(name)
    if how == "attached":
        yield Served(engine.url, "")
        return
    words = ["--engine", engine.kind.name, "--python", python_of(engine.kind.name), "--dtype", "float32"]
    process = ServerProcess(engine.model, tmp_path_factory.mktemp("served"), *words)
    try:
        process.wait_until_ready(240.0)
        yield Served(process.url, TOKEN)
    finally:
        process.end()


class Publishing:
    """A publisher in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, reference: ReferenceCheckpoint) -> None:
        self._process = process
        self._directory = directory
        self._reference = reference
        self.weights: dict[int, ReferenceWeights] = {0: reference.weights}
        """By version."""

    async def publish(self, version: int, policy: InFlightPolicy) -> None:
        weights = self._reference.perturbed(f"of version {version}", seed=version)
        self.weights[version] = weights
        file = self._directory / f"{version}.safetensors"
        save_file(dict(weights.tensors), file, {"format": "pt"})
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"file": str(file), "version": version, "in_flight": policy}
        self._process.stdin.write(f"{json.dumps(order)}\n".encode())
        assert (await self._process.stdout.readline()).strip() == b"published"


@contextlib.asynccontextmanager
async def publishing(server: Served, directory: Path, reference: ReferenceCheckpoint) -> AsyncIterator[Publishing]:
    command = [python(), "-m", "tests.real_engines.publishing_program", server.url, f"run-{directory.name}"]
    process = await asyncio.create_subprocess_exec(
        *command, server.token, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Publishing(process, directory, reference)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def request(last: int, max_tokens: int, n: int = 1) -> GenerateRequest:
    """A request that shares all of its prompt but the last token."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
    return GenerateRequest(
        request_id=f"shared-{next(_serial)}", prompt_token_ids=(*PREFIX, last % VOCAB_SIZE), sampling=sampling
    )


Answers = list[tuple[GenerateRequest, Completion]]


async def keep_running(client: InferenceEndpoint, answers: Answers, last: int, enough: asyncio.Event) -> None:
    """Sample one long completion after another behind the shared prefix, until it is enough."""
    while not enough.is_set():
        asked = request(last, 300)
        answers.append((asked, (await client.generate(asked)).completions[0]))


def difference(reference: ReferenceCheckpoint, logits_TV: torch.Tensor, completion: Completion) -> float:
    expected_T = chosen(distribution(logits_TV), completion.token_ids)
    return float((torch.tensor(completion.logprobs, dtype=torch.float64) - expected_T).abs().max())


def difference_of_spans(
    reference: ReferenceCheckpoint,
    weights: Mapping[int, ReferenceWeights],
    asked: GenerateRequest,
    completion: Completion,
    policy: InFlightPolicy,
) -> float:
    """Return by how much a completion that several versions sampled differs from what the policy says."""
    prompt, spans, ids = asked.prompt_token_ids, completion.version_spans, completion.token_ids
    if policy is InFlightPolicy.KEEP:
        return difference(reference, reference.kept_logits(weights, spans, prompt, ids), completion)
    parts = [reference.logits(weights[span.version], prompt, ids)[span.start : span.end] for span in spans]
    return difference(reference, torch.cat(parts), completion)


@pytest.mark.parametrize("policy", [InFlightPolicy.KEEP, InFlightPolicy.RECOMPUTE], ids=str)
def test_a_shared_prefix_is_what_the_policy_says_while_another_process_publishes(
    server: Served, reference: ReferenceCheckpoint, policy: InFlightPolicy, tmp_path: Path
) -> None:
    answers: Answers = []
    between: list[tuple[int, GenerateRequest, Completion]] = []

    async def main() -> dict[int, ReferenceWeights]:
        actor = server.client()
        async with contextlib.aclosing(actor), publishing(server, tmp_path, reference) as publisher:
            first = (await actor.weight_version()).version
            # What an earlier test left there is not known: begin with a version that is.
            await publisher.publish(first + 1, policy)
            enough = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for i in range(NUM_RUNNING):
                    tasks.create_task(keep_running(actor, answers, i, enough))
                for version in range(first + 2, first + 2 + NUM_UPDATES):
                    await asyncio.sleep(0.3)
                    await publisher.publish(version, policy)
                    for last in (10, 11):
                        asked = request(version * 20 + last, 8)
                        between.append((version, asked, (await actor.generate(asked)).completions[0]))
                enough.set()
            return publisher.weights

    weights = asyncio.run(main())
    gaps: list[float] = []
    for version, asked, completion in between:
        assert [span.version for span in completion.version_spans] == [version]
        logits_TV = reference.logits(weights[version], asked.prompt_token_ids, completion.token_ids)
        gaps.append(difference(reference, logits_TV, completion))
    spans = [difference_of_spans(reference, weights, *answer, policy) for answer in answers]
    print(f"{len(gaps)} prompts, by update: {gaps}; {len(spans)} that ran: {max(spans):.2g}")
    assert max(gaps) < TOLERANCE, gaps
    assert max(spans) < TOLERANCE, spans
    assert any(len(completion.version_spans) > 1 for _, completion in answers)


def test_completions_that_wait_in_the_engine_while_weights_change_find_no_older_prefix(
    server: Served, reference: ReferenceCheckpoint, tmp_path: Path
) -> None:
    """More completions than run at a time: the last ones begin under weights that came after they were asked for."""

    async def main() -> tuple[GenerateRequest, tuple[Completion, ...], dict[int, ReferenceWeights]]:
        actor = server.client()
        async with contextlib.aclosing(actor), publishing(server, tmp_path, reference) as publisher:
            first = (await actor.weight_version()).version + 1
            await publisher.publish(first, InFlightPolicy.KEEP)
            capacity = (await actor.capabilities()).max_concurrent_sequences
            asked = request(0, 600, n=capacity + NUM_RUNNING)
            sampling = asyncio.ensure_future(actor.generate(asked))
            while (await actor.weight_version()).num_running < capacity:
                assert not sampling.done()
                await asyncio.sleep(0.01)
            await publisher.publish(first + 1, InFlightPolicy.KEEP)
            return asked, (await sampling).completions, publisher.weights

    asked, completions, weights = asyncio.run(main())
    versions = [completion.version_spans[0].version for completion in completions]
    gaps = [difference_of_spans(reference, weights, asked, c, InFlightPolicy.KEEP) for c in completions]
    assert len(set(versions)) == 2, "nothing waited in the engine while weights changed"
    assert max(gaps) < TOLERANCE, list(zip(versions, gaps, strict=True))
