"""Drafts on vLLM itself, behind ``inflight serve --drafts history``: faster or slower, and nothing else changes."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from inflight.base.tasks import cancel_and_wait
from inflight.conformance.reference import ReferenceCheckpoint, chosen, distribution
from inflight.contracts import DraftingEndpoint, InferenceEndpoint
from inflight.errors import UnsupportedError
from inflight.http.kinds import connect_endpoint
from inflight.rollouts import continuation
from inflight.weights.send.publisher import WeightPublisher
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import Completion, DraftHistory, GenerateRequest, InFlightPolicy, PromptHistory, SamplingParams
from tests.gates import until
from tests.real_engines.servers import is_uniform, muted, publish, python_of, run
from tests.selection import first_of_each
from tests.servers import TOKEN, ServerProcess

PROMPT = tuple(b"what the drafts are for")
TOLERANCE = 1e-4
"""Of logprobs in float32: vLLM's kernels sum in another order than transformers'. Differences of 2e-6 were seen."""
NUM_DRAWS = 1024
NUM_TOKENS = 4
LEAST_P = 1e-5
_serial = itertools.count()


class Server:
    """The contract, served in front of vLLM."""

    def __init__(self, process: ServerProcess, engine_log: Path) -> None:
        self._process = process
        self.engine_log = engine_log

    def client(self) -> DraftingEndpoint:
        client = connect_endpoint(self._process.url, token=TOKEN, control_timeout_s=60.0, generate_timeout_s=300.0)
        assert isinstance(client, DraftingEndpoint)
        return client

    def count(self, metric: str) -> float:
        """Return one of vLLM's counters of drafts."""
        found = re.search(r"vllm at (http://\S+?)\)", self._process.log())
        assert found is not None, self._process.log()
        with urllib.request.urlopen(f"{found[1]}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith(f"vllm:spec_decode_{metric}_total{{")]
        assert len(values) == 1, values
        return float(values[0])


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("drafting")
    engine_log = directory / "engine.log"
    words = ["--engine", "vllm", "--python", python_of("vllm"), "--dtype", "float32", "--drafts", "history"]
    words += ["--start-timeout", "900", "--log", str(engine_log)]
    process = ServerProcess(tiny_model, directory, *words)
    try:
        process.wait_until_ready(900.0)
        yield Server(process, engine_log)
    finally:
        process.end()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> ReferenceCheckpoint:
    return ReferenceCheckpoint(tiny_model)


def request(num_tokens: int, prompt: Sequence[int] = PROMPT, n: int = 1, **sampling: float) -> GenerateRequest:
    params = SamplingParams.model_validate({"max_tokens": num_tokens, "ignore_eos": True, "n": n, **sampling})
    return GenerateRequest(request_id=f"drafts-{next(_serial)}", prompt_token_ids=tuple(prompt), sampling=params)


async def generate(client: InferenceEndpoint, asked: GenerateRequest) -> tuple[Completion, ...]:
    return (await client.generate(asked)).completions


def recorded(*completions: Sequence[int], prompt: Sequence[int] = PROMPT) -> DraftHistory:
    """A history of one prompt; without completions, the prompt is forgotten."""
    entry = PromptHistory(
        prompt_token_ids=tuple(prompt),
        completions=tuple(tuple(ids) for ids in completions),
        rewards=(0.0,) * len(completions),
    )
    return DraftHistory(entries=(entry,))


def logits(reference: ReferenceCheckpoint, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    return reference.logits(reference.weights, prompt, token_ids)


def gap(reference: ReferenceCheckpoint, asked: GenerateRequest, completion: Completion) -> float:
    """Return the largest difference of the logprobs from those of transformers' forward."""
    logits_TV = logits(reference, asked.prompt_token_ids, completion.token_ids)
    expected_T = chosen(distribution(logits_TV, asked.sampling), completion.token_ids)
    return float((torch.tensor(completion.logprobs, dtype=torch.float64) - expected_T).abs().max())


def continuations(reference: ReferenceCheckpoint, prompt: Sequence[int], likeliest: bool) -> list[list[int]]:
    """For each of the 32 likeliest first tokens, continue with the likeliest tokens or with the least likely."""
    completions = []
    for first in logits(reference, prompt, (0,))[0].topk(32).indices.tolist():
        tokens = [first]
        while len(tokens) < NUM_TOKENS:
            logits_V = logits(reference, prompt, (*tokens, 0))[-1]
            tokens.append(int(logits_V.argmax() if likeliest else logits_V.argmin()))
        completions.append(tokens)
    return completions


def p_of_pairs(
    reference: ReferenceCheckpoint, prompt: Sequence[int], temperature: float, pairs: Counter[tuple[int, ...]]
) -> float:
    """Return the probability of a larger chi-square of the first two tokens, of which the second may be drafted."""
    params = SamplingParams(temperature=temperature)
    num = pairs.total()
    first_V = distribution(logits(reference, prompt, (0,)), params)[0].exp()
    bins: list[tuple[float, float]] = []
    for token in range(len(first_V)):
        if float(first_V[token]) * num < 5:
            continue
        second_V = first_V[token] * distribution(logits(reference, prompt, (token, 0)), params)[-1].exp()
        bins += [(pairs[(token, i)], num * float(p)) for i, p in enumerate(second_V) if num * float(p) >= 5]
    bins.append((num - sum(count for count, _ in bins), num - sum(mean for _, mean in bins)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    p = torch.special.gammaincc(torch.tensor((len(bins) - 1) / 2), torch.tensor(statistic / 2))
    print(f"{num} pairs at {temperature:g} in {len(bins)} bins: chi-square {statistic:.1f}, p {float(p):.2g}")
    assert len(bins) > 10
    return float(p)


async def require_drawn(
    client: InferenceEndpoint, reference: ReferenceCheckpoint, temperature: float, prompt: Sequence[int] = PROMPT
) -> None:
    """Require that completions are drawn from transformers' distribution, and that their logprobs are of it."""
    asked = [request(NUM_TOKENS, prompt, n=64, temperature=temperature) for _ in range(NUM_DRAWS // 64)]
    answers = [(it, completion) for it in asked for completion in await generate(client, it)]
    pairs = Counter(completion.token_ids[:2] for _, completion in answers)
    assert max(gap(reference, *answer) for answer in answers[::16]) < TOLERANCE
    assert p_of_pairs(reference, prompt, temperature, pairs) > LEAST_P


def test_a_server_says_that_it_starts_without_a_history(server: Server) -> None:
    """And a new process does, since the history is in the worker's memory."""
    assert "this process starts without any" in server.engine_log.read_text()


def test_drafts_are_declared_and_what_they_exclude_is_refused(server: Server) -> None:
    async def main(client: InferenceEndpoint) -> None:
        can = await client.capabilities()
        assert can.drafts and not can.seeds
        for sampling in ({"min_p": 0.1}, {"seed": 1}):
            with pytest.raises(UnsupportedError):
                await client.generate(request(2, **sampling))

    run(server.client(), main)


def test_top_k_works_in_steps_without_any_draft(server: Server, reference: ReferenceCheckpoint) -> None:
    """In vLLM 0.32 that ends the engine: the history is empty here."""

    async def main(client: InferenceEndpoint) -> None:
        asked = request(12, tuple(b"nobody recorded this"), temperature=1.0, top_k=3)
        (completion,) = await generate(client, asked)
        kept_TV = logits(reference, asked.prompt_token_ids, completion.token_ids).topk(3).indices
        assert all(token in kept_TV[i] for i, token in enumerate(completion.token_ids))

    run(server.client(), main)


@pytest.mark.parametrize(
    ("drafts", "temperature"),
    first_of_each(
        [("none", 1.0), ("likely", 1.0), ("wrong", 0.7), ("none", 0.7), ("likely", 0.7), ("wrong", 1.0)],
        lambda case: case[0],
    ),
)
def test_completions_are_drawn_from_the_model_s_distribution(
    server: Server, reference: ReferenceCheckpoint, temperature: float, drafts: str
) -> None:
    completions = [] if drafts == "none" else continuations(reference, PROMPT, drafts == "likely")
    before = server.count("num_draft_tokens"), server.count("num_accepted_tokens")

    async def main(client: DraftingEndpoint) -> None:
        await client.record_history(recorded(*completions))
        await require_drawn(client, reference, temperature)

    run(server.client(), main)  # type: ignore[arg-type]
    drafted, accepted = (server.count("num_draft_tokens") - before[0], server.count("num_accepted_tokens") - before[1])
    print(f"{drafts} drafts: {accepted:g} of {drafted:g} tokens accepted")
    assert (drafted == 0) == (drafts == "none")
    assert (accepted > 0.1 * drafted) == (drafts == "likely")


def test_prompts_of_one_token_are_drawn_rightly_beside_others(server: Server, reference: ReferenceCheckpoint) -> None:
    """vLLM pads such a request with drafts of its own, the token -1, if another one runs already.

    Too seldom accepted for this test to tell: `inflight_vllm.verification` tests the kernel itself.
    """

    async def main(client: InferenceEndpoint) -> None:
        async def keep_one_running() -> None:
            while True:
                await generate(client, request(900, temperature=1.0))

        async def num_running() -> int:
            return (await client.weight_version()).num_running

        running = asyncio.ensure_future(keep_one_running())
        await until(num_running, "the first request does not run")
        await require_drawn(client, reference, 1.0, prompt=(5,))
        assert not running.done()
        await cancel_and_wait(running)

    run(server.client(), main)


def test_greedy_completions_are_the_same_with_right_wrong_and_no_drafts(
    server: Server, reference: ReferenceCheckpoint
) -> None:
    """Also beside requests at other temperatures, and with top-k 1, which is greedy at any temperature."""

    async def main(client: DraftingEndpoint) -> None:
        await client.record_history(recorded())
        asked = request(200, temperature=0.0)
        (first,) = await generate(client, asked)
        assert gap(reference, asked, first) < TOLERANCE
        wrong = [(token + 1) % reference.vocab_size for token in first.token_ids]
        mixed = [token if i % 5 else other for i, (token, other) in enumerate(zip(first.token_ids, wrong, strict=True))]
        for history in (first.token_ids, mixed, wrong):
            await client.record_history(recorded(history))
            beside = [request(200, temperature=1.0, top_k=1), request(200, temperature=1.0, n=3)]
            (again,), (likeliest,), others = await asyncio.gather(*(generate(client, it) for it in (asked, *beside)))
            assert again.token_ids == likeliest.token_ids == first.token_ids
            assert gap(reference, asked, again) < TOLERANCE
            assert set(likeliest.logprobs) == {0.0}  # of the one token that top-k keeps
            assert max(gap(reference, beside[1], other) for other in others) < TOLERANCE

    before = server.count("num_accepted_tokens")
    run(server.client(), main)  # type: ignore[arg-type]
    assert server.count("num_accepted_tokens") - before > 200


def test_a_completion_counts_its_own_drafts_and_a_continued_one_is_drafted_behind_its_original_prompt(
    server: Server,
) -> None:
    async def main(client: DraftingEndpoint) -> None:
        assert (await client.capabilities()).draft_counts
        await client.record_history(recorded())
        (whole,) = await generate(client, request(120, temperature=0.0))
        await client.record_history(recorded(whole.token_ids))
        before = [server.count(name) for name in ("num_drafts", "num_accepted_tokens")]
        again = await generate(client, request(120, temperature=0.0, n=2))
        counts = [it.draft_counts for it in again]
        verified, accepted = (
            server.count(name) - at for name, at in zip(("num_drafts", "num_accepted_tokens"), before, strict=True)
        )
        assert sum(it.num_verifications for it in counts) == verified
        assert sum(it.num_accepted for it in counts) == accepted
        assert all(it.num_accepted + it.num_verifications < 120 for it in counts)
        part = whole.model_copy(
            update={
                "token_ids": whole.token_ids[:50],
                "logprobs": whole.logprobs[:50],
                "version_spans": (whole.version_spans[0].model_copy(update={"end": 50}),),
                "finish_reason": "abort",
            }
        )
        (rest,) = await generate(client, continuation(request(120, temperature=0.0), part, "drafts-rest"))
        assert rest.token_ids == whole.token_ids[50:]
        assert rest.draft_counts.num_accepted > 50

    run(server.client(), main)  # type: ignore[arg-type]


def test_spans_are_true_when_weights_change_while_drafts_are_verified(
    server: Server, tiny_model: Path, reference: ReferenceCheckpoint
) -> None:
    """The new weights give every token the logprob -ln V exactly, and the old ones none."""
    tensors = {name: tensor.clone() for name, tensor in reference.weights.tensors.items()}
    sampling, published = threading.Event(), threading.Event()

    async def sample(client: DraftingEndpoint) -> list[tuple[GenerateRequest, Completion]]:
        """Sample without a pause until the new weights serve, so that they arrive in the middle of completions."""
        (greedy,) = await generate(client, request(700, temperature=0.0))
        await client.record_history(recorded(greedy.token_ids))
        sampling.set()

        async def repeat(temperature: float) -> list[tuple[GenerateRequest, Completion]]:
            found = []
            while not published.is_set():
                asked = request(700, temperature=temperature)
                found += [(asked, completion) for completion in await generate(client, asked)]
            return found

        return [found for of_one in await asyncio.gather(*map(repeat, (0.0, 1.0, 1.0, 1.0))) for found in of_one]

    with (
        WeightPublisher([server.client()], ProcessGroupSender(), run_id="drafts") as publisher,
        ThreadPoolExecutor() as threads,
    ):
        publish(publisher, tensors, 1)
        before = server.count("num_accepted_tokens")
        answers = threads.submit(run, server.client(), sample)  # type: ignore[arg-type]
        try:
            assert sampling.wait(120)
            while server.count("num_accepted_tokens") - before < 20:
                assert not answers.done()
                time.sleep(0.01)
            publish(publisher, muted(tensors), 2, in_flight=InFlightPolicy.KEEP)
        finally:
            published.set()
        completions = answers.result()
        publish(publisher, tensors, 3)
    for asked, completion in completions:
        spans = {span.version: (span.start, span.end) for span in completion.version_spans}
        assert spans.keys() <= {1, 2}
        num_old = spans.get(1, (0, 0))[1]
        assert all(is_uniform(logprob, reference.vocab_size) for logprob in completion.logprobs[num_old:])
        old = completion.model_copy(
            update={"token_ids": completion.token_ids[:num_old], "logprobs": completion.logprobs[:num_old]}
        )
        assert num_old == 0 or gap(reference, asked, old) < TOLERANCE
    crossed = [completion for _, completion in completions if len(completion.version_spans) == 2]
    assert crossed and sum(it.draft_counts.num_accepted for it in crossed if it.draft_counts) > 0
