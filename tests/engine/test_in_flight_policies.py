"""What running requests do when weights change, policy by policy: real publishes into the embedded engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import Completion, GenerateRequest, GenerateResponse, InFlightPolicy
from tests.engine.reference import (
    WAIT_S,
    CheckpointWorker,
    assert_close,
    forward_logprobs,
    kept_cache_logprobs,
    load_reference,
    make_request,
    random_prompt,
    recomputed_logprobs,
)
from tests.gates import wait_until
from tests.models import make_model


@pytest.fixture(scope="module")
def models(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The weights of versions 0, 1 and 2: three unrelated random models."""
    others = {
        version: load_reference(make_model(tmp_path_factory.mktemp("versions") / str(version), seed=version))
        for version in (1, 2)
    }
    return {0: load_reference(model_dir), **others}


class Publishing:
    """An endpoint in this process and a publisher connected to it."""

    def __init__(self, endpoint: EmbeddedEndpoint, publisher: WeightPublisher) -> None:
        self.endpoint = endpoint
        self.publisher = publisher

    def start(self, *requests: GenerateRequest) -> list[Future[GenerateResponse]]:
        return [self.publisher.start(self.endpoint.generate, request) for request in requests]

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until that many more tokens were sampled."""
        until = self.endpoint.stats().num_tokens + num_tokens
        wait_until(lambda: self.endpoint.stats().num_tokens >= until)

    def publish(self, tensors: Any, version: int, policy: str) -> None:
        is_model = isinstance(tensors, torch.nn.Module)
        self.publish_from(
            CheckpointWorker.of_model(tensors, version) if is_model else CheckpointWorker(tensors, version), policy
        )

    def publish_from(self, worker: Any, policy: str = "keep") -> None:
        report = publish_weights(worker, self.publisher, in_flight=policy, deadline_s=30.0)  # type: ignore[arg-type]
        assert report is not None
        assert report.applied_everywhere


@contextlib.contextmanager
def publishing(path: Path, max_concurrent: int) -> Iterator[Publishing]:
    endpoint = load_endpoint(path, device="cpu", max_concurrent=max_concurrent)
    with WeightPublisher([endpoint], ProcessGroupSender(), run_id="run") as publisher:
        yield Publishing(endpoint, publisher)


def completions_of(futures: list[Future[GenerateResponse]]) -> list[Completion]:
    return [completion for future in futures for completion in future.result(WAIT_S).completions]


def versions_of(completion: Completion) -> list[int]:
    return [span.version for span in completion.version_spans]


def ragged(max_tokens: int) -> list[GenerateRequest]:
    lengths = (3, 61, 120, 17, 200, 5)
    return [
        make_request(
            f"r{i}", random_prompt(n, i), max_tokens=max_tokens, ignore_eos=True, seed=i, temperature=(1.0, 0.8)[i % 2]
        )
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(("policy", "reference"), [("keep", kept_cache_logprobs), ("recompute", recomputed_logprobs)])
def test_running_requests_go_on_under_each_new_version_with_keys_and_values_as_the_policy_says(
    model_dir: Path, models: dict[int, Any], policy: str, reference: Any
) -> None:
    requests = ragged(max_tokens=260)
    with publishing(model_dir, max_concurrent=4) as it:
        futures = it.start(*requests)
        for version in (1, 2):
            it.wait_for_tokens(200)
            it.publish(models[version], version, policy)
        completions = completions_of(futures)
    # The first four ran from the beginning; the last two waited for a slot.
    assert [versions_of(completion) for completion in completions[:4]] == [[0, 1, 2]] * 4
    for request, completion in zip(requests, completions, strict=True):
        assert completion.finish_reason == "length"
        Completion.model_validate(completion.model_dump())
        expected = reference(models, request.prompt_token_ids, completion, request.sampling.temperature)
        assert_close(completion.logprobs, expected)
    # The references differ where the policies do, or this test would prove nothing.
    request, completion = requests[0], completions[0]
    kept, recomputed = (
        f(models, request.prompt_token_ids, completion, 1.0) for f in (kept_cache_logprobs, recomputed_logprobs)
    )
    assert max(abs(a - b) for a, b in zip(kept, recomputed, strict=True)) > 0.1


def test_drained_requests_end_under_the_old_version_and_waiting_ones_start_under_the_new(
    model_dir: Path, models: dict[int, Any]
) -> None:
    requests = ragged(max_tokens=120)
    with publishing(model_dir, max_concurrent=4) as it:
        futures = it.start(*requests)
        it.wait_for_tokens(40)
        it.publish(models[1], 1, "drain")
        completions = completions_of(futures)
    assert [versions_of(completion) for completion in completions] == [[0]] * 4 + [[1]] * 2
    for request, completion in zip(requests, completions, strict=True):
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 120)
        expected = recomputed_logprobs(models, request.prompt_token_ids, completion, request.sampling.temperature)
        assert_close(completion.logprobs, expected)


def test_aborted_requests_end_with_what_they_have_and_waiting_ones_start_under_the_new_version(
    model_dir: Path, models: dict[int, Any]
) -> None:
    requests = ragged(max_tokens=600)
    with publishing(model_dir, max_concurrent=4) as it:
        futures = it.start(*requests)
        it.wait_for_tokens(40)
        it.publish(models[1], 1, "abort")
        completions = completions_of(futures)
    assert [completion.finish_reason for completion in completions] == ["abort"] * 4 + ["length"] * 2
    assert [versions_of(completion) for completion in completions] == [[0]] * 4 + [[1]] * 2
    for request, completion in zip(requests, completions, strict=True):
        assert 1 <= len(completion.token_ids) < 600 or completion.finish_reason == "length"
        expected = recomputed_logprobs(models, request.prompt_token_ids, completion, request.sampling.temperature)
        assert_close(completion.logprobs, expected)


@pytest.mark.parametrize("policy", [InFlightPolicy.DRAIN, InFlightPolicy.ABORT])
def test_sequences_that_wait_to_be_recomputed_count_as_running(model_dir: Path, policy: InFlightPolicy) -> None:
    # Nine prompts of 900 tokens are more than one prefill: a pause can come while some are still to be recomputed.
    requests = [make_request(f"r{i}", random_prompt(900, i), max_tokens=100, ignore_eos=True) for i in range(9)]
    with publishing(model_dir, max_concurrent=8) as it:
        engine, paused = it.endpoint._engine, threading.Event()
        futures = it.start(*requests)
        wait_until(lambda: it.endpoint.stats().num_running == 8)

        def two_updates_at_once() -> None:
            engine.pauses.pause(InFlightPolicy.KEEP, lambda: None)
            engine.load(engine.weights.prepare([]), 1, InFlightPolicy.RECOMPUTE)
            engine.pauses.resume()
            engine.pauses.pause(policy, paused.set)

        engine.call(two_updates_at_once).result(WAIT_S)
        assert paused.wait(WAIT_S)
        running, (waiting,) = futures[:8], futures[8:]
        completions = completions_of(running)
        assert not waiting.done()
        engine.call(engine.pauses.resume).result(WAIT_S)
        assert completions_of([waiting])[0].finish_reason == "length"
    for completion in completions:
        if policy is InFlightPolicy.DRAIN:
            assert (completion.finish_reason, len(completion.token_ids)) == ("length", 100)
            assert versions_of(completion) == [0, 1]
        else:
            assert completion.finish_reason == "abort"
            assert 1 <= len(completion.token_ids) < 100


@pytest.mark.parametrize("leaves_first", [False, True])
def test_nan_in_one_sequence_does_not_reach_the_others_or_later_ones(
    model_dir: Path, models: dict[int, Any], leaves_first: bool
) -> None:
    whole = {name: parameter.detach() for name, parameter in models[0].named_parameters()}
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    # All live in the arena of 1024, and the sick one holds NaN up to position 850 and more. A shorter sequence comes
    # into its row, either as it starts or as it moves there, while a longer one keeps that arena's mask wide.
    sick = make_request("sick", random_prompt(850, 1), ignore_eos=True)
    longer = make_request("longer", random_prompt(900, 2), max_tokens=110, ignore_eos=True)
    shorter = make_request("shorter", random_prompt(600, 3), max_tokens=250, ignore_eos=True)
    others = (shorter, longer) if leaves_first else (longer, shorter)
    with publishing(model_dir, max_concurrent=3) as it:
        (leaving,) = it.start(sick)
        it.wait_for_tokens(2)
        it.publish(broken, 1, "recompute")
        it.wait_for_tokens(2)
        it.publish(whole, 2, "keep")
        if leaves_first:
            leaving.cancel()
            wait_until(lambda: it.endpoint.stats().num_running == 0)
        futures = it.start(*others)
        wait_until(lambda: it.endpoint.stats().num_running == (2 if leaves_first else 3))
        assert leaves_first or not leaving.done()
        leaving.cancel()
        completions = completions_of(futures)
    for request, completion in zip(others, completions, strict=True):
        assert versions_of(completion) == [2]
        assert_close(completion.logprobs, forward_logprobs(models[0], request.prompt_token_ids, completion.token_ids))


def test_followers_of_one_prompt_are_independent_after_a_recompute(model_dir: Path, models: dict[int, Any]) -> None:
    request = make_request("group", random_prompt(30, 4), n=6, max_tokens=200, ignore_eos=True, seed=9)
    with publishing(model_dir, max_concurrent=6) as it:
        futures = it.start(request)
        it.wait_for_tokens(60)
        it.publish(models[1], 1, "recompute")
        completions = completions_of(futures)
    assert len({completion.token_ids for completion in completions}) == 6
    for completion in completions:
        assert versions_of(completion) == [0, 1]
        assert_close(completion.logprobs, recomputed_logprobs(models, request.prompt_token_ids, completion))


def test_streamed_chunks_name_the_version_of_their_own_tokens(model_dir: Path, models: dict[int, Any]) -> None:
    request = make_request("r", random_prompt(9, 4), max_tokens=250, ignore_eos=True)

    async def collect(endpoint: EmbeddedEndpoint) -> list[tuple[int, tuple[int, ...], tuple[float, ...]]]:
        async with asyncio.timeout(WAIT_S):
            return [(c.version, c.token_ids, c.logprobs) async for c in endpoint.generate_stream(request)]

    with publishing(model_dir, max_concurrent=2) as it:
        streaming = it.publisher.start(collect, it.endpoint)
        it.wait_for_tokens(20)
        it.publish(models[1], 1, "recompute")
        chunks = streaming.result(WAIT_S)
    assert {version for version, _, _ in chunks} == {0, 1}
    tokens = [token for _, token_ids, _ in chunks for token in token_ids]
    whole = {v: forward_logprobs(models[v], request.prompt_token_ids, tokens) for v in (0, 1)}
    position = 0
    for version, token_ids, logprobs in chunks:
        assert_close(logprobs, whole[version][position : position + len(token_ids)])
        position += len(token_ids)
