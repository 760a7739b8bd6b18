"""Requests of one client to an engine: what is sent when, and what becomes of those that are aborted. No engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from inflight.base.tasks import TaskOwner
from inflight.engines.requests import RequestGate, SentRequest
from inflight.engines.routes import EngineRoutes
from inflight.engines.timings import LastUpdate
from inflight.wire import GenerateRequest, SamplingParams
from inflight_sglang.updates import SglangUpdates
from tests.engines.labelled_servers import LabelledSglang
from tests.gates import until

OLD, NEW = "1@run", "2@run"
Item = dict[str, Any]


class Engine:
    """Answers when it is told to end completions, or all at once when `finish` is called."""

    def __init__(self) -> None:
        self.label = OLD
        self.asked: list[Mapping[int, SentRequest]] = []
        self.ended: list[str] = []
        self.num_deaf = 0
        """How often it ignores names, as if they had not arrived yet."""
        self._answers: dict[str, asyncio.Future[Item]] = {}

    async def told_label(self) -> str:
        return self.label

    async def send(self, asked: Mapping[int, SentRequest]) -> list[Item]:
        self.asked.append(asked)
        for it in asked.values():
            self._answers[it.name] = asyncio.get_running_loop().create_future()
        return list(await asyncio.gather(*(self._answers[it.name] for it in asked.values())))

    async def end(self, names: Sequence[str]) -> None:
        self.num_deaf -= 1
        self.ended += names
        for name in names:
            if self.num_deaf < 0 and not self._answers[name].done():
                self._answers[name].set_result({"reason": "abort", "label": self.label})

    def finish(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"reason": "length", "label": self.label})


def labelled(item: Item) -> list[dict[str, Any]]:
    return [{"version": item["label"], "start": 0, "end": 1}]


def requested(request_id: str, n: int = 1) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt_token_ids=(1,), sampling=SamplingParams(n=n))


def run(test: Callable[[RequestGate, Engine, Callable[..., asyncio.Future[Any]]], Awaitable[None]]) -> None:
    async def main() -> None:
        gate, engine = RequestGate(), Engine()

        def sample(request_id: str, n: int = 1) -> asyncio.Future[Any]:
            request = requested(request_id, n)
            return asyncio.ensure_future(gate.sample(request, engine.told_label, engine.send, labelled))

        async with asyncio.timeout(20):
            await test(gate, engine, sample)
        assert not gate.has_requests
        assert gate.num_sent == 0

    asyncio.run(main())


def test_an_aborted_request_is_over_when_the_call_returns_and_others_go_on() -> None:
    async def test(gate: RequestGate, engine: Engine, sample: Any) -> None:
        aborted, other = sample("a", 2), sample("ab")
        await until(lambda: gate.num_sent == 3)
        await gate.abort(["a", "never sent"], engine.end)
        assert gate.num_sent == 1
        assert [item["reason"] for item in await aborted] == ["abort", "abort"]
        engine.finish()
        assert [item["reason"] for item in await other] == ["length"]
        assert set(engine.ended) == {it.name for it in engine.asked[0].values()}

    run(test)


def test_an_abort_is_repeated_until_the_engine_has_heard_it() -> None:
    async def test(gate: RequestGate, engine: Engine, sample: Any) -> None:
        engine.num_deaf = 3
        aborted = sample("a")
        await until(lambda: gate.num_sent)
        await gate.abort(["a"], engine.end)
        assert len(engine.ended) == 4
        assert (await aborted)[0]["reason"] == "abort"

    run(test)


def test_a_request_that_waits_for_the_gate_ends_without_being_sent() -> None:
    async def test(gate: RequestGate, engine: Engine, sample: Any) -> None:
        gate.is_open.clear()
        aborted = sample("a", 3)
        await asyncio.sleep(0.01)
        await gate.abort(["a"], engine.end)
        assert await aborted == [None, None, None]
        assert engine.asked == engine.ended == []

    run(test)


def test_a_request_that_is_aborted_while_the_label_is_asked_for_is_not_sent() -> None:
    async def test(gate: RequestGate, engine: Engine, sample: Any) -> None:
        asking, told = asyncio.Event(), asyncio.Event()

        async def slow_label() -> str:
            asking.set()
            await told.wait()
            return OLD

        aborted = asyncio.ensure_future(gate.sample(requested("a"), slow_label, engine.send, labelled))
        await asking.wait()
        aborting = asyncio.ensure_future(gate.abort(["a"], engine.end))
        await asyncio.sleep(0.01)
        told.set()
        await aborting
        assert await aborted == [None]
        assert engine.asked == []

    run(test)


def test_what_began_under_other_weights_than_its_prefix_is_not_given_back() -> None:
    async def test(gate: RequestGate, engine: Engine, sample: Any) -> None:
        aborted = sample("a", 2)
        await until(lambda: gate.num_sent)
        engine.label = NEW  # an update came before the first token
        await gate.abort(["a"], engine.end)
        assert await aborted == [None, None]
        assert len(engine.asked) == 1

    run(test)


def test_no_name_is_the_beginning_of_another_one() -> None:
    async def test(gate: RequestGate, engine: Engine, sample: Any) -> None:
        answers = [sample(request_id, 12) for request_id in ("r-1", "r-10", "r", "r/0.", "1:r", "a/1", "a")]
        await until(lambda: gate.num_sent == 7 * 12)
        engine.finish()
        await asyncio.gather(*answers)
        again = sample("r", 12)
        await until(lambda: gate.num_sent == 12)
        engine.finish()
        await again
        names = [it.name for asked in engine.asked for it in asked.values()]
        assert not [(one, other) for one in names for other in names if one is not other and other.startswith(one)]

    run(test)


@pytest.mark.parametrize("is_paused", [False, True])
def test_sglang_is_told_of_an_abort_only_while_it_begins_requests(model_dir: Path, is_paused: bool) -> None:
    server = LabelledSglang(model_dir)
    server.is_paused, server.num_sampled = is_paused, 1

    async def main() -> None:
        async with server.served() as url:
            routes = EngineRoutes(url, api_key=None, control_timeout_s=5.0)
            updates = SglangUpdates(routes, RequestGate(), TaskOwner(), LastUpdate())
            await updates.end_requests(["a", "b"])
            await routes.aclose()

    asyncio.run(main())
    assert server.asked.count("/abort_request") == (0 if is_paused else 2)
