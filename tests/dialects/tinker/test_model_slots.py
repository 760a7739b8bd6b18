"""Models of a server of Tinker's API that take turns in fewer slots than there are models."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from inflight.dialects.tinker import model_slots, tinker_model
from inflight.dialects.tinker.backend import ForwardResult
from inflight.dialects.tinker.data import Datum
from inflight.dialects.tinker.protobuf import messages
from inflight.dialects.tinker.requests import CreateModel, CreateSession, OptimStep
from inflight.dialects.tinker.service import TinkerService
from tests.gates import until


class _Ranks:
    """Ranks of a model that only count their steps; the count is their state."""

    def __init__(self, model_id: str, log: list[str]) -> None:
        self.model_id = model_id
        self.num_steps = 0
        self.num_calls = 0
        self.is_closed = False
        self.log = log
        self.may_save = asyncio.Event()
        self.may_save.set()

    async def step(self, settings: Any) -> dict[str, float]:
        self.num_calls += 1
        assert self.num_calls == 1
        await asyncio.sleep(0.01)
        self.num_calls -= 1
        self.num_steps += 1
        self.log.append(self.model_id[-1])
        return {"num_steps": float(self.num_steps)}

    async def forward_backward(self, data: Sequence[Datum], *_: Any, **options: bool) -> ForwardResult:
        assert options == {"forward_only": False}
        self.log.append("backward")
        rows = [np.zeros(len(datum.token_ids)) for datum in data]
        return ForwardResult(rows, rows, 0.0)

    async def save(self, path: Path) -> None:
        self.num_calls += 1
        assert self.num_calls == 1
        self.log.append(f"save {self.model_id[-1]}")
        await self.may_save.wait()
        self.num_calls -= 1
        await asyncio.to_thread(path.mkdir)
        (path / "num_steps").write_text(str(self.num_steps))

    async def load(self, path: Path, *, optimizer: bool) -> None:
        assert optimizer
        self.num_steps = int((path / "num_steps").read_text())

    async def aclose(self) -> None:
        assert not self.num_calls
        self.is_closed = True


class _Service:
    """A service of one slot, and its log of calls."""

    def __init__(self, directory: Path) -> None:
        self.log: list[str] = []
        self.ranks: list[_Ranks] = []
        self.may_create = asyncio.Event()
        self.may_create.set()
        backend = SimpleNamespace(
            model_name="tiny",
            model_dir=directory,
            max_models=1,
            vocab_size=100,
            max_model_len=100,
            create=self._create,
        )
        self.service = TinkerService(cast(Any, backend), directory)
        self.session_id = self.service.create_session(CreateSession())
        self._numbers = itertools.count(1)

    async def _create(self, model_id: str, *_: Any) -> _Ranks:
        self.log.append(f"create {model_id[-1]}")
        await self.may_create.wait()
        self.ranks.append(_Ranks(model_id, self.log))
        return self.ranks[-1]

    async def retrieve(self, request_id: str) -> Any:
        return await self.service.futures.retrieve(request_id)

    def begin_model(self, number: int) -> str:
        asked = CreateModel(session_id=self.session_id, model_seq_id=number, base_model="tiny")
        return self.service.create_model(asked)

    async def model(self, number: int) -> Callable[[int], str]:
        """Return a function that begins the step of this number."""
        model_id = (await self.retrieve(self.begin_model(number)))["model_id"]
        return lambda step: self.service.optim_step(
            OptimStep(model_id=model_id, seq_id=step, adam_params={}), b"%d" % step
        )

    def begin_backward(self, number: int, step: int) -> str:
        request = messages().ForwardBackwardRequest(
            model_id=f"{self.session_id}:train:{number}", seq_id=step, loss_fn="cross_entropy"
        )
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = np.array([2, 3], "<i8").tobytes(), 2
        targets.shape.append(2)
        return self.service.forward_backward(request.SerializeToString())[0]


def run(directory: Path, main: Callable[[_Service], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        served = _Service(directory)
        await main(served)
        await served.service.aclose()

    asyncio.run(asyncio.wait_for(all_of_it(), 30))


@pytest.mark.parametrize(("turn_s", "is_interrupted"), [(1e9, False), (0.0, True)])
def test_a_model_with_waiting_calls_keeps_its_ranks_for_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn_s: float, is_interrupted: bool
) -> None:
    monkeypatch.setattr(model_slots, "_TURN_S", turn_s)

    async def main(served: _Service) -> None:
        zero, one = await served.model(0), await served.model(1)
        of_one = [one(step) for step in range(1, 11)]
        of_zero = [zero(1)]
        steps = [await served.retrieve(it) for it in (*of_one, *of_zero)]
        assert [it["metrics"]["num_steps"] for it in steps] == [*range(1, 11), 1]
        order = "".join(it for it in served.log if it in "01")
        assert (order != "1" * 10 + "0") == is_interrupted, order

    run(tmp_path, main)


def test_a_call_that_arrives_while_its_model_is_parked_gets_new_ranks(tmp_path: Path) -> None:
    async def main(served: _Service) -> None:
        zero = await served.model(0)
        assert (await served.retrieve(zero(1)))["metrics"] == {"num_steps": 1.0}
        served.ranks[0].may_save.clear()
        created = served.begin_model(1)
        await until(lambda: served.log[-1] == "save 0")
        step = zero(2)
        await asyncio.sleep(0.05)
        assert served.log[-1] == "save 0"
        served.ranks[0].may_save.set()
        assert (await served.retrieve(created))["type"] == "create_model"
        assert (await served.retrieve(step))["metrics"] == {"num_steps": 2.0}
        assert [it.model_id[-1] for it in served.ranks] == ["0", "1", "0"]
        assert len(list((tmp_path / "parked").iterdir())) == 1

    run(tmp_path, main)


def test_a_model_that_ends_while_it_is_parked_makes_room(tmp_path: Path) -> None:
    async def main(served: _Service) -> None:
        zero = await served.model(0)
        await served.retrieve(zero(1))
        await served.model(1)
        parked = list((tmp_path / "parked").iterdir())
        assert len(parked) == 1
        unloaded = served.service.unload_model(f"{served.session_id}:train:0")
        assert (await served.retrieve(unloaded))["status"] == "unloaded"
        assert not parked[0].exists()
        failed = await served.retrieve(zero(2))
        assert "has ended (it was unloaded)" in failed.error

    run(tmp_path, main)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_model_that_ends_while_it_receives_ranks_leaves_none(tmp_path: Path, is_new: bool) -> None:
    async def main(served: _Service) -> None:
        number = 2 if is_new else 0
        zero = await served.model(0)
        await served.model(1)
        served.may_create.clear()
        failing = served.begin_model(2) if is_new else zero(1)
        await until(lambda: served.log[-1] == f"create {number}")
        await served.retrieve(served.service.unload_model(f"{served.session_id}:train:{number}"))
        served.may_create.set()
        failed = await served.retrieve(failing)
        assert "has ended" in failed.error and failed.category == "user"
        assert [it.is_closed for it in served.ranks] == [True, True, True]
        one = served.begin_model(3)
        assert (await served.retrieve(one))["type"] == "create_model"

    run(tmp_path, main)


def test_a_gradient_is_computed_again_unless_it_is_of_too_many_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_model, "MAX_KEPT_TOKENS", 4)

    async def main(served: _Service) -> None:
        zero = await served.model(0)
        for step in (1, 2):
            assert isinstance(await served.retrieve(served.begin_backward(0, step)), bytes)
        await served.model(1)
        served.log.clear()
        third = await served.retrieve(served.begin_backward(0, 3))
        assert isinstance(third, bytes)
        assert served.log == ["save 1", "create 0", "backward", "backward", "backward"]
        refused = await served.retrieve(served.begin_model(2))
        assert "have a gradient of more than" in refused.error and refused.category == "user"
        await served.retrieve(zero(4))
        assert (await served.retrieve(served.begin_model(3)))["type"] == "create_model"
        served.log.clear()
        await served.retrieve(zero(5))
        assert served.log == ["save 3", "create 0", "0"]

    run(tmp_path, main)
