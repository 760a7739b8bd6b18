"""The calls with which real engines release their memory and take it back, in the order that the adapters make them.

Builds for the CPU answer these routes, pause and continue, but free nothing. So their endpoints support nothing, and
these tests call them as if they did: what they prove is the protocol, not that memory is freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from inflight.contracts import ReleasingEndpoint
from inflight.errors import BusyError, ReleasedError, UnsupportedError, UpdateError
from inflight.wire import Capabilities, EndpointState
from tests.gates import until
from tests.real_engines.servers import RealEngine, is_uniform, logprobs, muted, publish, request, run

VOCAB_SIZE = 258


def as_on_a_gpu(engine: RealEngine) -> Any:
    """Return a client that believes that the server can release its memory."""
    endpoint: Any = engine.endpoint(generate_timeout_s=150.0)
    own = endpoint.capabilities

    async def declared() -> Capabilities:
        return (await own()).model_copy(update={"releases_memory": True})

    endpoint.capabilities = declared
    return endpoint


@pytest.fixture(autouse=True)
def restored(engine: RealEngine) -> Iterator[None]:
    """The tests of an engine share it: it samples when the next one begins, whatever became of this one."""
    yield
    asked(engine, lambda endpoint: endpoint.restore_memory())


def asked(engine: RealEngine, call: Any) -> Any:
    endpoint = as_on_a_gpu(engine)
    result: Coroutine[Any, Any, Any] = call(endpoint)
    return run(endpoint, lambda _: result)


def test_a_build_for_the_cpu_declares_nothing_and_says_why(engine: RealEngine) -> None:
    async def release(endpoint: Any) -> None:
        assert isinstance(endpoint, ReleasingEndpoint)
        assert not (await endpoint.capabilities()).releases_memory
        with pytest.raises(UnsupportedError, match=r"was started without --enable-.*, which need a GPU"):
            await endpoint.release_memory()
        assert (await endpoint.weight_version()).state is EndpointState.READY

    run(engine.endpoint(), release)


def test_an_engine_is_released_for_every_client_and_samples_the_same_once_it_is_restored(engine: RealEngine) -> None:
    with engine.publisher() as publisher:
        publish(publisher, muted(engine.tensors), 3)
        publish(publisher, engine.tensors, 4)
        before = asked(engine, lambda endpoint: endpoint.generate(request()))

        for _ in range(2):  # the second time it is released already
            assert asked(engine, lambda endpoint: endpoint.release_memory()).state is EndpointState.RELEASED
        version = asked(engine, lambda endpoint: endpoint.weight_version())
        assert (version.state, version.version) == (EndpointState.RELEASED, 4)
        with pytest.raises(ReleasedError, match="restore_memory"):
            run(engine.endpoint(), lambda endpoint: endpoint.generate(request()))  # it knows nothing of releases
        with pytest.raises(UpdateError, match="memory is released"):
            publish(publisher, muted(engine.tensors), 5)
        with engine.publisher() as other, pytest.raises(UpdateError, match="memory is released"):
            publish(other, muted(engine.tensors), 6)  # forming its group does not wake the engine
        with pytest.raises(ReleasedError):
            asked(engine, lambda endpoint: endpoint.generate(request()))

        for _ in range(2):
            version = asked(engine, lambda endpoint: endpoint.restore_memory())
            assert (version.state, version.version) == (EndpointState.READY, 4)
        after = asked(engine, lambda endpoint: endpoint.generate(request()))
        assert after.completions[0].token_ids == before.completions[0].token_ids
        assert logprobs(after) == pytest.approx(logprobs(before), abs=1e-5)
    with engine.publisher() as publisher:
        publish(publisher, muted(engine.tensors), 1)
        assert all(is_uniform(it, VOCAB_SIZE) for it in logprobs(asked(engine, lambda e: e.generate(request()))))
        publish(publisher, engine.tensors, 2)


def test_a_release_is_refused_while_this_client_or_another_has_requests(
    engine: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("inflight_vllm.updates", "inflight_sglang.updates"):
        monkeypatch.setattr(f"{module}.IDLE_S", 0.2)

    async def release() -> None:
        busy, other = as_on_a_gpu(engine), as_on_a_gpu(engine)
        try:
            await other.capabilities()
            await busy.capabilities()
            running = asyncio.ensure_future(busy.generate(request(1000)))
            await until(lambda: busy._gate.num_sent > 0)
            for endpoint, words in ((busy, "1 requests are running or waiting"), (other, "still running after 0.2 s")):
                assert not running.done()
                with pytest.raises(BusyError, match=words):
                    await endpoint.release_memory()
                assert (await endpoint.weight_version()).state is EndpointState.READY
            assert not running.done()
            response = await running
            assert (len(response.completions[0].token_ids), response.completions[0].finish_reason) == (1000, "length")
            await other.generate(request())
        finally:
            await busy.aclose()
            await other.aclose()

    asyncio.run(release())
