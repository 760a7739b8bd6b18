"""Requests of the embedded engine: when completions end, what is refused, seeds, streams and cancellation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from inflight.engines.embedded import scheduler
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.tiny import byte_tokenizer
from inflight.errors import BusyError, EndpointError, InflightError, InvalidRequestError
from inflight.wire import Completion, CompletionChunk, GenerateRequest, InFlightPolicy
from tests.engine.reference import (
    VOCAB_SIZE,
    assert_close,
    forward_logprobs,
    generate_all,
    load_reference,
    make_request,
    random_prompt,
    serving,
)
from tests.gates import SOON_S, slowed, until
from tests.models import make_model

PROMPT = tuple(b"Say it backward:")


def generate_once(path: Path, *requests: GenerateRequest, **options: object) -> list[Completion]:
    """The first completion of each request, all sent at once to a fresh endpoint."""

    async def run() -> list[Completion]:
        async with serving(path, **options) as endpoint:
            return [response.completions[0] for response in await generate_all(endpoint, requests)]

    return asyncio.run(run())


def greedy(**sampling: object) -> GenerateRequest:
    return make_request("greedy", PROMPT, temperature=0.0, **sampling)


# ---------------------------------------------------------------------------------------------------------------
# How completions end


def reciting_model(path: Path, text: Sequence[int]) -> Path:
    """A model that writes ``text``, bytes or other token ids, each after the one before; none may occur twice.

    Each token has a direction of its own, the layers add nothing, and the head maps each direction to the next token.
    """
    assert len(set(text)) == len(text)
    model = load_reference(make_model(path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.dim() == 2:
                parameter.zero_()
        model.lm_head.weight.zero_()
        for i, (token, following) in enumerate(itertools.pairwise(text)):
            model.model.embed_tokens.weight[token] = torch.eye(32)[i]
            model.lm_head.weight[following] = torch.eye(32)[i]
    model.save_pretrained(path)
    return path


def test_a_stop_id_ends_the_completion_and_is_its_last_token(model_dir: Path) -> None:
    (free,) = generate_once(model_dir, greedy(max_tokens=30, ignore_eos=True))
    stop = free.token_ids[12]
    (stopped,) = generate_once(model_dir, greedy(max_tokens=30, ignore_eos=True, stop_token_ids=[stop]))
    first = free.token_ids.index(stop)
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"


def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(model_dir: Path) -> None:
    (free,) = generate_once(model_dir, greedy(max_tokens=60, ignore_eos=True))
    pairs = itertools.pairwise(free.token_ids)
    stop = next(bytes(pair).decode() for pair in pairs if all(32 <= token < 127 for token in pair))
    (stopped,) = generate_once(model_dir, greedy(max_tokens=60, ignore_eos=True, stop=["never here", stop]))
    decode = byte_tokenizer().decode
    end = next(i for i in range(61) if stop in decode(list(free.token_ids[:i])))
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["→", "→é", "\U0001f600!"])
def test_a_stop_string_is_found_when_its_characters_take_several_tokens(tmp_path: Path, stop: str) -> None:
    path = reciting_model(tmp_path / "reciting", f"ab{stop}cd".encode())
    request = make_request("r", b"a", temperature=0.0, max_tokens=30, stop=[stop])
    (completion,) = generate_once(path, request)
    assert bytes(completion.token_ids) == f"b{stop}".encode()
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(("stop", "ending"), [("pad", (22, "length")), ("bc", (3, "stop"))])
def test_special_tokens_have_no_text_that_a_stop_string_could_match(
    tmp_path: Path, stop: str, ending: tuple[int, str]
) -> None:
    special = byte_tokenizer().pad_token_id
    path = reciting_model(tmp_path / "reciting", [*b"ab", special, *b"cdefghijklmnopqrstuvw"])
    request = make_request("r", b"a", temperature=0.0, max_tokens=22, ignore_eos=True, stop=[stop])
    (completion,) = generate_once(path, request)
    assert completion.token_ids[:3] == (ord("b"), special, ord("c"))
    assert (len(completion.token_ids), completion.finish_reason) == ending


def uniform_model(path: Path) -> Path:
    """A model that gives every token the same probability."""
    model = load_reference(make_model(path))
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(path)
    return path


def test_end_of_sequence_ends_a_completion_unless_it_is_ignored(tmp_path: Path) -> None:
    path = uniform_model(tmp_path / "uniform")

    async def run() -> tuple[list[Completion], list[Completion]]:
        # Of completions of up to 100 tokens, one in three meets token 257.
        async with serving(path) as endpoint:
            ends, ignores = await generate_all(
                endpoint,
                [
                    make_request("ends", PROMPT, n=60, max_tokens=100, seed=1),
                    make_request("ignores", PROMPT, n=60, max_tokens=100, seed=1, ignore_eos=True),
                ],
            )
            return list(ends.completions), list(ignores.completions)

    ends, ignores = asyncio.run(run())
    assert {c.finish_reason for c in ignores} == {"length"}
    assert {c.finish_reason for c in ends} == {"length", "stop"}
    for ended, ignored in zip(ends, ignores, strict=True):
        # The same seed: the same tokens up to the end.
        assert ended.token_ids == ignored.token_ids[: len(ended.token_ids)]
        if ended.finish_reason == "stop":
            assert ended.token_ids[-1] == 257
        assert 257 not in ended.token_ids[:-1]


def test_without_max_tokens_a_completion_goes_on_to_the_end_of_the_context(model_dir: Path) -> None:
    (completion,) = generate_once(model_dir, make_request("r", PROMPT, ignore_eos=True), max_model_len=70)
    assert len(PROMPT) + len(completion.token_ids) == 70
    assert completion.finish_reason == "length"


# ---------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (make_request("r", [1] * 100), ("100 tokens", "context has only 100")),
        (make_request("r", [1] * 150), ("150 tokens", "context has only 100")),
        (make_request("r", [1] * 60, max_tokens=41), ("60 tokens", "max_tokens=41", "100", "at most 40")),
        (make_request("r", [1, VOCAB_SIZE, 3]), (f"token id {VOCAB_SIZE}", f"vocabulary of {VOCAB_SIZE}")),
        (make_request("r", [2**31 - 1]), (str(2**31 - 1), str(VOCAB_SIZE))),
    ],
    ids=["prompt-fills-context", "prompt-exceeds-context", "max-tokens", "vocabulary", "huge-id"],
)
def test_a_request_that_does_not_fit_is_refused_with_the_numbers(
    model_dir: Path, request_: GenerateRequest, numbers: tuple[str, ...]
) -> None:
    async def run() -> list[str]:
        async with serving(model_dir, max_model_len=100) as endpoint:
            messages = []
            with pytest.raises(InvalidRequestError) as generated:
                await endpoint.generate(request_)
            messages.append(str(generated.value))
            with pytest.raises(InvalidRequestError) as streamed:
                async for _ in endpoint.generate_stream(request_):
                    pass
            messages.append(str(streamed.value))
            # The engine continues as it was.
            await generate_all(endpoint, [make_request("fine", [1] * 60, max_tokens=40, ignore_eos=True)])
            return messages

    for message in asyncio.run(run()):
        for number in numbers:
            assert number in message


def test_stop_strings_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path / "no-tokenizer", tokenizer=False)

    async def run() -> None:
        async with serving(path) as endpoint:
            assert not (await endpoint.capabilities()).chat
            with pytest.raises(InvalidRequestError, match=r"tokenizer.*stop_token_ids"):
                await endpoint.generate(make_request("r", [1], stop=["x"], max_tokens=4))
            await generate_all(endpoint, [make_request("r", [1], stop_token_ids=[5], max_tokens=4)])

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_duplicate_request_id_is_refused_and_the_running_request_goes_on(model_dir: Path, streamed: bool) -> None:
    async def run() -> tuple[str, Completion]:
        async with serving(model_dir) as endpoint:
            with slowed(endpoint):
                running = asyncio.ensure_future(
                    endpoint.generate(make_request("same", PROMPT, max_tokens=400, ignore_eos=True))
                )
                await until(lambda: endpoint.stats().num_running)
                second = make_request("same", PROMPT, max_tokens=3)
                with pytest.raises(InvalidRequestError) as refused:
                    await (anext(endpoint.generate_stream(second)) if streamed else endpoint.generate(second))
            async with asyncio.timeout(60):
                return str(refused.value), (await running).completions[0]

    message, completion = asyncio.run(run())
    assert "'same'" in message
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 400


def test_a_request_id_can_be_used_again_once_its_request_has_ended(model_dir: Path) -> None:
    async def run() -> list[str]:
        async with serving(model_dir) as endpoint:
            reasons = []
            for _ in range(20):
                stream = endpoint.generate_stream(make_request("again", PROMPT, max_tokens=2, ignore_eos=True))
                assert [chunk.start async for chunk in stream] == [0, 1]
                (response,) = await generate_all(
                    endpoint, [make_request("again", PROMPT, max_tokens=2, ignore_eos=True)]
                )
                reasons.append(response.completions[0].finish_reason)
            return reasons

    assert set(asyncio.run(run())) == {"length"}


def test_a_request_that_is_refused_while_too_many_wait_leaves_its_id_free(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> Completion:
        async with serving(model_dir) as endpoint:
            monkeypatch.setattr(scheduler, "_MAX_WAITING", 1)
            for _ in range(2):
                with pytest.raises(BusyError, match="0 completions are waiting and 2 more are requested"):
                    await endpoint.generate(make_request("refused", PROMPT, n=2, max_tokens=2))
            assert not endpoint._engine.scheduler.requests
            request = make_request("refused", PROMPT, max_tokens=2, ignore_eos=True)
            (response,) = await generate_all(endpoint, [request])
            return response.completions[0]

    assert len(asyncio.run(run()).token_ids) == 2


# ---------------------------------------------------------------------------------------------------------------
# Seeds


def test_a_seed_gives_the_same_completions_whatever_else_runs(model_dir: Path) -> None:
    seeded = make_request("seeded", PROMPT, n=3, max_tokens=90, seed=42, temperature=0.9, top_p=0.95, ignore_eos=True)
    others = [make_request(f"o{i}", random_prompt(10 * i + 1, i), max_tokens=20 + 9 * i) for i in range(8)]

    async def run(companions: list[GenerateRequest], max_concurrent: int) -> tuple[Completion, ...]:
        async with serving(model_dir, max_concurrent=max_concurrent) as endpoint:
            busy = asyncio.ensure_future(generate_all(endpoint, companions))
            if companions:
                await until(lambda: endpoint.stats().num_tokens > 20)
            (response,) = await generate_all(endpoint, [seeded])
            await busy
            return response.completions

    alone = asyncio.run(run([], 64))
    assert len({completion.token_ids for completion in alone}) == 3
    for companions, max_concurrent in ((others, 64), (others, 4), ([], 1)):
        crowded = asyncio.run(run(companions, max_concurrent))
        assert [c.token_ids for c in crowded] == [c.token_ids for c in alone]
        # float32: batches of other sizes are summed in another order.
        for one, other in zip(crowded, alone, strict=True):
            assert_close(one.logprobs, other.logprobs)


def test_unseeded_requests_differ(model_dir: Path) -> None:
    first, second = generate_once(
        model_dir, *(make_request(i, PROMPT, max_tokens=20, ignore_eos=True) for i in ("a", "b"))
    )
    assert first.token_ids != second.token_ids


# ---------------------------------------------------------------------------------------------------------------
# Streams and cancellation


def test_streamed_chunks_join_to_what_generate_answers(model_dir: Path) -> None:
    request = make_request("r", PROMPT, n=3, max_tokens=80, seed=5)

    async def run() -> tuple[tuple[Completion, ...], list[CompletionChunk]]:
        async with serving(model_dir, max_concurrent=2) as endpoint:
            (response,) = await generate_all(endpoint, [request])
            async with asyncio.timeout(60):
                return response.completions, [chunk async for chunk in endpoint.generate_stream(request)]

    completions, chunks = asyncio.run(run())
    for completion in completions:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert tuple(token for chunk in mine for token in chunk.token_ids) == completion.token_ids
        assert_close([x for chunk in mine for x in chunk.logprobs], completion.logprobs)
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
        position = 0
        for chunk in mine:
            assert chunk.start == position
            position += len(chunk.token_ids)
        assert {chunk.version for chunk in mine} == {0}


async def leave_by_cancelling(endpoint: EmbeddedEndpoint, request: GenerateRequest) -> None:
    with slowed(endpoint):
        task = asyncio.ensure_future(endpoint.generate(request))
        await until(lambda: endpoint.stats().num_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def leave_by_closing_the_stream(endpoint: EmbeddedEndpoint, request: GenerateRequest) -> None:
    stream = endpoint.generate_stream(request)
    await anext(stream)
    await stream.aclose()


@pytest.mark.parametrize("leave", [leave_by_cancelling, leave_by_closing_the_stream])
def test_a_cancelled_request_frees_its_slot_and_the_others_go_on(model_dir: Path, leave: object) -> None:
    async def run() -> tuple[int, list[Completion]]:
        async with serving(model_dir, max_concurrent=3) as endpoint:
            await leave(endpoint, make_request("leaves", PROMPT, n=5, ignore_eos=True))
            others = [
                make_request(f"o{i}", random_prompt(9, i), max_tokens=60, seed=i, ignore_eos=True) for i in range(5)
            ]
            responses = await generate_all(endpoint, others)
            assert endpoint.stats().num_running == endpoint.stats().num_waiting == 0
            return endpoint.stats().num_finished, [r.completions[0] for r in responses]

    num_finished, completions = asyncio.run(run())
    assert num_finished == 10
    model = load_reference(model_dir)
    for i, completion in enumerate(completions):
        assert completion.finish_reason == "length"
        assert_close(completion.logprobs, forward_logprobs(model, random_prompt(9, i), completion.token_ids))


def test_cancelling_at_any_moment_leaves_the_engine_running(model_dir: Path) -> None:
    async def run() -> Completion:
        async with serving(model_dir) as endpoint:
            busy = asyncio.ensure_future(
                endpoint.generate(make_request("busy", PROMPT, max_tokens=400, ignore_eos=True))
            )
            await until(lambda: endpoint.stats().num_running)
            for i in range(60):
                leaving = asyncio.ensure_future(endpoint.generate(make_request(f"r{i}", PROMPT, ignore_eos=True)))
                await asyncio.sleep((i % 6) * 0.0005)
                leaving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await leaving
            await until(lambda: endpoint.stats().num_running <= 1)
            async with asyncio.timeout(60):
                return (await busy).completions[0]

    assert len(asyncio.run(run()).token_ids) == 400


def test_a_pause_by_abort_ends_a_request_whose_started_completions_have_all_finished(model_dir: Path) -> None:
    async def run() -> list[Completion]:
        async with serving(model_dir, max_concurrent=1) as endpoint:
            engine = endpoint._engine
            paused: Future[None] = Future()

            def pause_between_two_completions() -> None:
                engine.pauses.pause(InFlightPolicy.ABORT, lambda: paused.set_result(None))

            with slowed(endpoint, after=1):
                request = make_request("many", PROMPT, n=3, max_tokens=1, ignore_eos=True)
                running = asyncio.ensure_future(endpoint.generate(request))
                await until(lambda: endpoint.stats().num_tokens >= 1)
                engine.call(pause_between_two_completions)
                await asyncio.wrap_future(paused)
                async with asyncio.timeout(SOON_S):
                    return list((await running).completions)

    first, *others = asyncio.run(run())
    assert len(first.token_ids) == 1
    assert {len(it.token_ids) for it in others} <= {0, 1}
    assert others[-1].finish_reason == "abort"


def test_closing_the_endpoint_ends_what_runs_with_what_it_has(model_dir: Path) -> None:
    async def run() -> tuple[Completion, Completion]:
        async with serving(model_dir, max_concurrent=1) as endpoint:
            requests = [make_request(f"r{i}", PROMPT, ignore_eos=True) for i in range(2)]
            with slowed(endpoint, after=3):
                running = [asyncio.ensure_future(endpoint.generate(request)) for request in requests]
                await until(lambda: endpoint.stats().num_tokens >= 3)
                async with asyncio.timeout(SOON_S):
                    await endpoint.aclose()
                    first, second = await asyncio.gather(*running)
            with pytest.raises(InflightError, match="closed"):
                await endpoint.generate(requests[0])
            return first.completions[0], second.completions[0]

    first, second = asyncio.run(run())
    assert (first.finish_reason, second.finish_reason) == ("abort", "abort")
    assert len(first.token_ids) == len(first.logprobs) == first.version_spans[-1].end >= 3
    assert (second.token_ids, second.version_spans) == ((), ())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_died_says_so_instead_of_looking_ready(model_dir: Path) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:

            def break_down(_: object) -> None:
                raise RuntimeError("out of memory, say")

            # A callback that raises stands for whatever may go wrong in the engine's own thread.
            endpoint._engine.submit(make_request("r", PROMPT, max_tokens=2), break_down, break_down)
            await until(lambda: not endpoint._engine._thread.is_alive())
            with pytest.raises(EndpointError, match=r"out of memory, say.*restart"):
                await endpoint.weight_version()
            with pytest.raises(EndpointError, match=r"out of memory, say.*restart"):
                await endpoint.generate(make_request("next", PROMPT, max_tokens=2))

    asyncio.run(run())
