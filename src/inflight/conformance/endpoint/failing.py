"""An engine whose `apply` can be made to fail, inserted between an endpoint's `UpdateReceiver` and its own engine.

It cannot be inserted into endpoints in other processes, or into endpoints that receive weights without an
`UpdateReceiver`.
"""

from __future__ import annotations

from typing import Literal

from inflight.contracts import InferenceEndpoint
from inflight.weights.receive.adapter import PausableEngine
from inflight.weights.receive.receiver import ReceivingEndpoint
from inflight.wire import WeightUpdate

Failure = Literal["instead", "afterwards"]


class FailingEngine(PausableEngine):
    """Forwards every call to ``engine``. If ``fails`` is set, the next `apply` fails, and only that one."""

    def __init__(self, engine: PausableEngine) -> None:
        self._engine = engine
        self.fails: Failure | None = None
        """When the next `apply` fails: ``instead`` of applying anything, or ``afterwards``, as if the engine's answer
        had been lost."""

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

    async def fail_requests(self) -> None:
        await self._engine.fail_requests()

    async def num_running(self) -> int:
        return await self._engine.num_running()


async def install_failing_engine(endpoint: InferenceEndpoint) -> FailingEngine | None:
    """Put a `FailingEngine` in front of the engine of an endpoint in this process; return it, or None for other
    endpoints."""
    if not isinstance(endpoint, ReceivingEndpoint):
        return None
    receiver = await endpoint.receiver()
    receiver.engine = failing = FailingEngine(receiver.engine)
    return failing
