"""The actor: sends the requests of a dispatcher to endpoints, scores groups, and reports the outcomes.

It owns tasks and endpoints. The dispatcher decides where requests are sent and what happens to each item.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from inflight.base.clock import unix_time
from inflight.base.tasks import combine_failures
from inflight.contracts import InferenceEndpoint
from inflight.errors import EndpointError, InflightError, TaskError
from inflight.rollouts.dispatcher import Dispatcher
from inflight.rollouts.driver_commands import (
    ComposedPhase,
    ComposedStep,
    DroppedGroup,
    DroppedItem,
    EndRun,
    Failure,
    FinishedGroup,
    IdleEndpoint,
    RequeuedItem,
    ScoreGroup,
    SendRequest,
    StopRequests,
)
from inflight.run.sampling.sampling_endpoint import SamplingEndpoint, SlowRequest, UnusableItem
from inflight.run.sampling.teachers import Teachers
from inflight.run.sampling.work import Order, Sampled, Work
from inflight.types import TaskItem
from inflight.wire import Capabilities, Completion, DraftCounts

_ABORT_AGAIN_S = 1.0
"""How long an aborted request may take to end before it is aborted again."""
_RENDER_S = 0.005
"""How long prompts may be rendered before control returns to the event loop."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The end of a request with its results; ``error`` states why it failed, or that it was cancelled."""

    order: Order
    endpoint: str
    began_at: float
    """Unix time in seconds."""
    sampled: Sequence[Sampled]
    error: str | None


@dataclass(frozen=True, slots=True)
class FailedEpisode:
    """An episode that is left out of its group, with the kind of failure and a description."""

    item: int
    kind: str
    what_happened: str


Outcome = (
    FinishedGroup
    | DroppedGroup
    | DroppedItem
    | RequeuedItem
    | ComposedStep
    | ComposedPhase
    | EndedRequest
    | FailedEpisode
)
"""The argument of an actor's ``on_outcome``."""


@dataclass(frozen=True, slots=True)
class _RenderedItem:
    item: TaskItem
    prompt_token_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _LiveRequest:
    """A request that was sent, and the asyncio task that waits for it."""

    command: SendRequest
    order: Order
    endpoint: SamplingEndpoint
    began_at: float
    task: asyncio.Task[None] | None = None
    """None if the run ended before the request was sent."""

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()


@dataclass(eq=False)
class Actor:
    """Executes a dispatcher's commands on the endpoints of a run, with the user's code as ``work``."""

    work: Work
    dispatcher: Dispatcher
    _: KW_ONLY
    seed: int
    on_outcome: Callable[[Outcome], None]
    teachers: Teachers | None = None
    """The teachers, which score the rollouts of each finished group."""
    run_id: str | None = None
    """The run whose versions endpoints may sample from; if None, any run."""
    clock: Callable[[], float] = time.monotonic
    making: tuple[int, float] | None = field(default=None, init=False)
    """The item that the task is making, and the time at which the task began to make it."""
    unserved: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no endpoint receives work, after the first call to `serve`."""
    _endpoints: dict[str, SamplingEndpoint] = field(default_factory=dict, init=False)
    _requests: dict[str, _LiveRequest] = field(default_factory=dict, init=False)
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup, init=False)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _drafted: list[DraftCounts] = field(default_factory=list, init=False)

    def take_drafted(self) -> DraftCounts:
        """Return the draft counts of the endpoints since the last call."""
        total = sum(self._drafted, DraftCounts())
        self._drafted.clear()
        return total

    # --------------------------------------------------------------------------------------------------- endpoints

    def add(self, endpoint: InferenceEndpoint, limit: int, capabilities: Capabilities | None = None) -> None:
        """Add an endpoint; it receives work once `serve` names it.

        It runs as many completions at a time as ``limit`` and its capabilities allow, and always at least one request.
        """
        if capabilities is not None:
            limit = min(limit, capabilities.max_concurrent_sequences)
        capacity = max(limit, self.work.size if self.work.is_one_request else 1)
        keeps = self.work.is_one_request and capabilities is not None and capabilities.partial_rollouts
        self._endpoints[endpoint.name] = SamplingEndpoint(
            endpoint, capabilities, drafted=self._drafted, run_id=self.run_id
        )
        self.dispatcher.endpoints.add(endpoint.name, capacity, keeps_partials=keeps, now=self.clock())

    def serve(self, names: Collection[str], version: int) -> None:
        """Give work to these endpoints and to no others.

        ``version`` was published to them. It is 0 if servers load stored versions by themselves.
        """
        for name in self._endpoints.keys() & {*names}:
            self._endpoints[name].version = version
        self.dispatcher.endpoints.serve(names, version, self.clock())
        self.carry_out_commands()

    def lose(self, name: str, reason: str) -> None:
        """Give an endpoint no work until `serve` names it again; its requests are sent to other endpoints instead."""
        self.dispatcher.endpoints.lose(name, reason, self.clock())
        self.carry_out_commands()

    def retire(self, name: str, on_idle: Callable[[], None], *, hands_on: bool = False) -> None:
        """Give an endpoint no more work. Once its requests have ended, remove it and call ``on_idle``.

        With ``hands_on``, its requests are aborted, and partial completions are continued elsewhere if possible.
        """
        if (endpoint := self._endpoints.get(name)) is not None:
            endpoint.on_idle = on_idle
            self.dispatcher.endpoints.retire(name, self.clock(), hands_on=hands_on)
            self.carry_out_commands()

    # ----------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Offer items and send requests until cancelled. Raises `TaskError` if the task or a reward fails.

        Exceptions raised by ``on_outcome`` propagate. If several calls fail, the later errors are added to the first
        one as notes.
        """
        failures: Sequence[Exception] = ()
        try:
            async with self._tasks:
                while True:
                    self._has_news.clear()
                    if self.dispatcher.has_news:
                        await self._offer_and_decide()
                    await self._has_news.wait()
        except ExceptionGroup as raised:
            failures = [*{str(error): error for error in reversed(raised.exceptions)}.values()][::-1]  # each once
        finally:
            try:
                for request in [*self._requests.values()]:
                    self._cancel(request)
            finally:
                await self.work.aclose()
        raise combine_failures(failures)

    async def _offer_and_decide(self) -> None:
        since = self.clock()
        while True:
            while (item := self.dispatcher.next_item()) is not None:
                await self._offer(item)
                self.carry_out_commands()
                if self.clock() - since > _RENDER_S:
                    await asyncio.sleep(0)
                    since = self.clock()
            has_decided = self.dispatcher.decide(self.clock())
            self.carry_out_commands()
            if not has_decided:
                return

    async def _offer(self, index: int) -> None:
        """Make an item, render its prompt and offer it, or refuse it if it can never be trained on."""
        self.making = (index, self.clock())
        try:
            item = await self.work.item(index)
            prompt_token_ids = self.work.prompt_of(item)
            why = self.work.too_long(prompt_token_ids)
        except UnusableItem as error:
            why = str(error)
        except BaseException:
            self.dispatcher.return_item(index, self.clock())
            raise
        finally:
            self.making = None
        if why is not None:
            self.dispatcher.refuse_item(index, why, self.clock())
            return
        prompt = hashlib.blake2b(repr(prompt_token_ids).encode(), digest_size=12).hexdigest()
        content = _RenderedItem(item, prompt_token_ids)
        self.dispatcher.offer(index, prompt, len(prompt_token_ids), self.work.size, content, self.clock())

    # ----------------------------------------------------------------------------------------------------- commands

    def carry_out_commands(self) -> None:
        """Execute the dispatcher's commands after a report to it, and let it decide again."""
        while commands := self.dispatcher.take_commands():
            for command in commands:
                match command:
                    case SendRequest():
                        self._send(command)
                    case StopRequests():
                        self._stop(command)
                    case ScoreGroup():
                        self.work.forget(command.item)
                        self._start(self._score(command))
                    case IdleEndpoint(name):
                        if (on_idle := self._endpoints.pop(name).on_idle) is not None:
                            on_idle()
                    case EndRun(why):
                        raise TaskError(why)
                    case _:
                        if isinstance(command, DroppedItem):
                            self.work.forget(command.item)
                        self.on_outcome(command)
        self._has_news.set()
        if self.dispatcher.endpoints.is_unserved:
            self.unserved.set()
        else:
            self.unserved.clear()

    def _start(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        try:
            return self._tasks.create_task(call)
        except RuntimeError:  # the group is shutting down: the run ends
            call.close()
            return None

    def _send(self, command: SendRequest) -> None:
        index, numbers, content = command.item, command.numbers, command.content
        if (kept := self.work.first_version(index, numbers[0])) is not None:
            self.dispatcher.note_first_version(command, kept)
        parts = () if len(numbers) == self.work.size else (numbers[0],)
        assert command.partial is None or isinstance(command.partial, Completion)
        order = Order(
            command.request_id,
            content.item,
            content.prompt_token_ids,
            numbers,
            seed_of(self.seed, index, *parts),
            command.partial,
        )
        request = _LiveRequest(command, order, self._endpoints[command.endpoint], unix_time())
        self._requests[command.request_id] = request
        request.task = self._start(self._sample(request))

    async def _sample(self, request: _LiveRequest) -> None:
        sampled: Sequence[Sampled] = ()
        failure: Failure | None = None
        error: str | None = None
        try:
            sampled = await self.work.sample(request.endpoint, request.order)
        except (UnusableItem, SlowRequest) as failed:
            error = str(failed)
            failure = Failure("item" if isinstance(failed, UnusableItem) else "request", error)
        except EndpointError as failed:
            error, failure = str(failed), Failure("endpoint", failed.message)
        except Exception as failed:
            self._end_request(request, (), Failure("driver", str(failed)), str(failed))
            raise
        self._end_request(request, sampled, failure, error)
        self.carry_out_commands()

    def _end_request(
        self, request: _LiveRequest, sampled: Sequence[Sampled], failure: Failure | None, error: str | None
    ) -> None:
        """Report the end of a request, unless it has been cancelled."""
        if self._requests.pop(request.command.request_id, None) is not None:
            self.dispatcher.request_ended(request.command, sampled, self.clock(), failure)
            self.on_outcome(EndedRequest(request.order, request.endpoint.name, request.began_at, sampled, error))

    def _cancel(self, request: _LiveRequest) -> None:
        """Report a request as cancelled without results, while its asyncio task may still clean up."""
        self._end_request(request, (), None, "cancelled")
        if request.task is not None:
            request.task.cancel()

    def _stop(self, command: StopRequests) -> None:
        requests = [self._requests[request_id] for request_id in command.request_ids if request_id in self._requests]
        if command.keeps_partials:
            self._start(self._abort(self._endpoints[command.endpoint], requests))
        else:
            for request in requests:
                self._cancel(request)

    async def _abort(self, endpoint: SamplingEndpoint, requests: Sequence[_LiveRequest]) -> None:
        """Abort requests of one endpoint, and return once they have ended. If the endpoint fails, cancel them."""
        try:
            while running := [request for request in requests if request.is_running]:
                await endpoint.abort([request.order.request_id for request in running])
                # An abort that overtakes its request is ignored by the endpoint.
                await asyncio.wait([it.task for it in running if it.task is not None], timeout=_ABORT_AGAIN_S)
        except InflightError:
            for request in requests:
                self._cancel(request)
            self.carry_out_commands()

    async def _score(self, command: ScoreGroup) -> None:
        try:
            content, sampled = command.content, command.sampled
            scored = await self.work.score(content.item, content.prompt_token_ids, sampled)
            if self.teachers is not None:
                scored = await self.teachers.scored(content.item, self.work.name, scored)
        except BaseException:
            self.dispatcher.return_item(command.item, self.clock())
            raise
        for kind, what_happened in scored.failures:
            self.on_outcome(FailedEpisode(command.item, kind, what_happened))
        self.dispatcher.group_scored(command.item, scored, self.clock())
        self.carry_out_commands()


def seed_of(seed: int, index: int, *parts: int) -> int:
    """Return a seed for one item of a run, or for a part of the item, independent of the order of items."""
    text = ":".join(map(str, (seed, index, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
