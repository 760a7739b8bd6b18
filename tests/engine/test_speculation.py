"""Drafts in the engine: whatever is drafted, tokens, logprobs and spans are those of an engine without drafts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import inflight.engines.embedded.stepping
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.engines.embedded.sampler import sample
from inflight.errors import InvalidRequestError, UnsupportedError
from inflight.rollouts import continuation, joined
from inflight.types import EngineStats
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import Completion, DraftCounts, DraftHistory, GenerateRequest, PromptHistory, VersionSpan
from tests.engine.reference import (
    CheckpointWorker,
    assert_close,
    forward_logprobs,
    generate_all,
    kept_cache_logprobs,
    load_reference,
    log_softmax_at,
    make_request,
    random_prompt,
    recomputed_logprobs,
    serving,
)
from tests.gates import slowed, wait_until
from tests.models import make_model

Answers = list[list[Completion]]
Ids = Sequence[int]


def ragged(temperatures: Sequence[float], **sampling: Any) -> list[GenerateRequest]:
    """Completions that cross capacities of 64, 128 and 256; more than four sequences."""
    shapes = [(1, 70, 1), (2, 5, 2), (3, 1, 3), (40, 60, 2), (63, 3, 1), (120, 20, 2), (7, 150, 1)]
    return [
        make_request(
            f"r{i}",
            random_prompt(prompt, i),
            **{
                **{"max_tokens": length, "n": n, "temperature": temperatures[i % len(temperatures)]},
                **{"ignore_eos": True, "seed": i, **sampling},
            },
        )
        for i, (prompt, length, n) in enumerate(shapes)
    ]


def answers_of(
    path: Path,
    requests: Sequence[GenerateRequest],
    history: DraftHistory | None,
    drafts: str = "history",
    **options: Any,
) -> tuple[Answers, EngineStats]:
    async def run() -> tuple[Answers, EngineStats]:
        async with serving(path, max_concurrent=6, drafts=drafts if history else None, **options) as endpoint:
            if history is not None:
                await endpoint.record_history(history)
            answers = [list(answer.completions) for answer in await generate_all(endpoint, requests)]
            return answers, endpoint.stats()

    return asyncio.run(run())


def history_of(prompts: Sequence[Ids], completions: Sequence[Sequence[Ids]]) -> DraftHistory:
    return DraftHistory(
        entries=tuple(
            PromptHistory(
                prompt_token_ids=tuple(prompt),
                completions=tuple(map(tuple, of_prompt)),
                rewards=(0.0,) * len(of_prompt),
            )
            for prompt, of_prompt in zip(prompts, completions, strict=True)
        )
    )


def right(requests: Sequence[GenerateRequest], answers: Answers) -> DraftHistory:
    prompts = [request.prompt_token_ids for request in requests]
    return history_of(prompts, [[completion.token_ids for completion in of_request] for of_request in answers])


def wrong(requests: Sequence[GenerateRequest], answers: Answers) -> DraftHistory:
    """A history from which a draft of two tokens is made at every place, whose first token is always wrong."""
    texts = []
    for request, of_request in zip(requests, answers, strict=True):
        texts.append([])
        for completion in of_request:
            ids = [*request.prompt_token_ids, *completion.token_ids]
            for end in range(max(4, len(request.prompt_token_ids)), len(ids)):
                texts[-1].append([*ids[end - 4 : end], (ids[end] + 1) % 256, 7])
    return history_of([request.prompt_token_ids for request in requests], texts)


def tokens_of(answers: Answers) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in completions] for completions in answers]


def assert_logprobs(path: Path, requests: Sequence[GenerateRequest], answers: Answers) -> None:
    model = load_reference(path)
    for request, completions in zip(requests, answers, strict=True):
        for completion in completions:
            Completion.model_validate(completion.model_dump())
            temperature = request.sampling.temperature
            expected = forward_logprobs(model, request.prompt_token_ids, completion.token_ids, temperature)
            assert_close(completion.logprobs, expected)


@pytest.mark.parametrize("temperatures", [(0.0,), (1.0, 0.7, 1.5)], ids=["greedy", "sampled"])
def test_right_and_wrong_drafts_leave_tokens_and_logprobs_as_they_are(
    model_dir: Path, temperatures: tuple[float, ...]
) -> None:
    requests = ragged(temperatures)
    plain, without = answers_of(model_dir, requests, None)
    assert without.num_verifications == 0
    for history, accepts in ((right(requests, plain), True), (wrong(requests, plain), False)):
        answers, stats = answers_of(model_dir, requests, history)
        assert tokens_of(answers) == tokens_of(plain)
        assert_logprobs(model_dir, requests, answers)
        assert stats.num_verifications > 100 // (5 if accepts else 1)
        assert stats.num_tokens == sum(len(ids) for of_request in tokens_of(plain) for ids in of_request)
        if accepts:
            assert stats.num_accepted > 0.8 * stats.num_drafted
            assert stats.num_steps < without.num_steps / 3
        else:
            assert stats.num_accepted < 0.05 * stats.num_drafted


def test_the_model_families_verify_drafts_alike(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        path = make_model(tmp_path / family, family)
        requests = ragged((1.0,))
        plain, _ = answers_of(path, requests, None)
        answers, stats = answers_of(path, requests, right(requests, plain))
        assert tokens_of(answers) == tokens_of(plain)
        assert stats.num_accepted > 0.8 * stats.num_drafted


def test_siblings_draft_for_each_other(model_dir: Path) -> None:
    prompt = random_prompt(20, 1)
    several = make_request("several", prompt, n=6, max_tokens=80, temperature=0.0, ignore_eos=True)
    later = make_request("later", prompt, max_tokens=80, temperature=0.0, ignore_eos=True)

    async def run(drafts: str | None) -> tuple[Answers, list[EngineStats]]:
        async with serving(model_dir, drafts=drafts) as endpoint:
            answers, stats = [], []
            for request in (several, later):
                answers.append(list((await endpoint.generate(request)).completions))
                stats.append(endpoint.stats())
            return answers, stats

    plain, _ = asyncio.run(run(None))
    answers, (_, after) = asyncio.run(run("siblings"))
    assert tokens_of(answers) == tokens_of(plain)
    assert after.num_accepted > 60, "the later request was drafted from those that had finished"


def test_completions_end_inside_a_draft_as_they_do_without(model_dir: Path) -> None:
    free = make_request("free", random_prompt(9, 4), max_tokens=60, ignore_eos=True, seed=3)
    (((completion,),), _) = answers_of(model_dir, [free], None)
    ids = completion.token_ids
    text = bytes(token for token in ids[20:24] if token < 128).decode()
    ends: list[dict[str, Any]] = [{"max_tokens": num} for num in (1, 2, 3, 17, 18, 19)]
    ends += [{"stop_token_ids": (ids[at],)} for at in (5, 30, 31, 47)]
    ends += [{"stop": (text,)}] if text else []
    requests = [
        make_request(f"end{i}", free.prompt_token_ids, **{**free.sampling.model_dump(), **end})
        for i, end in enumerate(ends)
    ]
    plain, _ = answers_of(model_dir, requests, None)
    history = right([free], [[completion]])
    answers, stats = answers_of(model_dir, requests, history)
    assert tokens_of(answers) == tokens_of(plain)
    assert [c.finish_reason for (c,) in answers] == [c.finish_reason for (c,) in plain]
    assert stats.num_accepted > 50
    for (completion,) in answers:
        counts = completion.draft_counts
        assert counts is not None
        # Each verification brings one token more than it accepts, unless the completion ends at an accepted one.
        assert counts.num_accepted + counts.num_verifications <= len(completion.token_ids)
    assert all(completion.draft_counts is None for (completion,) in plain)


def test_a_continued_completion_is_drafted_from_completions_of_its_original_prompt(model_dir: Path) -> None:
    request = make_request("whole", random_prompt(20, 1), max_tokens=80, temperature=0.0, ignore_eos=True)
    plain, _ = answers_of(model_dir, [request], None)
    ((whole,),) = plain
    spans = (VersionSpan(version=0, start=0, end=30),)
    part = Completion(
        index=0,
        token_ids=whole.token_ids[:30],
        logprobs=whole.logprobs[:30],
        version_spans=spans,
        finish_reason="abort",
        draft_counts=DraftCounts(num_verifications=7, num_accepted=20),
    )
    answers, _ = answers_of(model_dir, [continuation(request, part, "rest")], right([request], plain))
    ((rest,),) = answers
    both = joined(part, rest)
    assert both.token_ids == whole.token_ids
    assert rest.draft_counts is not None
    assert rest.draft_counts.num_accepted > 40
    assert both.draft_counts == part.draft_counts + rest.draft_counts


def test_streamed_chunks_carry_whole_drafts(model_dir: Path) -> None:
    request = make_request("r", random_prompt(9, 4), max_tokens=60, ignore_eos=True, seed=3)
    plain, _ = answers_of(model_dir, [request], None)

    async def run() -> list[Any]:
        async with serving(model_dir, drafts="history") as endpoint:
            await endpoint.record_history(right([request], plain))
            return [chunk async for chunk in endpoint.generate_stream(request)]

    chunks = asyncio.run(run())
    assert [chunk.start for chunk in chunks] == [
        sum(len(earlier.token_ids) for earlier in chunks[:i]) for i in range(len(chunks))
    ]
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == plain[0][0].token_ids
    assert max(len(chunk.token_ids) for chunk in chunks) > 8


@pytest.mark.parametrize(
    ("policy", "reference"),
    [
        pytest.param("keep", kept_cache_logprobs, marks=pytest.mark.exhaustive),  # as the next test
        ("recompute", recomputed_logprobs),
    ],
)
def test_logprobs_and_spans_are_true_while_weights_change_under_drafts(
    model_dir: Path, tmp_path: Path, policy: str, reference: Any
) -> None:
    """Versions are near each other, as those of a trainer are: some drafts are accepted and others are not."""
    models = near_models(model_dir, 4)
    requests = ragged((1.0, 0.8), n=1, max_tokens=300)
    plain, _ = answers_of(model_dir, requests, None)
    for history, accepts in ((right(requests, plain), True), (wrong(requests, plain), False)):
        completions, stats = _answered_during_updates(model_dir, models, requests, history, policy)
        assert stats.num_verifications > 20
        assert not accepts or stats.num_accepted > 20
        assert max(len(completion.version_spans) for completion in completions) == 4
        for request, completion in zip(requests, completions, strict=True):
            Completion.model_validate(completion.model_dump())
            expected = reference(models, request.prompt_token_ids, completion, request.sampling.temperature)
            assert_close(completion.logprobs, expected)


@pytest.mark.parametrize(
    ("policy", "reference"),
    [
        ("keep", kept_cache_logprobs),
        pytest.param("recompute", recomputed_logprobs, marks=pytest.mark.exhaustive),
    ],
)
def test_logprobs_and_spans_are_true_while_an_update_comes_after_every_few_steps_of_drafts(
    model_dir: Path, policy: str, reference: Any
) -> None:
    models = near_models(model_dir, 21)
    requests = ragged((1.0, 0.8), n=1, max_tokens=400)
    plain, _ = answers_of(model_dir, requests, None)
    completions, stats = _answered_during_updates(
        model_dir, models, requests, right(requests, plain), policy, num_between=40
    )
    assert stats.num_accepted > 20  # how many depends on the steps that fall between two updates
    assert stats.num_updates > 10
    # When a completion ends depends on how this machine rounds.
    assert max(len(completion.version_spans) for completion in completions) > 5
    for request, completion in zip(requests, completions, strict=True):
        Completion.model_validate(completion.model_dump())
        versions = [span.version for span in completion.version_spans]
        assert versions == sorted({*versions})
        expected = reference(models, request.prompt_token_ids, completion, request.sampling.temperature)
        assert_close(completion.logprobs, expected)


def near_models(path: Path, number: int) -> dict[int, Any]:
    """Return a model and others near it, by version, as those of a trainer are: some drafts are accepted by all."""
    models = {version: load_reference(path) for version in range(number)}
    for version in range(1, number):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(version)
            for parameter in models[version].parameters():
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    return models


def _answered_during_updates(
    path: Path,
    models: dict[int, Any],
    requests: Sequence[GenerateRequest],
    history: DraftHistory,
    policy: Any,
    num_between: int = 150,
) -> tuple[list[Completion], EngineStats]:
    """Publish each model in turn, ``num_between`` tokens after the one before it, while any is sampled."""
    endpoint = load_endpoint(path, device="cpu", max_concurrent=5, drafts="both")
    with (
        WeightPublisher([endpoint], ProcessGroupSender(), run_id="run") as publisher,
        slowed(endpoint, after=num_between) as limit,  # it waits for each publish
    ):
        publisher.start(endpoint.record_history, history).result(60)
        futures = [publisher.start(endpoint.generate, request) for request in requests]

        def is_over() -> bool:
            return all(future.done() for future in futures)

        for version in range(1, len(models)):
            wait_until(lambda: endpoint.stats().num_tokens >= limit.num_tokens or is_over())
            if is_over():
                break
            worker: Any = CheckpointWorker.of_model(models[version], version)
            report = publish_weights(worker, publisher, in_flight=policy, deadline_s=30.0)
            assert report is not None
            assert report.applied_everywhere
            limit.num_tokens = endpoint.stats().num_tokens + num_between
        limit.num_tokens = 1 << 30
        return [future.result(60).completions[0] for future in futures], endpoint.stats()


def test_a_failing_request_leaves_the_drafted_tokens_of_others_as_they_are(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = ragged((1.0,))
    plain, _ = answers_of(model_dir, requests, None)
    num_calls = 0

    def faulty(logits: Any, params: Any, uniforms: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 5 and any(p.temperature == 0.123 for p in params):
            raise ValueError("a processor that cannot do this")
        return sample(logits, params, uniforms)

    monkeypatch.setattr(inflight.engines.embedded.stepping, "sample", faulty)
    poisoned = make_request("poisoned", requests[0].prompt_token_ids, temperature=0.123, ignore_eos=True)

    async def run() -> tuple[Any, list[Any], EngineStats]:
        async with serving(model_dir, max_concurrent=16, drafts="both") as endpoint:
            await endpoint.record_history(right(requests, plain))
            first, *others = await asyncio.gather(
                *(endpoint.generate(request) for request in (poisoned, *requests)), return_exceptions=True
            )
            return first, others, endpoint.stats()

    error, answers, stats = asyncio.run(run())
    assert isinstance(error, InvalidRequestError)
    assert [[c.token_ids for c in answer.completions] for answer in answers] == tokens_of(plain)
    assert stats.num_accepted > 100


def test_history_is_refused_where_drafts_are_not_declared(model_dir: Path) -> None:
    async def run(drafts: str | None) -> bool:
        async with serving(model_dir, drafts=drafts) as endpoint:
            declared = (await endpoint.capabilities()).drafts
            history = history_of([(1, 2)], [[(3,)]])
            if declared:
                await endpoint.record_history(history)
            else:
                with pytest.raises(UnsupportedError, match="drafts"):
                    await endpoint.record_history(history)
            return declared

    assert [asyncio.run(run(drafts)) for drafts in (None, "siblings", "history", "both")] == [False, False, True, True]


def test_history_with_tokens_that_the_model_does_not_have_is_refused(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir, drafts="history") as endpoint:
            with pytest.raises(InvalidRequestError, match=r"token id 258 .* vocabulary of 258"):
                await endpoint.record_history(history_of([(1, 2)], [[(3, 258)]]))
            await endpoint.record_history(history_of([(1, 2)], [[(3, 257), ()]]))

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------------------------
# The distribution


@torch.no_grad()
def distribution(model: Any, ids: Ids, temperature: float) -> torch.Tensor:
    return log_softmax_at(model(torch.tensor([ids]), use_cache=False).logits[0, -1], temperature).exp()


@pytest.mark.parametrize(
    "num_completions", [4096, pytest.param(34 * 1024, marks=pytest.mark.exhaustive)], ids=["12k", "104k"]
)
@pytest.mark.parametrize("is_likely", [True, False], ids=["likely", "wrong"])
def test_drafted_tokens_have_the_frequencies_of_the_distribution(
    model_dir: Path, is_likely: bool, num_completions: int
) -> None:
    """Unseeded, so that every completion is a draw of its own: pairs of first and drafted second tokens."""
    prompt, temperature = random_prompt(12, 1), 0.2
    model = load_reference(model_dir)
    first_V = distribution(model, prompt, temperature)
    seconds = {
        first: distribution(model, (*prompt, first), temperature) for first in first_V.topk(160).indices.tolist()
    }
    completions = [
        (first, int(second_V.argmax() if is_likely else second_V.argmin())) for first, second_V in seconds.items()
    ]

    async def draw(endpoint: EmbeddedEndpoint) -> Counter[tuple[int, ...]]:
        counts: Counter[tuple[int, ...]] = Counter()
        for i in range(num_completions // 1024):
            request = make_request(f"r{i}", prompt, n=1024, max_tokens=3, temperature=temperature, ignore_eos=True)
            counts.update(c.token_ids[:2] for c in (await endpoint.generate(request)).completions)
        return counts

    async def run() -> tuple[Counter[tuple[int, ...]], EngineStats]:
        async with serving(model_dir, max_concurrent=256, drafts="history") as endpoint:
            await endpoint.record_history(history_of([prompt], [completions]))
            return await draw(endpoint), endpoint.stats()

    counts, stats = asyncio.run(run())
    assert stats.num_verifications > 0.7 * num_completions
    share = stats.num_accepted / stats.num_drafted
    assert share > 0.1 if is_likely else share < 0.01
    expected = {
        (first, second): num_completions * float(first_V[first] * p)
        for first, second_V in seconds.items()
        for second, p in enumerate(second_V.tolist())
    }
    bins = [(counts[pair], mean) for pair, mean in expected.items() if mean >= 5]
    rest = counts.total() - sum(count for count, _ in bins), num_completions - sum(mean for _, mean in bins)
    bins.append(rest)
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    p = float(torch.special.gammaincc(torch.tensor((len(bins) - 1) / 2.0), torch.tensor(statistic / 2.0)))
    assert p > 1e-6, f"chi-square {statistic:.1f} in {len(bins)} bins"
