"""Campaigns of faults against publishes; and broken libraries, each of which a campaign has to find."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from inflight.conformance.fleet.campaign import summary
from inflight.conformance.fleet.palette import CHECKPOINT, FROZEN, Shade
from inflight.conformance.fleet.plan import (
    INSIDE,
    OUTSIDE,
    RANK,
    SENDER,
    TRANSPORTS,
    Kind,
    Transport,
    UpdateStep,
    fault_plan,
    sites,
)
from inflight.conformance.fleet.schedule import run_schedule
from inflight.conformance.tcp_proxy import TcpProxy
from inflight.contracts import WeightReceiver
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.sequences import Sequence
from inflight.errors import TransferError
from inflight.types import PublishReport
from inflight.weights.encode.bucket_bytes import decode, encode, pack, unpack
from inflight.weights.encode.parts import views_of
from inflight.weights.receive import staging
from inflight.weights.receive.staging import Staging
from inflight.weights.receive.states import UpdateStateMachine
from inflight.weights.send.module import tensor_spec
from inflight.weights.send.ranks import EndOrder, RankSenders
from inflight.weights.transports.several import SeveralReceivers
from inflight.wire import BucketSpec, Manifest, VersionSpan
from tests.chaos import dying
from tests.chaos.campaign import Campaign, results_of
from tests.chaos.embedded import EmbeddedTestbed, digest
from tests.conformance.broken import require_no_crash
from tests.selection import first_of_each

MOST_TRIES = 14


@pytest.fixture(scope="module")
def testbed() -> Iterator[EmbeddedTestbed]:
    with EmbeddedTestbed() as testbed:
        yield testbed


# ---------------------------------------------------------------------------------------------------------------
# Plans and weights


def test_a_process_that_dies_fails_the_schedule_that_it_was_at() -> None:
    first, second = results_of(Campaign(10, seed=4), dying.work)
    assert (first.seed, second.seed) == (4, 5)
    assert second.problems == ("the process of this schedule ended with status 3",)
    assert len(summary([second], INSIDE, 1.0)["failed"]) == 1


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    plans = [fault_plan(seed, 3, "http") for seed in range(50)]
    assert plans == [fault_plan(seed, 3, "http") for seed in range(50)]
    assert len({str(plan) for plan in plans}) == 50
    assert all(SENDER <= fault.endpoint < 3 for plan in plans for fault in plan.faults)


@pytest.mark.parametrize("kinds", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_every_step_of_every_transport_is_struck_in_every_way_by_a_campaign(kinds: frozenset[Kind]) -> None:
    planned = {
        (transport, fault.step, fault.kind)
        for seed in range(4 * max(len(sites(transport, kinds)) for transport in TRANSPORTS))
        for transport in (TRANSPORTS[seed % len(TRANSPORTS)],)
        for fault in fault_plan(seed, 3, transport, kinds=kinds).faults
    }
    assert planned == {(transport, *site) for transport in TRANSPORTS for site in sites(transport, kinds)}
    of_rank = {step for step in UpdateStep if step.startswith("rank")}
    assert {step for _, step, _ in planned} == set(UpdateStep) - of_rank
    assert {kind for _, _, kind in planned} == set(Kind) - ((INSIDE | OUTSIDE) - kinds) - {Kind.UNLINK, Kind.COME_BACK}


def test_every_step_of_rank_1_is_struck_first_in_every_way_by_a_campaign_of_two_senders() -> None:
    every = [site for site in sites("http", num_senders=2) if site not in sites("http")]
    firsts = [fault_plan(seed, 3, "http", num_senders=2).faults[0] for seed in range(3, 3 + 4 * len(every), 4)]
    assert {(fault.step, fault.kind) for fault in firsts} == set(every)
    assert {fault.endpoint for fault in firsts} == {RANK}
    assert {step for step, _ in every} == {step for step in UpdateStep if step.startswith("rank")}


def test_every_shade_differs_in_every_tensor_and_travels_exactly_in_every_encoding(testbed: EmbeddedTestbed) -> None:
    palette = testbed.palette(5, ())
    shades = [CHECKPOINT, *(Shade(version, 1) for version in range(1, 6))]
    for shade in shades:
        palette.add(shade)
    assert palette.shade_with(digest(testbed.like)) == CHECKPOINT
    for one, other in itertools.combinations(shades, 2):
        first, second = palette.tensors(one), palette.tensors(other)
        assert all(not first[name].equal(second[name]) for name in testbed.like)
    tensors = palette.tensors(shades[-1])
    specs = [tensor_spec(name, tensor, None) for name, tensor in tensors.items()]
    for encoding in ("bfloat16", "float8"):
        decoded = decode(encoding, encode(list(tensors.values()), specs, encoding), specs)
        assert decoded.equal(pack(list(tensors.values())))
        assert len(unpack(decoded, specs)) == len(specs)


def test_what_is_sampled_tells_the_shade_in_every_dtype(testbed: EmbeddedTestbed) -> None:
    palette = testbed.palette(7, FROZEN)
    palette.add(shade := Shade(1, 1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = copy.deepcopy(testbed.template).to(dtype)
        model.set_attn_implementation("sdpa")
        for name, parameter in model.named_parameters():
            parameter.data.copy_(palette.tensors(shade)[name])
        with torch.inference_mode():
            logprobs_TV = model(torch.tensor([[5, 9, 200]])).logits[0].float().log_softmax(-1)
        for logprobs_V in logprobs_TV:
            assert palette.shade_of(range(258), logprobs_V.tolist()) == shade
            assert not palette.is_sampled_from(0, 17, float(logprobs_V[17]))
    assert palette.shade_of([1, 2], [-1.0, -2.0]) is None


# ---------------------------------------------------------------------------------------------------------------
# The library as it is


def figures_of(num_schedules: int, num_processes: int) -> dict[str, Any]:
    figures = summary(list(results_of(Campaign(num_schedules, seed=1000, num_processes=num_processes))), INSIDE, 0.0)
    assert figures["num_schedules"] == num_schedules
    assert figures["failed"] == []
    assert figures["num_faults"] >= num_schedules
    assert set(figures["outcomes"]) == set(TRANSPORTS)
    return figures


@pytest.mark.exhaustive
def test_no_schedule_of_a_campaign_of_one_for_each_transport_fails() -> None:
    figures_of(len(TRANSPORTS), num_processes=1)


@pytest.mark.exhaustive
def test_no_schedule_of_a_small_campaign_fails() -> None:
    figures = figures_of(24, num_processes=2)
    assert figures["num_faults"] > 24
    assert all({"returned", "PublishError"} <= set(counts) for counts in figures["outcomes"].values())


def of_rank(kind: Kind, step: UpdateStep, transport: Transport) -> int:
    """The first seed whose plan strikes rank 1 in this way, once, and in the first publish."""
    for seed in range(4000):
        (first, *others) = fault_plan(seed, 3, transport, num_senders=2).faults
        if not others and (first.kind, first.step, first.occurrence) == (kind, step, 0):
            return seed
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "step", "transport"),
    [
        (Kind.KILL, UpdateStep.RANK_ANSWER, "http"),
        (Kind.CORRUPT, UpdateStep.RANK_SEND, "shm"),
        (Kind.UNLINK, UpdateStep.RANK_LAST, "gloo"),
        pytest.param(Kind.COME_BACK, UpdateStep.RANK_SEND, "gloo", marks=pytest.mark.exhaustive),
        pytest.param(Kind.STOP, UpdateStep.RANK_ENCODE, "http", marks=pytest.mark.exhaustive),
    ],
)
def test_a_trainer_of_two_senders_outlasts_a_fault_of_the_second(
    kind: Kind, step: UpdateStep, transport: Transport, testbed: EmbeddedTestbed
) -> None:
    result = run_schedule(of_rank(kind, step, transport), testbed, transport, num_senders=2)
    assert not result.problems
    assert result.injected == ((step, kind),)


# ---------------------------------------------------------------------------------------------------------------
# Broken libraries


def seeds_with(kind: Kind, steps: tuple[UpdateStep, ...], num_senders: int = 1) -> list[int]:
    """Seeds whose plan strikes so first."""

    def first(seed: int) -> tuple[UpdateStep, Kind]:
        fault = fault_plan(seed, 3, TRANSPORTS[seed % len(TRANSPORTS)], num_senders=num_senders).faults[0]
        return fault.step, fault.kind

    return [seed for seed in range(2000) if first(seed)[1] is kind and first(seed)[0] in steps]


def skip_the_checksum(patch: pytest.MonkeyPatch) -> None:
    receive = Staging.receive
    patch.setattr(
        Staging,
        "receive",
        lambda self, receiver, transfer, *rest: receive(
            self, receiver, transfer.model_copy(update={"checksum": None}), *rest
        ),
    )


def apply_before_all_buckets_arrived(patch: pytest.MonkeyPatch) -> None:
    prepare = EmbeddedEndpoint._prepare
    patch.setattr(EmbeddedEndpoint, "_prepare", lambda self, update, arrived: prepare(self, update, arrived[:-4]))


def report_a_commit_that_was_not_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "load", lambda self, tensors, version, policy: None)


def name_the_version_before(patch: pytest.MonkeyPatch) -> None:
    completion = Sequence.completion

    def shifted(self: Sequence):  # type: ignore[no-untyped-def]
        whole = completion(self)
        spans = tuple(
            VersionSpan.model_construct(version=max(0, s.version - 1), start=s.start, end=s.end)
            for s in whole.version_spans
        )
        return whole.model_copy(update={"version_spans": spans})

    patch.setattr(Sequence, "completion", shifted)


def ignore_incarnations(patch: pytest.MonkeyPatch) -> None:
    request = UpdateStateMachine.request

    def hear(self: UpdateStateMachine, run_id: str, incarnation: int) -> None:
        self._owner = run_id
        highest = self._incarnations._highest
        highest[run_id] = max(incarnation, highest.get(run_id, 0))

    patch.setattr(UpdateStateMachine, "fence", hear)
    patch.setattr(
        UpdateStateMachine, "request", lambda self, update: request(self, update.model_copy(update={"incarnation": 0}))
    )


def resume_a_torn_endpoint(patch: pytest.MonkeyPatch) -> None:
    abort = UpdateStateMachine.abort

    def forgetful(self: UpdateStateMachine, *, torn: bool = False) -> None:
        if self._open is not None:
            self._open.is_applying = False
        abort(self)

    patch.setattr(UpdateStateMachine, "abort", forgetful)
    patch.setattr(EmbeddedEndpoint, "fail_requests", EmbeddedEndpoint.resume)


def forget_sessions_that_are_over(patch: pytest.MonkeyPatch) -> None:
    init = UpdateStateMachine.__init__

    def remembering_nothing(self, expected) -> None:  # type: ignore[no-untyped-def]
        init(self, expected)
        self._over = deque(maxlen=0)

    patch.setattr(UpdateStateMachine, "__init__", remembering_nothing)


def succeed_without_a_quorum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PublishReport, "succeeded", property(lambda self: True))


def lose_what_runs(patch: pytest.MonkeyPatch) -> None:
    load = Engine.load

    def losing(self, tensors, version, policy) -> None:  # type: ignore[no-untyped-def]
        load(self, tensors, version, policy)
        self.scheduler.cancel_all()

    patch.setattr(Engine, "load", losing)


ANYTHING = (Kind.DELAY, (UpdateStep.REQUEST, UpdateStep.VERSION))
MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Kind, tuple[UpdateStep, ...]]] = [
    (report_a_commit_that_was_not_applied, *ANYTHING),  # found soonest
    (skip_the_checksum, Kind.CORRUPT, (UpdateStep.SEND,)),
    (apply_before_all_buckets_arrived, *ANYTHING),
    (name_the_version_before, *ANYTHING),
    (lose_what_runs, *ANYTHING),
    (ignore_incarnations, Kind.TAKE_OVER, (UpdateStep.REQUEST, UpdateStep.RECEIVE, UpdateStep.SEND)),
    (resume_a_torn_endpoint, Kind.TEAR, (UpdateStep.COMMIT,)),
    (forget_sessions_that_are_over, Kind.REPEAT_LATE, (UpdateStep.REQUEST,)),
    (succeed_without_a_quorum, Kind.CORRUPT, (UpdateStep.SEND,)),
]


def commit_without_the_part_of_a_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeveralReceivers, "of_each", lambda self, call: call(0, self.receivers[0]))


def swallow_the_failure_of_a_rank(patch: pytest.MonkeyPatch) -> None:
    def forgiving(self: SeveralReceivers, call: Callable[[int, WeightReceiver], None]) -> None:
        for it in enumerate(self.receivers):
            with contextlib.suppress(TransferError):
                call(*it)

    patch.setattr(SeveralReceivers, "of_each", forgiving)


def put_every_part_first(patch: pytest.MonkeyPatch) -> None:
    def shifted(flat: torch.Tensor, manifest: Manifest, bucket: BucketSpec, sender: int) -> list[torch.Tensor]:
        views = views_of(flat, manifest, bucket, sender)
        sizes = [view.numel() for view in views]
        return list(flat[: sum(sizes)].split(sizes)) if sizes else []

    patch.setattr(staging, "views_of", shifted)


def skip_the_checksum_of_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(staging, "checksum_as", lambda announced, *_: announced)


def wait_for_ranks_without_a_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankSenders, "_remaining_s", lambda self: 60.0)


def leave_the_other_ranks_in_a_publish(patch: pytest.MonkeyPatch) -> None:
    order = RankSenders._order
    patch.setattr(RankSenders, "_order", lambda self, given: [] if isinstance(given, EndOrder) else order(self, given))


RANK_MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Kind, tuple[UpdateStep, ...]]] = [
    (skip_the_checksum_of_parts, Kind.CORRUPT, (UpdateStep.RANK_SEND,)),  # found soonest
    (commit_without_the_part_of_a_rank, Kind.DELAY, (UpdateStep.RANK_BEGIN,)),
    (swallow_the_failure_of_a_rank, Kind.CORRUPT, (UpdateStep.RANK_SEND,)),
    (put_every_part_first, Kind.DELAY, (UpdateStep.RANK_BEGIN,)),
    (wait_for_ranks_without_a_deadline, Kind.COME_BACK, (UpdateStep.RANK_ENCODE, UpdateStep.RANK_ANSWER)),
    (leave_the_other_ranks_in_a_publish, Kind.DELAY, (UpdateStep.RANK_BEGIN,)),
]


EVERY_MUTANT = [*((1, *mutant) for mutant in MUTANTS), *((2, *mutant) for mutant in RANK_MUTANTS)]


@pytest.mark.parametrize(
    ("num_senders", "mutate", "kind", "steps"),
    first_of_each(EVERY_MUTANT, lambda mutant: mutant[0]),
    ids=[mutant[1].__name__ for mutant in EVERY_MUTANT],
)
def test_a_campaign_finds_a_library_that_would(
    num_senders: int,
    mutate: Callable[[pytest.MonkeyPatch], None],
    kind: Kind,
    steps: tuple[UpdateStep, ...],
    monkeypatch: pytest.MonkeyPatch,
    testbed: EmbeddedTestbed,
) -> None:
    mutate(monkeypatch)
    tried = seeds_with(kind, steps, num_senders=num_senders)[:MOST_TRIES]
    problems = next(filter(None, (run_schedule(seed, testbed, num_senders=num_senders).problems for seed in tried)), ())
    assert problems, tried
    require_no_crash("\n".join(problems))


# ---------------------------------------------------------------------------------------------------------------
# The proxy


async def proxied(rule: dict[str, int], sent: bytes, num_expected: int) -> bytes:
    """What comes back of ``sent`` from an echo behind a proxy, until it is cut or all of it came."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = TcpProxy("127.0.0.1", server.sockets[0].getsockname()[1])
    await proxy.start()
    for name, value in rule.items():
        setattr(proxy, name, value)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(sent)
        came = b""
        try:
            async with asyncio.timeout(0.5):
                while len(came) < num_expected and (data := await reader.read(65536)):
                    came += data
        except (TimeoutError, ConnectionError):
            pass
        writer.close()
        return came
    finally:
        await proxy.aclose()
        server.close()


def test_the_proxy_passes_all_on_and_cuts_or_changes_as_it_is_told() -> None:
    sent = bytes(range(256)) * 16
    assert asyncio.run(proxied({}, sent, len(sent))) == sent
    assert len(asyncio.run(proxied({"cut_after_bytes": 1000, "num_cuts": 1}, sent, len(sent)))) <= 1000
    changed = asyncio.run(proxied({"num_corrupted": 1}, sent, len(sent)))
    assert sum(a != b for a, b in zip(changed, sent, strict=True)) == 1
