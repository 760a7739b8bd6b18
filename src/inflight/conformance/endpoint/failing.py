"""An engine whose `apply` can be made to fail, between an endpoint's receiving half and its own engine.

It gets there by `inflight.weights.receiving.engine_between` while the kit makes the endpoint in its own process. What
runs in another process, or takes weights without an `UpdateReceiver`, is out of its reach.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

from inflight.weights.receiving import HeldEngine, engine_between
from inflight.wire import WeightUpdate

Failure = Literal["instead", "afterwards"]


class FailingEngine(HeldEngine):
    """Passes everything on to ``engine``; the next `apply` fails if ``fails`` says so, once."""

    def __init__(self, engine: HeldEngine) -> None:
        self._engine = engine
        self.fails: Failure | None = None
        """``instead`` of applying anything, or ``afterwards``, as when the engine's answer is lost."""

    async def hold(self, update: WeightUpdate) -> None:
        """See `HeldEngine.hold`."""
        await self._engine.hold(update)

    async def apply(self, update: WeightUpdate) -> None:
        """See `HeldEngine.apply`."""
        failure, self.fails = self.fails, None
        if failure != "instead":
            await self._engine.apply(update)
        if failure is not None:
            raise RuntimeError(f"the conformance kit has this apply fail, {failure}")

    async def release(self) -> None:
        """See `HeldEngine.release`."""
        await self._engine.release()

    async def give_up(self) -> None:
        """See `HeldEngine.give_up`."""
        await self._engine.give_up()

    async def num_running(self) -> int:
        """See `HeldEngine.num_running`."""
        return await self._engine.num_running()


@contextlib.contextmanager
def engines_that_fail() -> Iterator[list[FailingEngine]]:
    """Put a `FailingEngine` under every receiver that is made meanwhile; they are collected in what is yielded."""
    made: list[FailingEngine] = []

    def between(engine: HeldEngine) -> HeldEngine:
        made.append(FailingEngine(engine))
        return made[-1]

    token = engine_between.set(between)
    try:
        yield made
    finally:
        engine_between.reset(token)
