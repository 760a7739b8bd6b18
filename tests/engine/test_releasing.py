"""The memory of the embedded engine, abandoned and taken back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inflight.engines.embedded.slots import Arena
from inflight.errors import EndpointError, ReleasedError
from inflight.wire import EndpointState
from tests.engine.reference import make_request, random_prompt, serving
from tests.engine.test_memory import held_bytes
from tests.gates import until


def test_no_keys_and_values_are_held_while_memory_is_released_and_tokens_are_the_same(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resize, is_full = Arena.resize, True

    def without_memory(arena: Arena, num_slots: int) -> None:
        if is_full and num_slots < arena.num_slots:
            raise MemoryError("none left for a copy")
        resize(arena, num_slots)

    monkeypatch.setattr(Arena, "resize", without_memory)

    async def run() -> None:
        nonlocal is_full
        async with serving(model_dir) as endpoint:
            store = endpoint._engine.scheduler.store
            first = await endpoint.generate(make_request("r", random_prompt(9, 1), max_tokens=20, seed=1))
            assert held_bytes(store) > 0
            is_full = False
            assert (await endpoint.release_memory()).state is EndpointState.RELEASED
            assert held_bytes(store) == 0
            await endpoint.restore_memory()
            assert await endpoint.generate(make_request("r", random_prompt(9, 1), max_tokens=20, seed=1)) == first

    asyncio.run(run())


def test_a_restore_without_memory_leaves_it_released_and_may_be_repeated(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            await endpoint.release_memory()
            with monkeypatch.context() as patched:

                def no_memory() -> None:
                    raise RuntimeError("CUDA out of memory")

                patched.setattr(endpoint._engine, "take_memory", no_memory)
                with pytest.raises(EndpointError, match="remains released: CUDA out of memory"):
                    await endpoint.restore_memory()
            assert (await endpoint.weight_version()).state is EndpointState.RELEASED
            with pytest.raises(ReleasedError):
                await endpoint.generate(make_request("r", random_prompt(5, 1), max_tokens=2))
            assert (await endpoint.restore_memory()).state is EndpointState.READY
            await endpoint.generate(make_request("r", random_prompt(5, 1), max_tokens=2))

    asyncio.run(run())


def test_a_release_goes_on_without_its_caller_and_a_restore_waits_for_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with serving(model_dir) as endpoint:
            free_memory, go_on = endpoint.free_memory, asyncio.Event()

            async def slowly() -> None:
                await go_on.wait()
                await free_memory()

            monkeypatch.setattr(endpoint, "free_memory", slowly)
            releasing = asyncio.ensure_future(endpoint.release_memory())
            await until(lambda: endpoint._updates.session.state is EndpointState.RELEASED)
            with pytest.raises(ReleasedError):  # from the call on, not only once the memory is free
                await endpoint.generate(make_request("r", random_prompt(5, 1), max_tokens=2))
            releasing.cancel()
            restoring = asyncio.ensure_future(endpoint.restore_memory())
            await asyncio.sleep(0.2)
            assert not restoring.done()
            go_on.set()
            assert (await restoring).state is EndpointState.READY
            await endpoint.generate(make_request("r", random_prompt(5, 1), max_tokens=2))

    asyncio.run(run())
