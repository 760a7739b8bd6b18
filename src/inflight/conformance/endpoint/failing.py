"""An engine whose `apply` can be made to fail, between an endpoint's receiving half and its own engine.

`inflight.weights.receive.receiver.engine_between` puts it there while the kit makes the endpoint in its own process.
It cannot reach endpoints in other processes, or endpoints that take weights without an `UpdateReceiver`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from inflight.weights.receive.receiver import PausableEngine, engine_between
from inflight.wire import WeightUpdate

Failure = Literal["instead", "afterwards"]


class FailingEngine(PausableEngine):
    """Passes everything on to ``engine``. If ``fails`` is set, the next `apply` fails, once."""

    def __init__(self, engine: PausableEngine) -> None:
        self._engine = engine
        self.fails: Failure | None = None
        """``instead`` of applying anything, or ``afterwards``, as if the engine's answer were lost."""

    async def pause(self, update: WeightUpdate) -> None:
        await self._engine.pause(update)

    async def apply(self, update: WeightUpdate) -> None:
        failure, self.fails = self.fails, None
        if failure != "instead":
            await self._engine.apply(update)
        if failure is not None:
            raise RuntimeError(f"the conformance kit makes this apply fail, {failure}")

    async def resume(self) -> None:
        await self._engine.resume()

    async def give_up(self) -> None:
        await self._engine.give_up()

    async def num_running(self) -> int:
        return await self._engine.num_running()


@contextlib.contextmanager
def engines_that_fail() -> Iterator[list[FailingEngine]]:
    """Put a `FailingEngine` under every receiver that is made meanwhile, and collect them in the yielded list."""
    made: list[FailingEngine] = []

    def between(engine: PausableEngine) -> PausableEngine:
        made.append(FailingEngine(engine))
        return made[-1]

    token = engine_between.set(between)
    try:
        yield made
    finally:
        engine_between.reset(token)
