"""The same random world under both drivers of a dispatcher, and the decisions that each of them gets.

The simulated driver runs on `inflight.planning`. The live one is the actor of a run, with endpoints and a trainer of
this module in virtual time: an event loop whose time jumps to the next timer, so that nothing sleeps. Both worlds
sample the same lengths at the same pace, but share no code that models them.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.contracts import AbortingEndpoint, StalenessPolicy, Task
from inflight.planning import Endpoint, Prompted, Setup, TokenTime, TrainerCost
from inflight.planning.costs import PublishCost
from inflight.planning.simulation import SimulatedRun
from inflight.rollouts import HistoryStore, MaxLag
from inflight.rollouts.dispatcher import Dispatcher
from inflight.rollouts.driver_commands import (
    ComposedPhase,
    ComposedStep,
    DroppedGroup,
    DroppedItem,
    EndRun,
    FinishedGroup,
    IdleEndpoint,
    RequeuedItem,
    ScoreGroup,
    SendRequest,
    StopRequests,
)
from inflight.rollouts.schedulers import SCHEDULERS
from inflight.rollouts.staleness import EtaGate, TrajectoryLag, WindowedFifo
from inflight.run.sampling.actor import Actor, Outcome
from inflight.run.sampling.completions import Completions
from inflight.run.sampling.sampling_endpoint import SamplingEndpoint
from inflight.run.sampling.work import Order, Sampled
from inflight.types import Group, TaskItem
from inflight.wire import (
    AbortRequests,
    Capabilities,
    Completion,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    VersionSpan,
)

NUM_LENGTHS = 401
STALENESS: dict[str, Callable[[int], StalenessPolicy]] = {
    "max_lag": MaxLag,
    "eta_gate": EtaGate,
    "trajectory": TrajectoryLag,
    "windowed_fifo": WindowedFifo,
}


@dataclass(frozen=True)
class World:
    """Everything that decisions depend on. Times are such that no two requests end at once."""

    scheduler: str = "least_loaded"
    staleness: str = "max_lag"
    max_lag: int = 1
    capacities: tuple[int, ...] = (4, 6)
    group_size: int = 2
    groups_per_step: int = 3
    num_steps: int = 5
    conventional_steps: int = 0
    burst: int = 1
    is_one_request: bool = True
    keeps_partials: bool = True
    mean_time_to_failure: float = math.inf
    train_time: float = 31.7
    seed: int = 0

    def length(self, item: int, number: int) -> int:
        """Return a length; a few are much longer than the others."""
        rank = ((item * self.group_size + number) * 151 + 17 * self.seed) % NUM_LENGTHS
        return 5 + rank // 8 + rank**4 // (2 * NUM_LENGTHS**3)

    def wait(self, item: int, number: int) -> float:
        """Return the time of a completion's environment: a random part of a token, so that no two end at once."""
        return random.Random(f"{self.seed}:{item}:{number}").uniform(0.1, 0.9)

    def rewards(self, item: int) -> list[float]:
        draw = random.Random(f"{self.seed}:{item}")
        return [float(draw.random() < 0.5) for _ in range(self.group_size)]

    def prompted(self, item: int, version: int) -> Prompted:
        numbers = range(self.group_size)
        return Prompted(
            tuple(self.length(item, i) for i in numbers),
            f"prompt {item % 10}",
            3,
            tuple(self.rewards(item)),
            tuple(self.wait(item, i) for i in numbers),
        )

    def setup(self) -> Setup:
        history = HistoryStore()
        endpoints = [
            Endpoint(
                f"endpoint-{i}",
                max(capacity, self.group_size),
                TokenTime.roofline(1.0 + 0.137 * i),
                keeps_partials=self.keeps_partials and self.is_one_request,
                mean_time_to_failure=self.mean_time_to_failure,
                restart_time=23.1,
            )
            for i, capacity in enumerate(self.capacities)
        ]
        return Setup(
            SCHEDULERS[self.scheduler](group_size=self.group_size, history=history),
            history,
            endpoints,
            self.prompted,
            self.groups_per_step,
            self.num_steps,
            unit="groups",
            staleness=STALENESS[self.staleness](self.max_lag),
            conventional_steps=self.conventional_steps,
            burst=self.burst,
            trainer=TrainerCost(self.train_time),
            publish=PublishCost(total=2.3),
            whole_requests=self.is_one_request,
            score_time=0.71,
            trains_on_equal_rewards=self.group_size == 1,
            seed=self.seed,
        )


class RecordedDispatcher:
    """A dispatcher, and what it has decided until the last step was settled."""

    def __init__(self, dispatcher: Dispatcher, num_steps: int) -> None:
        self._dispatcher = dispatcher
        self._num_left = num_steps
        self.decisions: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)

    def take_commands(self) -> list[Any]:
        commands = self._dispatcher.take_commands()
        if self._num_left > 0:
            self.decisions += [described(command) for command in commands]
        return commands

    def settle(self, groups: Sequence[Group], now: float) -> None:
        self._dispatcher.settle(groups, now)
        self._num_left -= 1


def described(command: Any) -> tuple[Any, ...]:
    """Return all of a command but the objects that are each driver's own."""
    match command:
        case SendRequest(request_id, item, _, numbers, endpoint, partial):
            part = None if partial is None else (partial.num_tokens, partial.first_version)
            return "send", request_id, item, numbers, endpoint, part
        case StopRequests(endpoint, request_ids, keeps_partials):
            return "stop", endpoint, request_ids, keeps_partials
        case ScoreGroup(item, _, sampled):
            return "score", item, [(one.num_tokens, one.first_version) for one in sampled]
        case FinishedGroup(group, is_waiting):
            return "finished", group.item_index, is_waiting, spans_of(group)
        case DroppedGroup(group, reason):
            return "group dropped", group.item_index, reason
        case DroppedItem(item, reason, _, lengths):
            return "item dropped", item, reason, lengths
        case RequeuedItem(item):
            return "requeued", item
        case ComposedStep(version, groups):
            return "step", version, [group.item_index for group in groups]
        case ComposedPhase(steps):
            return "phase", [[group.item_index for group in groups] for groups in steps]
        case IdleEndpoint(endpoint):
            return "idle", endpoint
        case EndRun(why):
            return "end", why
    raise AssertionError(command)


def spans_of(group: Group) -> list[list[tuple[int, int, int]]]:
    return [[(it.start, it.end, it.version) for it in rollout.version_spans] for rollout in group.rollouts]


def simulated_decisions(world: World, driver: type[SimulatedRun] = SimulatedRun) -> list[tuple[Any, ...]]:
    setup = world.setup()
    dispatcher: Any = RecordedDispatcher(setup.dispatcher(), world.num_steps)
    driver(setup, dispatcher).run()
    decisions: list[tuple[Any, ...]] = dispatcher.decisions
    return decisions


# ------------------------------------------------------------------------------------------------------- virtual time


class JumpingSelector(selectors.SelectSelector):
    """Instead of waiting, it lets the time of a loop jump."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits for something that will not happen"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


# ---------------------------------------------------------------------------------------------------- the live driver


@dataclass(eq=False)
class _Sampling:
    """A request that an endpoint runs."""

    began: float
    ended: asyncio.Future[None]


class VirtualEndpoint(AbortingEndpoint):
    """Samples a token of each running completion in a fixed time."""

    def __init__(self, world: World, endpoint: Endpoint, orders: dict[str, Order]) -> None:
        self._world = world
        self._token_time = endpoint.token_time(1)
        self._keeps_partials = endpoint.keeps_partials
        self.name_ = endpoint.name
        self.capacity = endpoint.capacity
        self.served: list[tuple[float, int]] = [(0.0, 0)]
        self.is_open = True
        self._orders = orders
        self._running: dict[str, _Sampling] = {}

    @property
    def name(self) -> str:
        return self.name_

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="virtual",
            engine_version="1",
            model="virtual",
            vocab_size=2,
            max_model_len=1 << 20,
            dtype="float32",
            in_flight_policies=(),
            transports=(),
            partial_rollouts=self._keeps_partials,
            version_binding="spans",
            logprob_kind="processed",
            num_ranks=1,
            max_concurrent_sequences=self.capacity,
            streaming=False,
            chat=False,
        )

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        loop, order = asyncio.get_running_loop(), self._orders[request.request_id]
        sampling = self._running[request.request_id] = _Sampling(loop.time(), loop.create_future())
        item, before = order.item.index, request.num_continued
        lengths = {i: self._world.length(item, i) - before for i in order.numbers}
        last = max(lengths[i] * self._token_time + self._world.wait(item, i) for i in order.numbers)
        timer = loop.call_at(sampling.began + last, end, sampling.ended)
        try:
            await sampling.ended
        finally:
            timer.cancel()
            del self._running[request.request_id]
        completions = [self._completion(k, lengths[i], sampling.began) for k, i in enumerate(order.numbers)]
        return GenerateResponse(request_id=request.request_id, completions=tuple(completions))

    async def abort_requests(self, requests: AbortRequests) -> None:
        for request_id in requests.request_ids:
            if (sampling := self._running.get(request_id)) is not None:
                end(sampling.ended)

    def _completion(self, index: int, length: int, began: float) -> Completion:
        """Return what there is now of a completion that began at a time and will have so many tokens."""
        now = asyncio.get_running_loop().time()

        def num_at(time: float) -> int:
            return max(0, math.floor((time - began) / self._token_time + 1e-9))

        num_tokens, is_whole = min(length, num_at(now)), num_at(now) >= length
        until = [*(time for time, _ in self.served[1:]), math.inf]
        spans, start = [], 0
        for (_, version), time in zip(self.served, until, strict=True):
            stop = num_tokens if time == math.inf else min(num_tokens, num_at(time))
            if stop > start:
                spans.append(VersionSpan(version=version, start=start, end=stop))
                start = stop
        return Completion(
            index=index,
            token_ids=(1,) * num_tokens,
            logprobs=(0.0,) * num_tokens,
            version_spans=tuple(spans),
            finish_reason="stop" if is_whole else "abort",
        )

    async def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    init_process_group = request_weight_update = receive_weights = _unused
    commit_weight_update = abort_weight_update = chat_completion = weight_version = _unused

    async def aclose(self) -> None:
        pass


def end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Prompts(Task):
    name = "prompts"

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, f"prompt {index % 10}")

    def score(self, item: TaskItem, completion: str) -> float:
        raise NotImplementedError


class Tokenizer:
    chat_template = None
    all_special_ids: Sequence[int] = ()
    added_tokens_decoder: Mapping[int, Any] = {}
    eos_token = None

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(text.split()[1]), 0, 0]}


@dataclass(frozen=True)
class Scores:
    """Rewards after a while; a `ScoringPool` without processes."""

    world: World
    score_time: float

    async def rewards(
        self, item: TaskItem, token_ids: Sequence[Sequence[int]], timeout_s: float, what: str
    ) -> list[float]:
        await asyncio.sleep(self.score_time)
        return self.world.rewards(item.index)

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True)
class VirtualWork(Completions):
    """Real prompts, requests and continuations; endpoints may look up which completions a request is for."""

    orders: dict[str, Order] = field(default_factory=dict)

    async def item(self, index: int) -> TaskItem:
        return self.task.item(index)

    async def sample(self, endpoint: SamplingEndpoint, order: Order) -> list[Sampled]:
        self.orders[order.request_id] = order
        return await super().sample(endpoint, order)


class VirtualWorkByCompletion(VirtualWork):
    """Each completion is a request of its own, as episodes are."""

    is_one_request = False


@dataclass(eq=False)
class LiveRun:
    """An actor with virtual endpoints, and a trainer as in `inflight.run.run`."""

    world: World
    setup: Setup
    dispatcher: Any
    actor: Actor = field(init=False)
    endpoints: dict[str, VirtualEndpoint] = field(default_factory=dict)
    version: int = 0
    served_version: int = 0
    """The version that was published last: within a phase of several steps, the trainer is ahead of it."""
    composed: asyncio.Event = field(default_factory=asyncio.Event)
    steps: Sequence[Sequence[Group]] = ()
    failing: random.Random = field(init=False)

    async def run(self, driver: type[Actor]) -> None:
        world, self.failing = self.world, random.Random(self.world.seed)
        kind = VirtualWork if world.is_one_request else VirtualWorkByCompletion
        pool: Any = Scores(world, self.setup.score_time)
        work = kind(
            Prompts(), Tokenizer(), SamplingParams(n=world.group_size, max_tokens=1 << 16), 1 << 20, math.inf, pool
        )
        loop = asyncio.get_running_loop()
        self.actor = driver(work, self.dispatcher, seed=0, on_outcome=self.note, clock=loop.time)
        for endpoint in self.setup.endpoints:
            virtual = self.endpoints[endpoint.name] = VirtualEndpoint(world, endpoint, work.orders)
            self.actor.add(virtual, endpoint.capacity, await virtual.capabilities())
        self.join(*self.endpoints.values())
        self.want_step(0)
        acting = asyncio.ensure_future(self.actor.run())
        training = asyncio.ensure_future(self.train())
        await asyncio.wait([acting, training], return_when=asyncio.FIRST_COMPLETED)
        acting.cancel()
        await asyncio.gather(training, return_exceptions=False)
        await asyncio.gather(acting, return_exceptions=True)

    def note(self, outcome: Outcome) -> None:
        if isinstance(outcome, ComposedStep | ComposedPhase):
            self.steps = outcome.steps if isinstance(outcome, ComposedPhase) else [outcome.groups]
            self.composed.set()

    def want_step(self, version: int) -> None:
        self.composed.clear()
        self.dispatcher.want_step(version, self.actor.clock())
        self.actor.carry_out_commands()

    async def train(self) -> None:
        while self.version < self.world.num_steps:
            await self.composed.wait()
            steps = self.steps
            for i, groups in enumerate(steps, 1):
                await asyncio.sleep(self.world.train_time)
                is_published = i == len(steps)
                if is_published:
                    await asyncio.sleep(self.setup.publish.total)
                self.settle(groups, is_published=is_published)
            self.want_step(self.version)

    def settle(self, groups: Sequence[Group], *, is_published: bool) -> None:
        self.dispatcher.settle(groups, self.actor.clock())
        self.version += 1
        if is_published:
            self.served_version = self.version
            for endpoint in self.endpoints.values():
                endpoint.served.append((self.actor.clock(), self.version))
            self.serve()
        self.setup.staleness.after_step(self.version, None)

    def serve(self) -> None:
        self.actor.serve(
            [endpoint.name for endpoint in self.endpoints.values() if endpoint.is_open], self.served_version
        )

    def join(self, *endpoints: VirtualEndpoint) -> None:
        for endpoint in endpoints:
            endpoint.is_open = True
            if self.world.mean_time_to_failure < math.inf:
                time = self.failing.expovariate(1.0 / self.world.mean_time_to_failure)
                asyncio.get_running_loop().call_later(time, self.fail, endpoint)
        self.serve()

    def fail(self, endpoint: VirtualEndpoint) -> None:
        endpoint.is_open = False
        self.actor.lose(endpoint.name, "it failed")
        restart_time = self.setup.endpoints[0].restart_time
        asyncio.get_running_loop().call_later(restart_time, self.join, endpoint)


def live_decisions(world: World, driver: type[Actor] = Actor) -> list[tuple[Any, ...]]:
    setup = world.setup()
    dispatcher = RecordedDispatcher(setup.dispatcher(), world.num_steps)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(LiveRun(world, setup, dispatcher).run(driver))
    return dispatcher.decisions
