"""Embedded servers that die, come back and tear, and that are watched from below: which weights are sampled from.

A `Fleet` is an event loop in a thread of its own, in which all servers of a process live. What calls them comes from
other loops, as over a network: a caller that goes away does not have to take its call with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from inflight.conformance.chaos.palette import Palette, Shade, digest
from inflight.contracts import InferenceEndpoint
from inflight.errors import UnreachableError
from inflight.local.endpoint import LocalEndpoint
from inflight.local.engine import Engine
from inflight.wire import EndpointState, UpdateRef

T = TypeVar("T")

_MAX_LEN = 256
_WATCH_S = 0.02


class Fleet:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="inflight-chaos-fleet", daemon=True)
        self._thread.start()

    def start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a call in the loop."""
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def run(self, call: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        """Return what a call returns; from any other thread. Raises ``TimeoutError`` after ``timeout_s``."""
        return self.start(call).result(timeout_s)

    def close(self) -> None:
        """End the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        self.loop.close()


@dataclass(slots=True)
class Incarnation:
    """One life of a server. ``shades`` are those it was seen with, in order; ``problems`` what must not have been seen.

    ``fenced_at`` is how many shades had been seen when a later trainer had joined, and that trainer's epoch.
    """

    endpoint: LocalEndpoint
    engine: Engine
    model: Any
    shades: list[Shade | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fenced_at: list[tuple[int, int]] = field(default_factory=list)
    was_torn: bool = False
    was_killed: bool = False
    tears: int = 0
    over: set[UpdateRef] = field(default_factory=set)
    """Sessions that this server said are over: none of their calls may have an effect any more."""


class EmbeddedServer:
    """One endpoint of a schedule. Methods that are async run in the fleet's loop."""

    def __init__(self, name: str, template: Any, palette: Palette, longest_hold_s: float) -> None:
        self.name = name
        self._template = template
        self._palette = palette
        self.longest_hold_s = longest_hold_s
        self._calls: set[asyncio.Task[Any]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._coming_back: asyncio.Task[None] | None = None
        self.lives: list[Incarnation] = []
        self.life: Incarnation | None = None
        self.problems: list[str] = []
        self.is_gone = False
        """Killed for ever."""
        self.num_aborting_updates = 0
        """Updates with the policy abort that were asked for."""

    async def start(self) -> None:
        """Begin a life with the checkpoint."""
        model = copy.deepcopy(self._template)
        engine = Engine(model, max_model_len=_MAX_LEN, max_concurrent=8)
        life = Incarnation(LocalEndpoint(engine, model, name=self.name), engine, model)

        def before_forward(*_: Any) -> None:
            self._look(life, is_sampling=True)

        model.base_model.register_forward_pre_hook(before_forward)
        named_parameters = model.named_parameters

        def perhaps_torn() -> Any:
            named = list(named_parameters())
            if life.tears and threading.current_thread().name == "inflight-engine":
                life.tears -= 1
                life.was_torn = True
                return iter(named[: len(named) // 2])  # loading fails where a name is missing
            return iter(named)

        model.named_parameters = perhaps_torn
        self.lives.append(life)
        self.life = life
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())

    async def deliver(self, call: Callable[[InferenceEndpoint], Awaitable[T]]) -> T:
        """Return what a call returns that arrives now. Raises `UnreachableError` if the server is, or goes, down."""
        life = self.life
        if life is None:
            raise UnreachableError("connection refused", self.name)
        task = asyncio.ensure_future(_made(call, life.endpoint))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await task
        except BaseException as error:
            if self.life is not life:
                raise UnreachableError("connection reset", self.name) from error
            raise

    async def kill(self, back_after_s: float | None = None) -> None:
        """End this life; a next one begins after ``back_after_s`` seconds, None for never."""
        life, self.life = self.life, None
        if back_after_s is None:
            self.is_gone = True
        if life is None:
            return
        life.was_killed = True
        for task in list(self._calls):
            task.cancel()
        with contextlib.suppress(Exception):
            await life.endpoint.aclose()
        if back_after_s is not None:
            self._coming_back = asyncio.ensure_future(self._come_back(back_after_s))

    async def back(self) -> None:
        """Return once a server that comes back is back."""
        if self._coming_back is not None:
            await self._coming_back

    async def shade(self) -> Shade | None:
        """Return which shade the weights are of now, None for torn ones, read between two token steps.

        Raises `UnreachableError` if the server is not there.
        """
        life = self.life
        if life is None:
            raise UnreachableError("it is not there", self.name)
        return await asyncio.wrap_future(life.engine.call(lambda: self._look(life, is_sampling=False)))

    async def note_fence(self, epoch: int) -> None:
        """Note that a trainer of ``epoch`` has joined: no shade of an earlier one may come any more."""
        if (life := self.life) is not None:
            await self.shade()
            life.fenced_at.append((len(life.shades), epoch))

    async def aclose(self) -> None:
        """End everything."""
        for task in (self._watching, self._coming_back):
            if task is not None:
                task.cancel()
        await self.kill()

    async def _come_back(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self.is_gone:
            await self.start()

    def _look(self, life: Incarnation, *, is_sampling: bool) -> Shade | None:
        """Note the shade of the weights, in the engine's thread."""
        found = self._palette.shade_of(digest(dict(torch.nn.Module.named_parameters(life.model))))
        if found is None and is_sampling:
            life.problems.append("sampled from torn weights: they are of no version")
        if not life.shades or life.shades[-1] != found:
            life.shades.append(found)
        return found

    async def _watch(self) -> None:
        """Note a hold that outlives its lease."""
        since: float | None = None
        held_life: Incarnation | None = None
        while True:
            await asyncio.sleep(_WATCH_S)
            life = self.life
            if life is None:
                since = None
                continue
            state = (await life.endpoint.weight_version()).state
            if state in (EndpointState.READY, EndpointState.POISONED):
                since = None
            elif since is None or held_life is not life:
                since, held_life = time.monotonic(), life
            elif time.monotonic() - since > self.longest_hold_s:
                self.problems.append(f"{state} for more than {self.longest_hold_s:.1f} s")
                since = None


async def _made(call: Callable[[InferenceEndpoint], Awaitable[T]], endpoint: InferenceEndpoint) -> T:
    return await call(endpoint)
