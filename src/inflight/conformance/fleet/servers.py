"""The interface through which faults and the judge access a schedule's servers, wherever the servers run.

All servers of a process are called in one event loop, which has its own thread. Callers run in other loops. As with
calls over a network, a call may outlive its caller.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from inflight.conformance.fleet.palette import Palette, Shade
from inflight.conformance.fleet.plan import Kind
from inflight.contracts import InferenceEndpoint
from inflight.wire import Capabilities, WeightVersion

T = TypeVar("T")
Call = Callable[[InferenceEndpoint], Awaitable[T]]

_CLOSE_S = 15.0
"""Time limit for ending servers that are still being started."""


class Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="inflight-fleet", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # on exit it cancels the running calls
            runner.get_loop().run_forever()

    def start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        """Return the result of a call, from any other thread. Raises ``TimeoutError`` after ``timeout_s``."""
        return self.start(call).result(timeout_s)

    def close(self) -> None:
        """Cancel the running calls, wait briefly for them, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)


class TestedServer(Protocol):
    """One endpoint of a schedule. Its methods run in the loop of its `Testbed`."""

    name: str
    num_starts: int
    """The number of process incarnations in this schedule, including the current one."""
    num_breaks: int
    """How many times pending calls failed because the server died, restarted, or lost its connections."""

    is_up: bool
    is_gone: bool
    """Whether the server is dead and will not restart in this schedule."""
    was_torn: bool
    """Whether the server's weights may have been torn in this schedule, so that requests end with `PoisonedError`."""

    @abstractmethod
    async def deliver(self, call: Call[T]) -> T:
        """Return the result of a call that arrives now.

        Raises `UnreachableError` if the server is down or goes down during the call.
        """

    @abstractmethod
    async def inject(self, kind: Kind, seconds: float) -> None:
        """Inject a fault of one of `Testbed.kinds`."""

    @abstractmethod
    async def kill(self, back_after_s: float | None) -> None:
        """End the server's process; the next one begins after ``back_after_s``, or never if that is None."""

    @abstractmethod
    async def back(self) -> None:
        """Wait until a restarting server is up."""

    @abstractmethod
    async def shade(self) -> Shade | None:
        """Return the shade that the server samples from, or None if its weights are torn.

        Raises `UnreachableError` if the server is down.
        """

    @abstractmethod
    def may_have_held(self, shade: Shade) -> bool:
        """Return False only if the server certainly never served these weights in this schedule."""

    @abstractmethod
    def problems(self) -> Sequence[str]:
        """Return the violations observed on this server in this schedule."""


class Testbed(Protocol):
    """The environment in which schedules run: the servers, and the features that all of them support."""

    loop: Loop
    directory: Path
    """Directory for the files of schedules."""
    capabilities: Capabilities
    """Capabilities that all servers share."""
    kinds: Collection[Kind]
    """Kinds of faults that can be injected into the servers themselves, in addition to faults of calls and bytes."""
    num_servers: int
    scale: float
    """Factor for every deadline."""
    start_s: float
    """Maximum time that a server takes to restart."""

    @abstractmethod
    def palette(self, seed: int, frozen: tuple[str, ...]) -> Palette:
        """Return the palette of a seed's schedule. It contains every shade that a server serves when the schedule
        begins.
        """

    @abstractmethod
    def servers(self, palette: Palette, frozen: tuple[str, ...]) -> AbstractContextManager[Sequence[TestedServer]]:
        """Return a context that starts the servers of one schedule; their ``frozen`` tensors are those of the
        checkpoint.

        Enter and exit the context in a thread other than the loop's.
        """


async def version_of(server: TestedServer) -> WeightVersion:
    """Return the version that a server reports."""
    return await server.deliver(lambda endpoint: endpoint.weight_version())
