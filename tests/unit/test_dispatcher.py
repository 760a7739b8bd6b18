"""The dispatcher alone as a state machine, and the proof that both of its drivers get the same decisions from it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.contracts.scheduling import Issue
from inflight.errors import CheckpointError, InvalidRequestError
from inflight.planning.simulation import SimulatedRun
from inflight.rollouts import HistoryStore, Ledger, TokenBudget
from inflight.rollouts.dispatcher import Dispatcher
from inflight.rollouts.driver_commands import (
    ComposedStep,
    DroppedGroup,
    DroppedItem,
    EndRun,
    Failure,
    FinishedGroup,
    IdleEndpoint,
    RequeuedItem,
    ScoredGroup,
    ScoreGroup,
    SendRequest,
    StopRequests,
)
from inflight.rollouts.schedulers import SCHEDULERS, LeastLoaded
from inflight.rollouts.staleness import EtaGate
from inflight.rollouts.step_queue import StepRules
from inflight.run.sampling.actor import Actor
from inflight.types import Group, Rollout
from inflight.wire import VersionSpan
from tests.unit.two_drivers import STALENESS, World, live_decisions, simulated_decisions

# ------------------------------------------------------------------------------------------------------- both drivers


@given(
    st.builds(
        World,
        scheduler=st.sampled_from(sorted(SCHEDULERS)),
        staleness=st.sampled_from(sorted(STALENESS)),
        max_lag=st.integers(0, 2),
        capacities=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
        group_size=st.integers(1, 3),
        groups_per_step=st.integers(1, 5),
        num_steps=st.just(4),
        conventional_steps=st.integers(0, 2),
        burst=st.integers(1, 4),
        is_one_request=st.booleans(),
        keeps_partials=st.booleans(),
        mean_time_to_failure=st.sampled_from([math.inf, 600.0]),
        train_time=st.sampled_from([7.3, 61.7]),
        seed=st.integers(0, 10_000),
    )
)
@settings(max_examples=150)
def test_a_live_run_and_a_simulated_one_get_the_same_decisions(world: World) -> None:
    assert live_decisions(world) == simulated_decisions(world)


REJOINING = World(
    scheduler="tail_rounds",
    staleness="eta_gate",
    max_lag=0,
    capacities=(1, 1),
    group_size=2,
    groups_per_step=1,
    num_steps=4,
    conventional_steps=2,
    burst=1,
    is_one_request=False,
    keeps_partials=False,
    mean_time_to_failure=600.0,
    train_time=7.3,
    seed=300,
)
"""An endpoint comes back between the two steps of a phase, when the trainer is ahead of what is served."""


def test_an_endpoint_that_comes_back_within_a_phase_serves_what_was_published_last() -> None:
    assert live_decisions(REJOINING) == simulated_decisions(REJOINING)


ABORTING = World(scheduler="tail_rounds", conventional_steps=1, group_size=1, capacities=(4, 9), seed=3)
"""A scheduler that aborts completions, whose endpoints keep them."""


def test_the_decisions_that_are_compared_contain_aborts_continuations_and_drops() -> None:
    kinds: Counter[str] = Counter()
    for world in (ABORTING, World(), World(staleness="eta_gate", mean_time_to_failure=200.0, keeps_partials=False)):
        for decision in simulated_decisions(world):
            kinds[decision[0] + (" partial" if decision[0] == "send" and decision[-1] else "")] += 1
    assert {"send", "send partial", "stop", "score", "finished", "group dropped", "requeued", "step", "phase"} <= {
        *kinds
    }


class ForgetsPartials(Actor):
    """A live driver that does not report what an aborted request has sampled."""

    def _end_request(self, request: Any, sampled: Sequence[Any], failure: Failure | None, error: str | None) -> None:
        whole = all(one.is_whole for one in sampled)
        super()._end_request(request, sampled if whole else (), failure, error)


class SendsElsewhere(SimulatedRun):
    """A simulated driver that takes the wrong one of two endpoints for each request."""

    def _send(self, command: SendRequest) -> None:
        right = self.servers
        self.servers = dict(zip(right, reversed(right.values()), strict=True))
        super()._send(command)
        self.servers = right


def test_a_live_driver_that_forgets_an_aborted_partial_is_found_out() -> None:
    assert live_decisions(ABORTING, ForgetsPartials) != simulated_decisions(ABORTING) == live_decisions(ABORTING)


def test_a_simulated_driver_that_takes_another_endpoint_is_found_out() -> None:
    world = World(capacities=(5, 5))
    assert simulated_decisions(world, SendsElsewhere) != live_decisions(world) == simulated_decisions(world)


# ------------------------------------------------------------------------------------------------ the state machine


@dataclass(frozen=True)
class Part:
    """Some tokens of a completion, sampled by one version."""

    num_tokens: int
    first_version: int | None
    is_whole: bool


def dispatcher_of(
    scheduler: Any, *, groups_per_step: int = 2, is_one_request: bool = True, ledger: Ledger | None = None
) -> Dispatcher:
    rules = StepRules(
        groups_per_step,
        1.0,
        trains_on_equal_rewards=True,
        size_of=lambda group: 1,
        kept_size_of=lambda group, staleness, version: int(
            any(staleness.can_train(rollout.version_spans[0].version, version) for rollout in group.rollouts)
        ),
    )
    return Dispatcher(
        scheduler,
        EtaGate(1),
        TokenBudget(groups_per_step),
        HistoryStore(),
        rules,
        ledger=ledger,
        is_one_request=is_one_request,
    )


def scored(parts: Sequence[Part]) -> ScoredGroup:
    rollouts = [
        Rollout(
            (0,),
            (1,) * part.num_tokens,
            (0.0,) * part.num_tokens,
            (VersionSpan(version=part.first_version or 0, start=0, end=part.num_tokens),),
            "stop",
            float(i),
            1.0,
        )
        for i, part in enumerate(parts)
    ]
    return ScoredGroup(rollouts, tuple(part.num_tokens for part in parts), tuple(float(i) for i in range(len(parts))))


@dataclass
class Machine:
    """A driver that reports whatever may happen, at random, and checks every command."""

    dispatcher: Dispatcher
    capacities: dict[str, int]
    group_size: int
    draw: random.Random
    now: float = 0.0
    version: int = 0
    running: dict[str, SendRequest] = field(default_factory=dict)
    stopped: dict[str, bool] = field(default_factory=dict)
    """Requests that are to end, and whether each returns what it has."""
    scoring: list[ScoreGroup] = field(default_factory=list)
    composed: list[Sequence[Group]] = field(default_factory=list)
    state: dict[int, str] = field(default_factory=dict)
    """Of each item: open, requeued, finished, waiting, composed, trained or dropped."""
    idle: list[str] = field(default_factory=list)

    def step(self) -> None:
        self.now += 1.0
        acts = [self.end_request, self.end_request, self.end_request, self.score, self.score, self.settle, self.disturb]
        self.draw.choice(acts)()
        self.carry_out()
        while (item := self.dispatcher.next_item()) is not None:
            assert self.state.get(item, "requeued") == "requeued"
            self.state[item] = "open"
            if self.draw.random() < 0.05:
                self.dispatcher.refuse_item(item, "too long", self.now)
            else:
                self.dispatcher.offer(item, str(item % 7), 3, self.group_size, None, self.now)
            self.carry_out()
        while self.dispatcher.decide(self.now):
            self.carry_out()
        self.carry_out()

    # What happens.

    def end_request(self) -> None:
        if not self.running:
            return
        request_id = self.draw.choice([*self.running])
        request, has_part = self.running.pop(request_id), self.stopped.pop(request_id, None)
        failure = None
        before = 0 if request.partial is None else request.partial.num_tokens
        first = self.version if request.partial is None else request.partial.first_version
        parts = [Part(before + self.draw.randint(1, 9), first, is_whole=True) for _ in request.numbers]
        if has_part is False:
            parts = []
        elif has_part:
            parts = [
                Part(before + (more := self.draw.randint(0, 5)), first if before + more else None, is_whole=False)
                for _ in request.numbers
            ]
        elif self.draw.random() < 0.2:
            parts, failure = [], Failure(self.draw.choice(["endpoint", "request", "item"]), "it failed")
        self.dispatcher.request_ended(request, parts, self.now, failure)

    def score(self) -> None:
        if self.scoring:
            command = self.scoring.pop(self.draw.randrange(len(self.scoring)))
            if self.draw.random() < 0.05:
                self.dispatcher.return_item(command.item, self.now)
            else:
                nothing = ScoredGroup((), (), (), failures=[("timeout", "it took too long")])
                outcome = nothing if self.draw.random() < 0.1 else scored(command.sampled)
                self.dispatcher.group_scored(command.item, outcome, self.now)

    def settle(self) -> None:
        if self.composed:
            groups = self.composed.pop(0)
            for group in groups:
                assert self.state[group.item_index] == "composed"
                self.state[group.item_index] = "trained"
            self.dispatcher.settle(groups, self.now)
            self.version += 1
            self.serve()
            self.dispatcher.want_step(self.version, self.now)

    def disturb(self) -> None:
        name = self.draw.choice([*self.capacities])
        if self.draw.random() < 0.5:
            self.dispatcher.endpoints.lose(name, "it has left", self.now)
        elif self.draw.random() < 0.2 and len(self.capacities) > 1:
            del self.capacities[name]
            self.dispatcher.endpoints.retire(name, self.now, hands_on=self.draw.random() < 0.5)
        self.carry_out()
        self.serve()

    def serve(self) -> None:
        self.dispatcher.endpoints.serve([*self.capacities], self.version, self.now)

    # What is decided.

    def carry_out(self) -> None:
        for command in self.dispatcher.take_commands():
            match command:
                case SendRequest():
                    self.check_request(command)
                    self.running[command.request_id] = command
                case StopRequests(endpoint, request_ids, keeps_partials):
                    assert {self.running[request_id].endpoint for request_id in request_ids} == {endpoint}
                    for request_id in request_ids:
                        self.stopped[request_id] = keeps_partials and self.stopped.get(request_id, True)
                case ScoreGroup(item):
                    assert self.state[item] == "open"
                    self.scoring.append(command)
                case FinishedGroup(group, is_waiting):
                    self.move(group.item_index, "open", "waiting" if is_waiting else "finished")
                case DroppedGroup(group):
                    assert self.state[group.item_index] in ("waiting", "finished")
                    self.state[group.item_index] = "dropped"
                case DroppedItem(item):
                    self.move(item, "open", "dropped")
                case RequeuedItem(item):
                    self.move(item, "open", "requeued")
                case ComposedStep(_, groups):
                    for group in groups:
                        self.move(group.item_index, "waiting", "composed")
                    self.composed.append(groups)
                case IdleEndpoint(endpoint):
                    assert endpoint not in {request.endpoint for request in self.running.values()}
                    self.idle.append(endpoint)
        for request_id, request in self.running.items():
            assert self.state[request.item] == "open" or request_id in self.stopped, "a closed item still runs"

    def move(self, item: int, before: str, after: str) -> None:
        assert self.state[item] == before
        self.state[item] = after

    def check_request(self, command: SendRequest) -> None:
        live = [it for request_id, it in self.running.items() if request_id not in self.stopped]
        assert not {(command.item, i) for i in command.numbers} & {(it.item, i) for it in live for i in it.numbers}
        held = sum(len(it.numbers) for it in live if it.endpoint == command.endpoint)
        assert held + len(command.numbers) <= self.capacities[command.endpoint]
        assert command.partial is None or (len(command.numbers) == 1 and not command.partial.is_whole)


@given(
    name=st.sampled_from(sorted(SCHEDULERS)),
    capacities=st.lists(st.integers(3, 9), min_size=1, max_size=3),
    group_size=st.integers(1, 3),
    is_one_request=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=100)
def test_nothing_is_sampled_twice_at_once_and_every_item_ends_once(
    name: str, capacities: list[int], group_size: int, is_one_request: bool, seed: int
) -> None:
    draw = random.Random(seed)
    scheduler = SCHEDULERS[name](group_size=group_size, history=HistoryStore())
    dispatcher = dispatcher_of(scheduler, is_one_request=is_one_request)
    machine = Machine(dispatcher, {f"e{i}": n for i, n in enumerate(capacities)}, group_size, draw)
    for endpoint, capacity in machine.capacities.items():
        dispatcher.endpoints.add(endpoint, capacity, keeps_partials=draw.random() < 0.5, now=0.0)
    machine.serve()
    dispatcher.want_step(0, 0.0)
    for _ in range(150):
        machine.step()
    counts, ledger = Counter(machine.state.values()), dispatcher.ledger
    assert ledger.num_trained == counts["trained"]
    assert ledger.num_dropped.total() == counts["dropped"]
    assert ledger.outstanding == counts["open"] + counts["waiting"] + counts["composed"]
    held = {name: slots.num_held for name, slots in dispatcher.endpoints.slots.items()}
    running = Counter[str]()
    for request in machine.running.values():
        running[request.endpoint] += len(request.numbers)
    assert {name: num for name, num in held.items() if num} == dict(running)


def started() -> Dispatcher:
    """Return a dispatcher with one endpoint of six slots, which keeps partials, and its first items offered."""
    dispatcher = dispatcher_of(LeastLoaded(group_size=2))
    dispatcher.endpoints.add("a", 6, keeps_partials=True, now=0.0)
    dispatcher.endpoints.serve(["a"], 0, 0.0)
    dispatcher.want_step(0, 0.0)
    return dispatcher


def decide(dispatcher: Dispatcher, now: float = 0.0) -> list[Any]:
    """Offer and decide until there is nothing to decide; return the commands."""
    while True:
        while (item := dispatcher.next_item()) is not None:
            dispatcher.offer(item, "p", 3, 2, None, now)
        if not dispatcher.decide(now):
            return dispatcher.take_commands()


def test_a_scheduler_that_issues_to_a_full_endpoint_or_twice_is_refused() -> None:
    class Overissuing(LeastLoaded):
        again: Issue | None = None

        def decide(self, time_s: float) -> Sequence[Any]:
            return [self.again] if self.again else super().decide(time_s)

    scheduler = Overissuing(group_size=2)
    dispatcher = dispatcher_of(scheduler)
    dispatcher.endpoints.add("a", 2, keeps_partials=True, now=0.0)
    dispatcher.endpoints.add("b", 9, keeps_partials=True, now=0.0)
    dispatcher.endpoints.serve(["a"], 0, 0.0)
    sent, *_ = decide(dispatcher)
    scheduler.again = Issue("a", sent.item, (0,))
    with pytest.raises(InvalidRequestError, match="a, which has 0 free slots"):
        dispatcher.decide(1.0)
    scheduler.again = Issue("b", sent.item, (0,))
    with pytest.raises(InvalidRequestError, match="b, which has left"):
        dispatcher.decide(1.0)
    dispatcher.endpoints.serve(["a", "b"], 0, 1.0)
    with pytest.raises(InvalidRequestError, match="issued completion 0 of item 0, which is running or has finished"):
        dispatcher.decide(1.0)


def test_only_the_request_that_failed_first_is_charged_and_an_item_is_dropped_after_three_tries() -> None:
    dispatcher = started()
    dropped: list[DroppedItem] = []
    for _ in range(3):
        sent = [command for command in decide(dispatcher) if isinstance(command, SendRequest)]
        first, *others = sent
        assert first.item == 0  # the lowest item that waits is offered first
        dispatcher.request_ended(first, (), 1.0, Failure("endpoint", "boom"))
        commands = dispatcher.take_commands()
        (stop,) = [command for command in commands if isinstance(command, StopRequests)]
        assert stop.request_ids == tuple(request.request_id for request in others)
        dropped += [command for command in commands if isinstance(command, DroppedItem)]
        for request in others:
            dispatcher.request_ended(request, (), 1.0)
        dispatcher.endpoints.serve(["a"], 0, 1.0)
    assert [(drop.item, drop.reason, drop.what_happened) for drop in dropped] == [(0, "failed", "a: boom (3 tries)")]
    assert dispatcher.ledger.num_dropped == {"failed": 1}


def test_a_run_of_which_no_item_can_be_used_ends_after_thirty_two() -> None:
    dispatcher = started()
    commands: list[Any] = []
    while not any(isinstance(command, EndRun) for command in commands):
        item = dispatcher.next_item()
        assert item is not None
        dispatcher.refuse_item(item, "the prompt is too long", 0.0)
        commands += dispatcher.take_commands()
    assert commands[-1] == EndRun(
        "none of the first 32 items can be used; the reason for the last one: the prompt is too long"
    )
    assert sum(isinstance(command, DroppedItem) for command in commands) == 32


def test_a_group_that_looks_too_old_is_dropped_only_if_what_comes_back_is() -> None:
    dispatcher = started()
    first, second, third = decide(dispatcher)
    dispatcher.want_step(2, 1.0)  # of lag 2, if their first tokens are of version 0
    (stop,) = dispatcher.take_commands()
    assert stop == StopRequests("a", (first.request_id, second.request_id, third.request_id), keeps_partials=True)
    for request, version in ((first, 0), (second, 1), (third, 0)):
        parts = [Part(4, version, is_whole=False), Part(5, version, is_whole=True)]
        dispatcher.request_ended(request, parts, 1.0)
    dropped = [command for command in dispatcher.take_commands() if isinstance(command, DroppedItem)]
    assert [(drop.item, drop.lengths) for drop in dropped] == [(0, (4, 5)), (2, (4, 5))]
    again = [command for command in decide(dispatcher, 2.0) if command.item == second.item]
    assert [(command.numbers, command.partial) for command in again] == [((0,), Part(4, 1, is_whole=False))]


def test_a_restored_dispatcher_offers_the_same_items_first_and_continues_what_was_sampled() -> None:
    dispatcher = started()
    first, second, _ = decide(dispatcher)
    dispatcher.request_ended(first, [Part(4, 0, is_whole=False), Part(3, 0, is_whole=True)], 1.0)
    dispatcher.request_ended(second, [Part(6, 0, is_whole=True), Part(7, 0, is_whole=True)], 1.0)
    state = json.loads(json.dumps(dispatcher.state(astuple)))

    again = dispatcher_of(LeastLoaded(group_size=2), ledger=Ledger.from_json(state["ledger"]))
    again.restore(state, lambda part: Part(*part))
    again.endpoints.add("a", 6, keeps_partials=True, now=0.0)
    again.endpoints.serve(["a"], 0, 0.0)
    commands = decide(again)
    assert [(it.item, it.sampled) for it in commands if isinstance(it, ScoreGroup)] == [
        (1, [Part(6, 0, is_whole=True), Part(7, 0, is_whole=True)])
    ]
    sent = [(it.item, it.numbers, it.partial) for it in commands if isinstance(it, SendRequest)]
    assert sent[:2] == [(0, (0,), Part(4, 0, is_whole=False)), (2, (0, 1), None)]


def test_a_group_that_waits_for_its_step_is_not_sampled_again_after_a_restart() -> None:
    dispatcher = started()
    requests = decide(dispatcher)[:3]
    wholes = {it.item: [Part(3, 0, is_whole=True), Part(5 + it.item, 0, is_whole=True)] for it in requests}
    for request in requests:
        dispatcher.request_ended(request, wholes[request.item], 1.0)
        dispatcher.group_scored(request.item, scored(wholes[request.item]), 1.0)
    dispatcher.want_step(0, 1.0)
    commands = dispatcher.take_commands()
    (step,) = [it for it in commands if isinstance(it, ComposedStep)]
    assert all(it.is_new for it in commands if isinstance(it, FinishedGroup))
    trained = [group.item_index for group in step.groups]
    waiting = wholes.keys() - {*trained}
    dispatcher.settle(step.groups, 1.0)
    state = json.loads(json.dumps(dispatcher.state(astuple)))
    assert {int(item) for item in state["partials"]} == waiting != set()

    again = dispatcher_of(LeastLoaded(group_size=2), ledger=Ledger.from_json(state["ledger"]))
    again.restore(state, lambda part: Part(*part))
    again.endpoints.add("a", 6, keeps_partials=True, now=0.0)
    again.endpoints.serve(["a"], 0, 0.0)
    commands = decide(again)
    assert {it.item: it.sampled for it in commands if isinstance(it, ScoreGroup)} == {
        item: wholes[item] for item in waiting
    }
    assert waiting.isdisjoint(it.item for it in commands if isinstance(it, SendRequest))
    for item in waiting:
        again.group_scored(item, scored(wholes[item]), 2.0)
    assert again.history.to_json() == state["history"]  # their rewards count once
    finished = {it.group.item_index: it.is_new for it in again.take_commands() if isinstance(it, FinishedGroup)}
    assert finished == dict.fromkeys(waiting, False)


def test_unfinished_groups_that_cannot_be_read_are_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="unfinished groups in the checkpoint cannot be read"):
        started().restore({"partials": {"0": [1]}}, lambda part: Part(*part))
