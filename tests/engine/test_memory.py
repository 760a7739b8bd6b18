"""Keys and values of the embedded engine: what they take, that they are given back, and who waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engines.embedded.slots import Slot, SlotStore, token_bytes_of
from inflight.errors import ConfigError, InvalidRequestError
from inflight.wire import Completion
from tests.engine.reference import (
    assert_close,
    forward_logprobs,
    generate_all,
    load_reference,
    make_request,
    random_prompt,
    serving,
)
from tests.gates import SOON_S, slowed, until

CONFIG = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=3, hidden_size=12)
MAX_MODEL_LEN = 300
TOKEN_BYTES = token_bytes_of(CONFIG, torch.float32)


def store_of(num_contexts: float) -> SlotStore:
    limit = int(num_contexts * MAX_MODEL_LEN * TOKEN_BYTES)
    return SlotStore(CONFIG, MAX_MODEL_LEN, torch.float32, torch.device("cpu"), limit)


def held_bytes(store: SlotStore) -> int:
    """Bytes of the tensors themselves."""
    tensors = [tensor for arena in store.arenas for tensor in (arena.keys_LSKCD, arena.values_LSKCD)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def write(store: SlotStore, slot: Slot, mark: int) -> None:
    """Fill the next position as a forward would."""
    store.reserve(slot)
    slot.arena.keys_LSKCD[:, slot.row, :, slot.length] = mark + slot.length
    slot.arena.values_LSKCD[:, slot.row, :, slot.length] = -mark - slot.length
    slot.length += 1


def require_held(slot: Slot, mark: int) -> None:
    expected = mark + torch.arange(slot.length).float()
    for sign, tensor in ((1, slot.arena.keys_LSKCD), (-1, slot.arena.values_LSKCD)):
        assert torch.equal(
            tensor[:, slot.row, :, : slot.length], (sign * expected)[None, None, :, None].expand(2, 2, -1, 3)
        )


arrivals = st.tuples(st.just("arrive"), st.integers(1, 200), st.integers(1, 99))
moves = st.lists(
    arrivals
    | st.tuples(st.just("end"), st.integers(0, 99), st.just(0))
    | st.tuples(st.just("grow"), st.integers(0, 99), st.integers(1, 150)),
    max_size=60,
)


@given(moves=moves, num_contexts=st.sampled_from([1, 1.5, 3, 50]))
@settings(max_examples=60)
def test_arenas_take_no_more_than_the_limit_and_than_half_as_much_again_as_is_used(
    moves: list[tuple[str, int, int]], num_contexts: float
) -> None:
    store = store_of(num_contexts)
    open_slots: list[tuple[Slot, int, int]] = []
    for number, (kind, first, second) in enumerate(moves):
        if kind == "arrive" and store.fits(first + second):
            slot = store.open(first, first + second)
            open_slots.append((slot, first + second, 1000 * number))
            for _ in range(first):
                write(store, slot, 1000 * number)
        elif kind == "end" and open_slots:
            store.close(open_slots.pop(first % len(open_slots))[0])
        elif kind == "grow" and open_slots:
            slot, most, mark = open_slots[first % len(open_slots)]
            for _ in range(min(second, most - slot.length)):
                write(store, slot, mark)
        assert held_bytes(store) == store.size_bytes <= store.limit_bytes
        assert store.reserved_bytes == sum(slot.reserved_bytes for slot, _, _ in open_slots)
        for arena in store.arenas:
            assert arena.num_slots <= 1.5 * len(arena.owners) + 1
            assert arena.owners or arena.num_slots == 0
        for slot, _, mark in open_slots:
            require_held(slot, mark)
    for slot, _, _ in open_slots:
        store.close(slot)
    assert held_bytes(store) == store.reserved_bytes == 0


def test_a_move_that_finds_no_memory_touches_no_other_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(50)
    slots = [store.open(1, MAX_MODEL_LEN) for _ in range(3)]
    for i, slot in enumerate(slots):
        for _ in range(64):
            write(store, slot, 1000 * i)

    def no_memory(*_: object) -> None:
        raise MemoryError("none left")

    for arena in store.arenas[1:]:
        monkeypatch.setattr(arena, "resize", no_memory)
    with pytest.raises(MemoryError):
        store.reserve(slots[1])
    store.close(slots[1])
    for i in (0, 2):
        require_held(slots[i], 1000 * i)
        store.close(slots[i])
    assert held_bytes(store) == store.reserved_bytes == 0


# ---------------------------------------------------------------------------------------------------------------
# The engine


def tiny_context_bytes(num_tokens: int) -> int:
    """Bytes of keys and values of the test model: 2 layers, 2 heads of 8 dimensions, float32."""
    return num_tokens * 2 * 2 * 2 * 8 * 4


def test_requests_that_do_not_fit_now_wait_and_are_answered_as_if_they_had(model_dir: Path) -> None:
    requests = [
        make_request(f"r{i}", random_prompt(5 + 30 * i, i), max_tokens=20 + 11 * i, seed=i, ignore_eos=True, n=2)
        for i in range(6)
    ]

    async def run(**options: int) -> tuple[list[Completion], int]:
        async with serving(model_dir, max_model_len=256, **options) as endpoint:
            store, most = endpoint._engine.scheduler.store, 0
            reserve = store.reserve

            def noting(slot: Slot, num: int) -> None:
                nonlocal most
                reserve(slot, num)
                most = max(most, held_bytes(store))

            store.reserve = noting  # type: ignore[method-assign]
            answers = await generate_all(endpoint, requests)
            assert held_bytes(store) == store.reserved_bytes == 0
            return [completion for answer in answers for completion in answer.completions], most

    limit = tiny_context_bytes(300)
    tight, most = asyncio.run(run(kv_cache_bytes=limit))
    free, unbounded = asyncio.run(run())
    assert most <= limit < unbounded
    assert [c.token_ids for c in tight] == [c.token_ids for c in free]
    model = load_reference(model_dir)
    for i, completion in enumerate(tight):
        assert_close(
            completion.logprobs, forward_logprobs(model, requests[i // 2].prompt_token_ids, completion.token_ids)
        )


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(model_dir: Path) -> None:
    limit = tiny_context_bytes(100)

    async def run() -> None:
        async with serving(model_dir, kv_cache_bytes=limit) as endpoint:
            assert (await endpoint.capabilities()).max_model_len == 100
            with pytest.raises(InvalidRequestError, match=rf"context of 100 \(the number that fits in {limit} bytes"):
                await endpoint.generate(make_request("r", [1] * 60, max_tokens=41))
            with pytest.raises(
                InvalidRequestError, match=rf"context has only 100 \(the number that fits in {limit} bytes"
            ):
                await endpoint.generate(make_request("r", [1] * 100))
            await generate_all(endpoint, [make_request("r", [1] * 60, max_tokens=40, ignore_eos=True)])

    asyncio.run(run())


@pytest.mark.parametrize(
    "options", [{"kv_cache_bytes": 100}, {"kv_cache_bytes": tiny_context_bytes(99), "max_model_len": 100}]
)
def test_a_limit_that_holds_no_sequence_is_no_configuration(model_dir: Path, options: dict[str, int]) -> None:
    async def run() -> None:
        async with serving(model_dir, **options):
            pass

    with pytest.raises(ConfigError, match=f"kv_cache_bytes {options['kv_cache_bytes']} is too small for one sequence"):
        asyncio.run(run())


@pytest.mark.parametrize("way", ["cancelled", "closed", "aborted"])
def test_requests_that_end_early_give_everything_back(model_dir: Path, way: str) -> None:
    async def run() -> None:
        async with serving(model_dir, max_concurrent=4) as endpoint:
            store = endpoint._engine.scheduler.store
            for i in range(3):
                request = make_request(f"r{i}", random_prompt(70, i), n=6, ignore_eos=True)
                if way == "closed":
                    stream = endpoint.generate_stream(request)
                    await anext(stream)
                    await stream.aclose()
                else:
                    with slowed(endpoint):
                        task = asyncio.ensure_future(endpoint.generate(request))
                        await until(lambda: endpoint.stats().num_running == 4)
                        if way == "aborted":
                            endpoint._engine.call(endpoint._engine.scheduler.cancel_all).result(SOON_S)
                        else:
                            task.cancel()
                    if way == "aborted":
                        assert {c.finish_reason for c in (await task).completions} == {"abort"}
                    await asyncio.gather(task, return_exceptions=True)
                await until(lambda: not endpoint._engine.scheduler.requests)
                assert endpoint.stats().num_running == endpoint.stats().num_waiting == 0
                assert held_bytes(store) == store.reserved_bytes == 0

    asyncio.run(run())
