"""A step that raises: the request at fault ends, and all others continue as if it had never been there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import inflight.engines.embedded.stepping
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.errors import EndpointError, InvalidRequestError
from inflight.wire import Completion, GenerateRequest
from tests.engine.reference import assert_close, forward_logprobs, load_reference, make_request, random_prompt, serving
from tests.gates import slowed, until
from tests.selection import first_of_each

POISON = 0.123
"""The temperature of requests that make something fail."""
MARK = 200
"""A token that only their prompts have."""


class FaultyModel(torch.nn.Module):
    """A model whose forward raises if `raises` reports it."""

    def __init__(self, inner: torch.nn.Module, raises: Callable[[torch.Tensor], bool], error: Exception) -> None:
        super().__init__()
        self.inner, self.raises, self.error = inner, raises, error

    def forward(self, **inputs: Any) -> Any:
        if self.raises(inputs["input_ids"]):
            raise self.error
        return self.inner(**inputs)


def in_sampling(endpoint: EmbeddedEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = inflight.engines.embedded.stepping.sample

    def faulty(logits: Any, params: Any, uniforms: Any) -> Any:
        if any(p.temperature == POISON for p in params):
            raise ValueError("a processor that cannot do this")
        return sample(logits, params, uniforms)

    monkeypatch.setattr(inflight.engines.embedded.stepping, "sample", faulty)


def in_sampling_later(endpoint: EmbeddedEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = inflight.engines.embedded.stepping.sample
    num_calls = 0

    def faulty(logits: Any, params: Any, uniforms: Any) -> Any:
        nonlocal num_calls
        if any(p.temperature == POISON for p in params):
            num_calls += 1
            if num_calls > 5:
                raise ValueError("a processor that cannot do this")
        return sample(logits, params, uniforms)

    monkeypatch.setattr(inflight.engines.embedded.stepping, "sample", faulty)


def in_the_model(endpoint: EmbeddedEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model fails where the poisonous prompt is computed: its last tokens in a row."""
    *_, before, last = poison("p").prompt_token_ids

    def raises(ids: torch.Tensor) -> bool:
        return bool(((ids[0, :-1] == before) & (ids[0, 1:] == last)).any())

    engine = endpoint._engine
    faulty = FaultyModel(engine.weights.model.base_model, raises, torch.OutOfMemoryError("out of memory"))
    monkeypatch.setattr(type(engine.weights.model), "base_model", property(lambda _: faulty))


def in_the_store(endpoint: EmbeddedEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    store = endpoint._engine.scheduler.store
    open_slot, reserve = store.open, store.reserve
    poisoned: set[Any] = set()

    def opening(length: int, most: int) -> Any:
        slot = open_slot(length, most)
        if most == len(poison("p").prompt_token_ids) + 95:
            poisoned.add(slot)
        return slot

    def reserving(slot: Any, num: int) -> None:
        if slot in poisoned and slot.length == 64:
            raise MemoryError("none left")
        reserve(slot, num)

    monkeypatch.setattr(store, "open", opening)
    monkeypatch.setattr(store, "reserve", reserving)


def in_decoding(endpoint: EmbeddedEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: Any, sequence: Any) -> bool:
        raise KeyError("no such piece")

    monkeypatch.setattr(type(endpoint._engine.steps), "_hit_stop_string", faulty)


FAULTS = (in_sampling, in_sampling_later, in_the_model, in_the_store, in_decoding)


def healthy_requests() -> list[GenerateRequest]:
    shapes = [(3, 70, 1), (50, 90, 3), (120, 40, 1), (7, 30, 2)]
    return [
        make_request(f"r{i}", prompt_of(length, i), max_tokens=num, n=n, seed=i, ignore_eos=True)
        for i, (length, num, n) in enumerate(shapes)
    ]


def prompt_of(length: int, seed: int) -> list[int]:
    return [min(token, MARK - 1) for token in random_prompt(length, seed)]


def poison(request_id: str, **fields: Any) -> GenerateRequest:
    prompt = [*prompt_of(49, 1), MARK]
    return make_request(
        request_id,
        prompt,
        **{"max_tokens": 95, "temperature": POISON, "ignore_eos": True, "n": 2, "stop": ["§"], **fields},
    )


async def answer_of(endpoint: EmbeddedEndpoint, request: GenerateRequest, streamed: bool) -> None:
    if not streamed:
        await endpoint.generate(request)
        return
    async for _ in endpoint.generate_stream(request):
        pass


@pytest.mark.parametrize("fault", first_of_each(FAULTS, lambda _: "any"))
@pytest.mark.parametrize("streamed", [False, True])
def test_the_request_that_makes_a_step_fail_ends_and_the_others_are_not_disturbed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], streamed: bool
) -> None:
    async def run() -> list[Completion]:
        async with serving(model_dir) as endpoint:
            with monkeypatch.context() as patched:
                fault(endpoint, patched)
                healthy = [asyncio.ensure_future(endpoint.generate(request)) for request in healthy_requests()]
                await until(lambda: endpoint.stats().num_tokens > 20)
                for i in range(2):
                    ended = rf"request 'p{i}' was ended .*other requests continue"
                    with pytest.raises(InvalidRequestError, match=ended):
                        await answer_of(endpoint, poison(f"p{i}"), streamed)
                async with asyncio.timeout(60):
                    answers = await asyncio.gather(*healthy)
            assert endpoint._engine.failure is None
            assert endpoint._engine.scheduler.store.size_bytes == endpoint._engine.scheduler.store.reserved_bytes == 0
            assert endpoint.stats().num_running == endpoint.stats().num_waiting == 0
            again = await endpoint.generate(healthy_requests()[0])
            assert again.completions[0].token_ids == answers[0].completions[0].token_ids
            return [completion for answer in answers for completion in answer.completions]

    completions = iter(asyncio.run(run()))
    model = load_reference(model_dir)
    undisturbed = asyncio.run(undisturbed_tokens(model_dir))
    for request in healthy_requests():
        for _ in range(request.sampling.n):
            completion = next(completions)
            assert len(completion.token_ids) == request.sampling.max_tokens
            # A step that is repeated draws the same.
            assert completion.token_ids == undisturbed.pop(0)
            assert_close(completion.logprobs, forward_logprobs(model, request.prompt_token_ids, completion.token_ids))


async def undisturbed_tokens(path: Path) -> list[tuple[int, ...]]:
    async with serving(path) as endpoint:
        answers = await asyncio.gather(*(endpoint.generate(request) for request in healthy_requests()))
        return [completion.token_ids for answer in answers for completion in answer.completions]


def test_memory_that_is_short_for_all_at_once_only_costs_nobody_anything(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with serving(model_dir) as endpoint:
            engine = endpoint._engine
            faulty = FaultyModel(
                engine.weights.model.base_model, lambda ids: ids.shape[1] > 130, torch.OutOfMemoryError("out of memory")
            )
            monkeypatch.setattr(type(engine.weights.model), "base_model", property(lambda _: faulty))
            answers = await asyncio.gather(*(endpoint.generate(request) for request in healthy_requests()))
            return [completion.token_ids for answer in answers for completion in answer.completions]

    short = asyncio.run(run())
    monkeypatch.undo()
    assert short == asyncio.run(undisturbed_tokens(model_dir))


def test_requests_of_the_same_prompt_are_told_apart(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            in_sampling(endpoint, monkeypatch)
            engine = endpoint._engine
            prompt = poison("p").prompt_token_ids
            gate: list[asyncio.Future[Any]] = []
            pause = inflight.wire.InFlightPolicy.KEEP
            engine.call(lambda: engine.pauses.pause(pause, lambda: None)).result(30)
            for request in (poison("p", n=1), make_request("good", prompt, max_tokens=4, ignore_eos=True)):
                gate.append(asyncio.ensure_future(endpoint.generate(request)))
                await until(lambda: endpoint.stats().num_waiting == len(gate))
            engine.call(engine.pauses.resume).result(30)
            bad, good = await asyncio.gather(*gate, return_exceptions=True)
            assert isinstance(bad, InvalidRequestError)
            assert len(good.completions[0].token_ids) == 4

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_that_no_request_is_to_blame_for_ends_the_engine_which_says_so(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            engine = endpoint._engine
            with slowed(endpoint):
                running = asyncio.ensure_future(endpoint.generate(make_request("r", [1, 2], n=3, ignore_eos=True)))
                await until(lambda: endpoint.stats().num_running == 3)
            faulty = FaultyModel(engine.weights.model.base_model, lambda _: True, RuntimeError("the device is gone"))
            monkeypatch.setattr(type(engine.weights.model), "base_model", property(lambda _: faulty))
            async with asyncio.timeout(60):
                with pytest.raises(EndpointError, match=r"the engine failed .*the device is gone.*restart"):
                    await running
            await until(lambda: engine.failure is not None)
            with pytest.raises(EndpointError, match="the device is gone"):
                await endpoint.weight_version()
            with pytest.raises(EndpointError, match="the device is gone"):
                await endpoint.generate(make_request("next", [1]))

    asyncio.run(run())
