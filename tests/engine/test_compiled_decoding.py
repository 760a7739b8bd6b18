"""A decode step of few shapes that keeps addresses: it samples what an eager engine does, and sees new weights."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import inflight.engines.embedded.parameters
import inflight.engines.embedded.stepping
from inflight.conformance.endpoint.catalogue import CHECKS
from inflight.conformance.endpoint.judged import JudgedEndpoint
from inflight.conformance.judge import judge
from inflight.conformance.targets import EndpointTarget
from inflight.conformance.verdicts import CheckOutcome
from inflight.engines.embedded.decoding import Compiler, compiler_for, num_places, num_rows
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint
from inflight.engines.embedded.parameters import exchange
from inflight.errors import ConfigError, NonFiniteError
from inflight.weights.send.publisher import WeightPublisher
from inflight.weights.transports import make_sender
from inflight.wire import Completion, GenerateRequest
from tests.engine.recorded import as_it_is, endpoint_of, recording
from tests.engine.reference import (
    WAIT_S,
    assert_close,
    generate_all,
    kept_cache_logprobs,
    load_reference,
    make_request,
    random_prompt,
    recomputed_logprobs,
)
from tests.engine.test_in_flight_policies import Publishing, completions_of, ragged, versions_of
from tests.models import make_model
from tests.selection import first_of_each
from tests.weights.lora import lora_of, merged_with
from tests.weights.workers import LORA, LoraWorker, PartialWorker, checkpoint, scaled

NOT_COMPILED = pytest.mark.parametrize("compiler", [as_it_is, recording], ids=lambda it: it.__name__)
IN_THIS_PROCESS = [check for check in CHECKS if not {"url", "process"} & set(check.needs)]
SOME_CHECKS = [
    pytest.param(check, id=check.id, marks=[] if check.id in ("E-10", "E-30", "U-20") else [pytest.mark.exhaustive])
    for check in {check.level: check for check in reversed(IN_THIS_PROCESS)}.values()
]
"""The first of each level, of which every run of the tests has those about tokens, pauses and versions."""
ON_THE_CPU = compiler_for(torch.device("cpu"))


def requests() -> list[GenerateRequest]:
    """More sequences than slots, which end at different times: rows get free in the middle, and lengths are mixed."""
    shapes = [(1, 70, 1), (2, 5, 2), (3, 1, 3), (40, 60, 2), (63, 3, 1), (64, 65, 1), (120, 20, 2), (200, 80, 1)]
    temperatures = (1.0, 0.7, 0.0)
    return [
        make_request(
            f"r{i}",
            random_prompt(prompt, i),
            max_tokens=length,
            n=n,
            temperature=temperatures[i % 3],
            ignore_eos=True,
            seed=i,
        )
        for i, (prompt, length, n) in enumerate(shapes)
    ]


def completions(endpoint: EmbeddedEndpoint) -> list[Completion]:
    async def run() -> list[Any]:
        try:
            return await generate_all(endpoint, requests())
        finally:
            await endpoint.aclose()

    return [completion for response in asyncio.run(run()) for completion in response.completions]


def assert_alike(found: list[Completion], expected: list[Completion]) -> None:
    for left, right in zip(found, expected, strict=True):
        assert left.token_ids == right.token_ids
        assert left.version_spans == right.version_spans
        assert_close(left.logprobs, right.logprobs)


@contextlib.contextmanager
def publishing(path: Path, compiler: Compiler, transport: str = "shm") -> Iterator[Publishing]:
    endpoint = endpoint_of(path, compiler, max_concurrent=4)
    with WeightPublisher([endpoint], make_sender(transport), run_id="run") as publisher:
        yield Publishing(endpoint, publisher)


def addresses(endpoint: EmbeddedEndpoint) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in endpoint._engine.weights.by_name.items()}


def assert_serves(it: Publishing, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Assert that its next tokens are those of an eager engine that begins with these weights."""
    request = make_request("fresh", random_prompt(9, 4), max_tokens=12, ignore_eos=True, seed=3)
    (found,) = completions_of(it.start(request))
    fresh = endpoint_of(path, None)
    with torch.no_grad():
        for name, parameter in fresh._engine.weights.by_name.items():
            parameter.copy_(tensors[name])

    async def run() -> Completion:
        try:
            return (await fresh.generate(request)).completions[0]
        finally:
            await fresh.aclose()

    expected = asyncio.run(run())
    assert found.token_ids == expected.token_ids
    assert_close(found.logprobs, expected.logprobs)


def test_few_numbers_of_rows_and_lengths_are_computed() -> None:
    rows = [num_rows(num, 61) for num in range(1, 62)]
    assert all(padded >= num for num, padded in enumerate(rows, 1))
    assert sorted(set(rows)) == [2, 4, 8, 16, 24, 32, 40, 48, 56, 61]
    assert num_rows(1, 1) == 1
    places = [num_places(num, 1000) for num in range(1, 1001)]
    assert all(padded >= num for num, padded in enumerate(places, 1))
    assert sorted(set(places)) == [64, 128, 256, 512, 1000]
    assert num_places(3, 50) == 50


@NOT_COMPILED
@pytest.mark.parametrize("max_concurrent", first_of_each([6, 1], lambda _: "any"))
def test_tokens_and_logprobs_are_those_of_an_eager_engine(
    model_dir: Path, compiler: Compiler, max_concurrent: int
) -> None:
    expected = completions(endpoint_of(model_dir, None, max_concurrent=max_concurrent))
    found = completions(endpoint_of(model_dir, compiler, max_concurrent=max_concurrent))
    assert_alike(found, expected)


def test_keys_and_values_stay_where_they_are_and_within_their_limit(model_dir: Path) -> None:
    endpoint = endpoint_of(model_dir, as_it_is, max_concurrent=3)
    (arena,) = endpoint._engine.scheduler.store.arenas
    before = arena.keys_LSKCD.data_ptr(), arena.values_LSKCD.data_ptr(), arena.size_bytes
    assert arena.size_bytes == endpoint._engine.scheduler.store.limit_bytes
    completions(endpoint)
    assert (arena.keys_LSKCD.data_ptr(), arena.values_LSKCD.data_ptr(), arena.size_bytes) == before
    assert endpoint._engine.scheduler.store.reserved_bytes == 0
    for stored in (arena.keys_LSKCD, arena.values_LSKCD):
        assert not stored[:, :, :, 1:].any(), "free rows are zeroed, but for where padding writes"


def test_a_request_that_fails_leaves_the_others_as_they_are(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = completions(endpoint_of(model_dir, as_it_is, max_concurrent=6))
    sample, num_calls = inflight.engines.embedded.stepping.sample, 0

    def faulty(logits: Any, params: Any, uniforms: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 7 == 0:
            raise ValueError("now and then")
        return sample(logits, params, uniforms)

    monkeypatch.setattr(inflight.engines.embedded.stepping, "sample", faulty)
    endpoint = endpoint_of(model_dir, as_it_is, max_concurrent=6)

    async def run() -> list[Any]:
        try:
            calls = (endpoint.generate(request) for request in requests())
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await endpoint.aclose()

    answers = asyncio.run(run())
    assert num_calls > 14
    found = [None if isinstance(answer, Exception) else answer.completions for answer in answers]
    starts = iter(expected)
    of_request = [[next(starts) for _ in range(request.sampling.n)] for request in requests()]
    healthy = [(left, right) for left, right in zip(found, of_request, strict=True) if left is not None]
    assert len(healthy) >= 4
    for left, right in healthy:
        assert_alike(list(left), right)


@NOT_COMPILED
@pytest.mark.parametrize(
    ("policy", "reference"),
    first_of_each([("keep", kept_cache_logprobs), ("recompute", recomputed_logprobs)], lambda _: "any"),
)
def test_spans_are_exact_while_updates_arrive(
    model_dir: Path, tmp_path: Path, compiler: Compiler, policy: str, reference: Any
) -> None:
    other = load_reference(make_model(tmp_path / "other", seed=1))
    models = {0: load_reference(model_dir), 1: other, 2: load_reference(model_dir)}
    with publishing(model_dir, compiler) as it:
        futures = it.start(*ragged(max_tokens=160))
        for version in (1, 2):
            it.wait_for_tokens(120)
            it.publish(models[version], version, policy)
        found = completions_of(futures)
    assert [versions_of(completion) for completion in found[:4]] == [[0, 1, 2]] * 4
    for request, completion in zip(ragged(max_tokens=160), found, strict=True):
        expected = reference(models, request.prompt_token_ids, completion, request.sampling.temperature)
        assert_close(completion.logprobs, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_captured_step_sees_each_update_at_the_addresses_of_before(
    tmp_path: Path, tied: bool, transport: str
) -> None:
    path = make_model(tmp_path / "model", tied=tied)
    with publishing(path, recording, transport) as it:
        before = addresses(it.endpoint)
        completions_of(it.start(make_request("first", random_prompt(9, 4), max_tokens=12)))  # captures the shapes
        whole = {name: parameter.detach().clone() for name, parameter in it.endpoint._engine.weights.by_name.items()}
        for version in (1, 2):
            whole = scaled(whole, 1.25)
            it.publish(whole, version, "keep")
            assert_serves(it, whole, path)
        assert addresses(it.endpoint) == before
        assert it.endpoint._engine.weights.replaced == []


def test_a_captured_step_sees_loras_and_partial_updates(model_dir: Path) -> None:
    with publishing(model_dir, recording) as it:
        before = addresses(it.endpoint)
        completions_of(it.start(make_request("first", random_prompt(9, 4), max_tokens=12)))
        whole = checkpoint(model_dir)
        for version, seed in ((1, 1), (2, 2)):  # the second is merged into the same base as the first
            lora = lora_of(whole, ["q_proj", "up_proj"], LORA.rank, seed=seed)
            it.publish_from(LoraWorker(lora, version))
            assert_serves(it, merged_with(whole, lora, LORA), model_dir)
        sent = {name: 1.25 * tensor for name, tensor in whole.items() if "norm" in name}
        it.publish_from(PartialWorker(sent, 3, whole))  # which removes the LoRA
        assert_serves(it, {**whole, **sent}, model_dir)
        assert addresses(it.endpoint) == before


def test_a_captured_step_goes_on_with_old_weights_if_memory_is_exchanged(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in shows what the tests above are for."""
    monkeypatch.setattr(inflight.engines.embedded.parameters, "overwrite", exchange)
    new = scaled(checkpoint(model_dir), 1.25)
    with publishing(model_dir, recording) as it:
        completions_of(it.start(make_request("first", random_prompt(9, 4), max_tokens=12)))
        before = addresses(it.endpoint)
        it.publish(new, 1, "keep")
        assert addresses(it.endpoint) != before
        with pytest.raises(AssertionError):
            assert_serves(it, new, model_dir)


def test_broken_weights_leave_nothing_behind_that_is_not_finite(model_dir: Path) -> None:
    whole = checkpoint(model_dir)
    with publishing(model_dir, recording) as it:
        it.publish({**whole, "model.norm.weight": whole["model.norm.weight"] * torch.inf}, 1, "keep")
        for future in it.start(*ragged(max_tokens=70)):
            with pytest.raises(NonFiniteError):
                future.result(WAIT_S)
        broken = {name: tensor * torch.nan if "v_proj" in name else tensor for name, tensor in whole.items()}
        it.publish(broken, 2, "keep")
        for future in it.start(*ragged(max_tokens=70)):
            with pytest.raises(NonFiniteError):
                future.result(WAIT_S)
        it.publish(whole, 3, "keep")
        assert_serves(it, whole, model_dir)


def test_a_step_that_cannot_be_compiled_is_said_before_anything_is_served(model_dir: Path) -> None:
    def refuse(step: Any) -> Any:
        def raising(*_: Any) -> Any:
            raise RuntimeError("a graph break")

        return raising

    with pytest.raises(ConfigError, match=r"cannot be compiled \(RuntimeError: a graph break\).*omit compile"):
        endpoint_of(model_dir, refuse)


def assert_the_kit_finds_nothing(target: EndpointTarget, check: Any, directory: Path) -> None:
    subject = JudgedEndpoint(target, directory, 300)
    try:
        verdict = judge(subject, replace(check, deadline_s=4 * check.deadline_s)).verdict  # it is all one process
    finally:
        subject.close()
        gc.collect()
    assert verdict.outcome is CheckOutcome.PASSED, f"{verdict.message}\n{verdict.evidence}"


@pytest.mark.parametrize("check", SOME_CHECKS)
def test_the_kit_finds_nothing_where_the_step_is_captured(check: Any, tmp_path: Path) -> None:
    assert_the_kit_finds_nothing(EndpointTarget(factory="tests.engine.recorded:make"), check, tmp_path)


# ---------------------------------------------------------------------------------------------------------------
# torch's compiler


@pytest.mark.exhaustive
@pytest.mark.timeout(420)  # compiling takes half a minute of one core
def test_a_compiled_engine_samples_what_an_eager_one_does_and_compiles_nothing_later(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", tied=True)
    counters.clear()
    endpoint = load_endpoint(path, device="cpu", max_concurrent=6, compile=True)
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_graphs <= 2
    found = completions(endpoint)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]
    assert_alike(found, completions(load_endpoint(path, device="cpu", max_concurrent=6)))


@pytest.mark.exhaustive
@pytest.mark.timeout(420)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_compiled_engine_sees_each_update(tmp_path: Path, tied: bool) -> None:
    path = make_model(tmp_path / "model", tied=tied)
    with publishing(path, ON_THE_CPU) as it:
        whole = {name: parameter.detach().clone() for name, parameter in it.endpoint._engine.weights.by_name.items()}
        before = addresses(it.endpoint)
        futures = it.start(*ragged(max_tokens=160))
        for version in (1, 2):
            it.wait_for_tokens(120)
            whole = scaled(whole, 1.25)
            it.publish(whole, version, "recompute")
        assert [versions_of(completion) for completion in completions_of(futures)[:4]] == [[0, 1, 2]] * 4
        assert_serves(it, whole, path)
        assert addresses(it.endpoint) == before


@pytest.mark.exhaustive
@pytest.mark.timeout(420)
@pytest.mark.parametrize("check", [case for case in IN_THIS_PROCESS if case.id in ("E-10", "U-20")], ids=str)
def test_the_kit_finds_nothing_where_the_step_is_compiled(check: Any, tmp_path: Path) -> None:
    target = EndpointTarget(factory="inflight.engines.embedded.loading:load_endpoint", options={"compile": True})
    assert_the_kit_finds_nothing(target, check, tmp_path)
