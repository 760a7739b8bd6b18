"""What a failed request ends: its item, its endpoint, or the run. Against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import CheckpointError, DeadlineError, EndpointError, InflightError, TaskError
from inflight.http.client import HttpEndpoint
from inflight.model.checkpoints import load_tokenizer
from inflight.rollouts import Ledger, load_task
from inflight.rollouts.driver_commands import DroppedItem, FinishedGroup, RequeuedItem
from inflight.run.sampling.actor import Actor, Outcome
from inflight.run.sampling.completions import Completions
from inflight.types import Group
from inflight.wire import AbortRequests, GenerateRequest, GenerateResponse, SamplingParams, WeightVersion
from tests.gates import SOON_S, BrakedServer
from tests.run.acting import actor_of, partials_of
from tests.servers import TOKEN, ServerProcess
from tests.unit.two_drivers import Prompts, Tokenizer, VirtualEndpoint, VirtualLoop, VirtualWork, World

pytestmark = pytest.mark.timeout(120)


class FaultyEndpoint(HttpEndpoint):
    """A real server, some of whose requests fail as ``fault`` specifies."""

    def __init__(self, url: str, fault: Callable[[int], BaseException | None], *, is_well: bool = True) -> None:
        super().__init__(url)
        self._fault = fault
        self._is_well = is_well
        self.tried: list[int] = []

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        item = int(request.request_id.split("-")[1])
        self.tried.append(item)
        if (error := self._fault(item)) is not None:
            raise error
        return await super().generate(request)

    async def weight_version(self) -> WeightVersion:
        if not self._is_well:
            raise DeadlineError("it does not answer", self.name)
        return await super().weight_version()


class Acted:
    """What an actor did until its ``until`` held."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.drops: list[DroppedItem] = []
        self.ledger = Ledger()
        self.lost: dict[str, str] = {}
        self.error: BaseException | None = None

    def note(self, outcome: Outcome) -> None:
        if isinstance(outcome, FinishedGroup):
            self.groups.append(outcome.group)
        elif isinstance(outcome, DroppedItem):
            self.drops.append(outcome)

    @property
    def items(self) -> list[int]:
        return [group.item_index for group in self.groups]


def act(
    endpoint: HttpEndpoint,
    model: Path,
    until: Callable[[Acted], bool],
    *,
    task: dict[str, Any] | None = None,
    max_sequence_tokens: int = 4096,
    outcome: Acted | None = None,
) -> Acted:
    """Run an actor on one endpoint, four sequences at a time, until ``until``, a loss or an error."""
    outcome = outcome or Acted()

    async def run() -> None:
        actor = actor_of(
            Completions(
                load_task("tests.run.tasks:count_letters", task or {}, 0),
                load_tokenizer(model),
                SamplingParams(n=2, max_tokens=4),
                max_sequence_tokens,
                10.0,
            ),
            outcome.note,
            ledger=outcome.ledger,
        )
        actor.add(endpoint, 4)
        actor.serve([endpoint.name], 0)
        running = asyncio.ensure_future(actor.run())
        while not (until(outcome) or actor.unserved.is_set() or running.done()):
            await asyncio.wait({running}, timeout=0.01)
        outcome.lost = dict(actor.dispatcher.endpoints.lost)
        running.cancel()
        (outcome.error,) = await asyncio.gather(running, return_exceptions=True)
        await endpoint.aclose()

    asyncio.run(asyncio.wait_for(run(), 60))
    return outcome


def test_a_late_request_on_an_endpoint_that_is_well_costs_that_item_only(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    endpoint = FaultyEndpoint(shared_server.url, lambda item: DeadlineError("too slow") if item == 3 else None)
    outcome = act(endpoint, model_dir, lambda it: len(it.groups) >= 12 and bool(it.drops))
    assert not outcome.lost
    assert endpoint.tried.count(3) == 3
    assert {0, 1, 2, 4, 5, 6} <= {*outcome.items}
    assert dict(outcome.ledger.num_dropped) == {"failed": 1}
    assert outcome.ledger.num_requeued >= 2  # its tries, and what runs when the actor is cancelled
    (dropped,) = outcome.drops
    assert (dropped.item, dropped.reason) == (3, "failed")
    assert "too slow" in dropped.what_happened


def test_a_late_request_on_an_endpoint_that_does_not_answer_costs_the_endpoint(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    fault = FaultyEndpoint(
        shared_server.url, lambda item: DeadlineError("too slow") if item == 3 else None, is_well=False
    )
    outcome = act(fault, model_dir, lambda it: len(it.groups) >= 12)
    assert outcome.lost == {shared_server.url: "too slow"}
    assert not outcome.ledger.num_dropped
    assert 3 not in outcome.items


@pytest.mark.parametrize(
    "error", [InflightError("the engine is closed"), RuntimeError("boom"), OSError("no route"), EndpointError("gone")]
)
def test_whatever_generate_raises_costs_the_endpoint_and_no_item(
    shared_server: ServerProcess, model_dir: Path, error: Exception
) -> None:
    endpoint = FaultyEndpoint(shared_server.url, lambda item: error if item >= 20 else None)
    outcome = act(endpoint, model_dir, lambda it: False)
    assert str(error) in outcome.lost[shared_server.url]
    assert isinstance(outcome.error, asyncio.CancelledError)
    assert not outcome.ledger.num_dropped
    assert outcome.ledger.outstanding == 0 or outcome.ledger.num_requeued > 0
    assert {0, 1, 2, 3} <= {*outcome.items}


def test_an_item_that_fails_wherever_it_goes_is_given_up(shared_server: ServerProcess, model_dir: Path) -> None:
    """It costs its endpoint each time; the next publish brings that back, and the item is the first to be issued."""
    ledger_drops = {}
    endpoint = FaultyEndpoint(shared_server.url, lambda item: RuntimeError("boom") if item == 2 else None)

    async def run() -> None:
        groups: list[Group] = []
        ledger = Ledger()
        actor = actor_of(
            Completions(
                load_task("tests.run.tasks:count_letters", {}, 0),
                load_tokenizer(model_dir),
                SamplingParams(n=2, max_tokens=4),
                4096,
                10.0,
            ),
            lambda outcome: groups.append(outcome.group) if isinstance(outcome, FinishedGroup) else None,
            ledger=ledger,
        )
        actor.add(endpoint, 4)
        running = asyncio.ensure_future(actor.run())
        while len(groups) < 10:
            actor.serve([endpoint.name], 0)
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await endpoint.aclose()
        ledger_drops.update(ledger.num_dropped)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert ledger_drops == {"failed": 1}
    assert endpoint.tried.count(2) == 3


def test_a_refused_prompt_is_dropped_and_the_others_go_on(shared_server: ServerProcess, model_dir: Path) -> None:
    outcome = act(
        HttpEndpoint(shared_server.url), model_dir, lambda it: len(it.groups) >= 8, task={"overlong_every": 4}
    )
    assert not outcome.lost
    assert outcome.ledger.num_dropped["unusable"] >= 2
    assert all(item % 4 != 3 for item in outcome.items)
    assert "the prompt has 1201 tokens, but the context has only 1024" in outcome.drops[0].what_happened


def test_a_prompt_that_a_micro_batch_may_not_hold_is_dropped_before_it_is_sampled(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    endpoint = FaultyEndpoint(shared_server.url, lambda item: None)
    outcome = act(
        endpoint, model_dir, lambda it: len(it.groups) >= 8, task={"overlong_every": 4}, max_sequence_tokens=100
    )
    assert outcome.ledger.num_dropped["unusable"] >= 2
    assert not {3, 7} & {*endpoint.tried}
    assert "train.max_tokens_per_micro_batch" in outcome.drops[0].what_happened


def test_prompts_that_are_all_refused_end_the_run_with_the_reason(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    outcome = act(HttpEndpoint(shared_server.url), model_dir, lambda it: False, task={"prompt_tokens": 1200})
    assert isinstance(outcome.error, TaskError)
    assert "none of the first 32 items can be used" in str(outcome.error)
    assert "the prompt has 1201 tokens, but the context has only 1024" in str(outcome.error)
    assert not outcome.lost


def test_a_note_that_cannot_be_taken_ends_the_run_and_the_ledger_still_adds_up(
    shared_server: ServerProcess, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal's disk is full when a finished group is handed on."""

    class FullDisk(Acted):
        def note(self, outcome: Outcome) -> None:
            super().note(outcome)
            if isinstance(outcome, FinishedGroup):
                raise CheckpointError("no space left on device")

    outcome = act(HttpEndpoint(shared_server.url), model_dir, lambda it: False, outcome=FullDisk())
    assert isinstance(outcome.error, CheckpointError)
    assert Ledger.from_json(outcome.ledger.to_json()).outstanding == 0
    assert not caplog.records  # asyncio tells of what escapes from a callback


def test_nothing_runs_any_more_when_the_end_of_the_last_group_is_told(
    shared_server: ServerProcess, model_dir: Path
) -> None:
    """A run that waits until nothing runs looks once for each end, re-queued and dropped groups included."""
    running_at_end: list[int] = []
    endpoint = FaultyEndpoint(shared_server.url, lambda item: RuntimeError("boom") if item == 2 else None)

    async def run() -> None:
        actor: Actor
        actor = actor_of(
            Completions(
                load_task("tests.run.tasks:count_letters", {"overlong_every": 2}, 0),
                load_tokenizer(model_dir),
                SamplingParams(n=2, max_tokens=4),
                4096,
                10.0,
            ),
            lambda outcome: (
                running_at_end.append(len(actor.dispatcher.open))
                if isinstance(outcome, FinishedGroup | DroppedItem | RequeuedItem)
                else None
            ),
            may_offer=lambda: not actor.dispatcher.open,
        )
        actor.add(endpoint, 2)
        actor.serve([endpoint.name], 0)
        running = asyncio.ensure_future(actor.run())
        await asyncio.wait_for(actor.unserved.wait(), 30)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await endpoint.aclose()

    asyncio.run(run())
    assert running_at_end == [0, 0, 0]  # finished, unusable, re-queued: one at a time


async def until_running(endpoint: HttpEndpoint, number: int) -> None:
    """Wait until the server runs so many completions; the caller has a deadline."""
    while (await endpoint.weight_version()).num_running != number:  # noqa: ASYNC110 - in another process
        await asyncio.sleep(0.01)


async def sampling(
    endpoint: HttpEndpoint,
    model: Path,
    version: int,
    outcome: Acted,
    *,
    keeps_partials: bool,
    is_young: Callable[[int], bool] = lambda first_version: True,
) -> Actor:
    """An actor that samples three groups of two completions of 400 tokens."""
    actor = actor_of(
        Completions(
            load_task("tests.run.tasks:count_letters", {}, 0),
            load_tokenizer(model),
            SamplingParams(n=2, max_tokens=400, ignore_eos=True),
            4096,
            10.0,
        ),
        outcome.note,
        ledger=outcome.ledger,
        may_offer=lambda: outcome.ledger.outstanding + sum(outcome.ledger.num_dropped.values()) < 3,
        is_young=is_young,
    )
    capabilities = (await endpoint.capabilities()).model_copy(update={"partial_rollouts": keeps_partials})
    actor.add(endpoint, 6, capabilities)
    actor.serve([endpoint.name], version)
    return actor


class AbortingEndpoint(HttpEndpoint):
    """Has its server sample slowly until it has aborted requests there."""

    def __init__(self, server: BrakedServer) -> None:
        super().__init__(server.url, token=TOKEN)
        self.brake = server.brake

    async def abort_requests(self, requests: AbortRequests) -> None:
        await super().abort_requests(requests)
        self.brake.release()


def act_on_stale(
    endpoint: AbortingEndpoint, model: Path, version: int, is_young: Callable[[int], bool], *, keeps_partials: bool
) -> Acted:
    """Sample three groups of 400 tokens and drop stale ones while they run.

    Returns what came of them, once the server runs nothing any more.
    """
    outcome = Acted()

    async def run() -> None:
        actor = await sampling(endpoint, model, version, outcome, keeps_partials=keeps_partials, is_young=is_young)
        running = asyncio.ensure_future(actor.run())
        await until_running(endpoint, 6)
        actor.dispatcher.want_step(1, actor.clock())
        actor.carry_out_commands()
        while len(outcome.groups) + len(outcome.drops) < 3:
            await asyncio.wait({running}, timeout=0.01)
        await until_running(endpoint, 0)
        outcome.lost = dict(actor.dispatcher.endpoints.lost)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await endpoint.aclose()

    with endpoint.brake:
        asyncio.run(asyncio.wait_for(run(), SOON_S))
    return outcome


@pytest.mark.parametrize("keeps_partials", [True, False], ids=["keeps_partials", "keeps_none"])
def test_a_server_that_leaves_in_order_hands_on_what_it_has_sampled(
    braked_server: BrakedServer, model_dir: Path, keeps_partials: bool
) -> None:
    """And its requests wait for another server, or start again there."""
    outcome, left = Acted(), list[str]()

    async def run() -> dict[str, Any]:
        endpoint = HttpEndpoint(braked_server.url, token=TOKEN)
        actor = await sampling(endpoint, model_dir, 0, outcome, keeps_partials=keeps_partials)
        running = asyncio.ensure_future(actor.run())
        await until_running(endpoint, 6)
        actor.retire(endpoint.name, lambda: left.append(endpoint.name), hands_on=True)
        while not left:
            await asyncio.wait({running}, timeout=0.01)
        await until_running(endpoint, 0)
        partials = partials_of(actor)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await endpoint.aclose()
        return partials

    with braked_server.brake:
        partials = asyncio.run(asyncio.wait_for(run(), SOON_S))
    assert (outcome.groups, outcome.drops) == ([], [])
    if keeps_partials:
        assert [len(one) for one in partials.values()] == [2, 2, 2]
        assert all(0 < len(part["token_ids"]) < 400 for one in partials.values() for part in one)
    else:
        assert partials == {}
    assert len(outcome.ledger.to_json()["unsettled"]) == 3


def test_requests_that_end_together_are_aborted_in_one_call(braked_server: BrakedServer, model_dir: Path) -> None:
    calls: list[tuple[str, ...]] = []

    class CountingEndpoint(AbortingEndpoint):
        async def abort_requests(self, requests: AbortRequests) -> None:
            calls.append(requests.request_ids)
            await super().abort_requests(requests)

    endpoint = CountingEndpoint(braked_server)
    act_on_stale(endpoint, model_dir, 0, lambda first: first > 1, keeps_partials=True)
    assert [len(ids) for ids in calls] == [3]


@pytest.mark.parametrize("keeps_partials", [True, False], ids=["keeps_partials", "keeps_none"])
def test_running_groups_that_are_too_old_are_aborted_and_dropped(
    braked_server: BrakedServer, model_dir: Path, keeps_partials: bool
) -> None:
    endpoint = AbortingEndpoint(braked_server)
    outcome = act_on_stale(endpoint, model_dir, 0, lambda first: first > 1, keeps_partials=keeps_partials)
    assert outcome.ledger.num_dropped == {"stale": 3}
    assert not outcome.groups
    assert not outcome.lost
    for drop in outcome.drops:
        assert len(drop.lengths) == (2 if keeps_partials else 0)
        assert all(0 < length < 400 for length in drop.lengths)


def test_a_group_that_turns_out_to_have_begun_later_than_it_was_sent_is_sampled_on(
    braked_server: BrakedServer, model_dir: Path
) -> None:
    """By what was published when they were sent they are too old; their own tokens say that they are not."""
    endpoint = AbortingEndpoint(braked_server)
    outcome = act_on_stale(endpoint, model_dir, -1, lambda first: first >= 0, keeps_partials=True)
    assert not outcome.drops
    assert sorted(outcome.items) == [0, 1, 2]
    assert outcome.ledger.num_dropped == {}
    for group in outcome.groups:
        assert all(
            len(rollout.completion_token_ids) == 400 or rollout.finish_reason == "stop" for rollout in group.rollouts
        )


def test_rewards_that_fail_together_are_both_reported() -> None:
    """The first error ends the actor, and the other is a note of it."""
    world = World(capacities=(4,))

    @dataclass(frozen=True)
    class Failing:
        are_both: asyncio.Event
        items: list[int] = field(default_factory=list)

        async def rewards(
            self, item: int, token_ids: Sequence[Sequence[int]], timeout_s: float, what: str
        ) -> list[float]:
            self.items.append(item)
            if len(self.items) == 2:
                self.are_both.set()
            await self.are_both.wait()
            raise TaskError(f"no reward for item {item}")

        async def aclose(self) -> None:
            pass

    async def run() -> tuple[BaseException, list[int]]:
        pool: Any = Failing(asyncio.Event())
        work = VirtualWork(Prompts(), Tokenizer(), SamplingParams(n=2, max_tokens=1 << 16), 1 << 20, 10.0, pool)
        actor = actor_of(work, lambda outcome: None)
        (endpoint,) = world.setup().endpoints
        virtual = VirtualEndpoint(world, endpoint, work.orders)
        actor.add(virtual, endpoint.capacity)
        actor.serve([virtual.name], 0)
        with pytest.raises(TaskError) as raised:
            await actor.run()
        return raised.value, pool.items

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        error, items = runner.run(run())
    messages = [f"no reward for item {item}" for item in items]
    (note,) = error.__notes__
    assert str(error) in messages
    assert note.removeprefix("also failed: TaskError: ") in messages
    assert not note.endswith(str(error))
