"""Campaigns of faults against publishes; and broken libraries, each of which a campaign has to find."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.conformance.chaos import campaign
from inflight.conformance.chaos.campaign import Campaign, rows, summary
from inflight.conformance.chaos.palette import CHECKPOINT, Palette, Shade, digest
from inflight.conformance.chaos.plan import SENDER, TRANSPORTS, Kind, Step, fault_plan, sites
from inflight.conformance.chaos.processes import run_process_schedule
from inflight.conformance.chaos.proxy import Rule, TcpProxy
from inflight.conformance.chaos.schedule import Ground, run_schedule
from inflight.local.endpoint import LocalEndpoint
from inflight.local.engine import Engine
from inflight.local.sequences import Sequence
from inflight.types import PublishReport
from inflight.weights.encoding import decode, encode
from inflight.weights.packing import pack, unpack
from inflight.weights.receiving import StagedIntake
from inflight.weights.session import UpdateSession
from inflight.weights.staging import Staging
from inflight.wire import VersionSpan

MOST_TRIES = 14


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with Ground() as ground:
        yield ground


# ---------------------------------------------------------------------------------------------------------------
# Plans and weights


def test_a_process_that_dies_fails_the_schedule_that_it_was_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(campaign: Campaign, number: int, log: Path) -> subprocess.Popen[str]:
        row = '{"seed": 4, "problems": []}'
        script = f"import sys; print('{row}'); print('what it said', file=sys.stderr); sys.exit(3)"
        with log.open("wb") as file:
            return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=file, text=True)

    monkeypatch.setattr(campaign, "_process", dying)
    first, second = rows(Campaign(10, seed=4))
    assert (first["seed"], second["seed"]) == (4, 5)
    assert second["problems"] == ["the process of this schedule ended with status 3: what it said\n"]
    figures = summary([{**second, "transport": "shm"}], 1.0)
    assert len(figures["failed"]) == 1


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    plans = [fault_plan(seed, 3, "http") for seed in range(50)]
    assert plans == [fault_plan(seed, 3, "http") for seed in range(50)]
    assert len({str(plan) for plan in plans}) == 50
    assert all(SENDER <= fault.endpoint < 3 for plan in plans for fault in plan.faults)


def test_every_step_of_every_transport_is_struck_in_every_way_by_a_campaign() -> None:
    planned = {
        (transport, fault.step, fault.kind)
        for seed in range(4 * max(len(sites(transport)) for transport in TRANSPORTS))
        for transport in (TRANSPORTS[seed % len(TRANSPORTS)],)
        for fault in fault_plan(seed, 3, transport).faults
    }
    assert planned == {(transport, *site) for transport in TRANSPORTS for site in sites(transport)}
    assert {step for _, step, _ in planned} == set(Step)
    assert {kind for _, _, kind in planned} == set(Kind)


def test_every_shade_differs_in_every_tensor_and_travels_exactly_in_every_encoding(ground: Ground) -> None:
    named = dict(ground.template.named_parameters())
    palette = Palette(named, seed=5)
    shades = [CHECKPOINT, *(Shade(version, 1) for version in range(1, 6))]
    for shade in shades:
        palette.add(shade)
    assert palette.shade_of(digest(named)) == CHECKPOINT
    for one, other in itertools.combinations(shades, 2):
        first, second = palette.tensors(one), palette.tensors(other)
        assert all(not first[name].equal(second[name]) for name in named)
    from inflight.conformance.chaos.palette import spec_of

    tensors = palette.tensors(shades[-1])
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    for encoding in ("bfloat16", "float8"):
        decoded = decode(encoding, encode(list(tensors.values()), specs, encoding), specs)
        assert decoded.equal(pack(list(tensors.values())))
        assert len(unpack(decoded, specs)) == len(specs)


# ---------------------------------------------------------------------------------------------------------------
# The library as it is


def figures_of(num_schedules: int, num_processes: int) -> dict[str, Any]:
    figures = summary(list(rows(Campaign(num_schedules, seed=1000, num_processes=num_processes))), 0.0)
    assert figures["num_schedules"] == num_schedules
    assert figures["failed"] == []
    assert figures["num_faults"] >= num_schedules
    assert set(figures["outcomes"]) == set(TRANSPORTS)
    return figures


def test_no_schedule_of_a_campaign_of_one_for_each_transport_fails() -> None:
    figures_of(len(TRANSPORTS), num_processes=1)


@pytest.mark.exhaustive
def test_no_schedule_of_a_small_campaign_fails() -> None:
    figures = figures_of(24, num_processes=2)
    assert figures["num_faults"] > 24
    assert all({"returned", "PublishError"} <= set(counts) for counts in figures["outcomes"].values())


# ---------------------------------------------------------------------------------------------------------------
# Broken libraries


def seeds_with(kind: Kind, steps: tuple[Step, ...]) -> list[int]:
    """Seeds whose plan strikes so first."""

    def first(seed: int) -> tuple[Step, Kind]:
        fault = fault_plan(seed, 3, TRANSPORTS[seed % len(TRANSPORTS)]).faults[0]
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
    take = StagedIntake.take
    patch.setattr(StagedIntake, "take", lambda self: take(self)[:-4])


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


def ignore_epochs(patch: pytest.MonkeyPatch) -> None:
    request = UpdateSession.request
    patch.setattr(UpdateSession, "fence", lambda self, run_id, epoch: setattr(self, "_owner", run_id))
    patch.setattr(UpdateSession, "request", lambda self, update: request(self, update.model_copy(update={"epoch": 0})))


def release_a_torn_endpoint(patch: pytest.MonkeyPatch) -> None:
    abort = UpdateSession.abort

    def forgetful(self: UpdateSession, *, torn: bool = False) -> None:
        self._applying = False
        abort(self)

    patch.setattr(UpdateSession, "abort", forgetful)
    patch.setattr(LocalEndpoint, "give_up", LocalEndpoint.release)


def forget_sessions_that_are_over(patch: pytest.MonkeyPatch) -> None:
    init = UpdateSession.__init__

    def remembering_nothing(self, expected) -> None:  # type: ignore[no-untyped-def]
        init(self, expected)
        self._over = deque(maxlen=0)

    patch.setattr(UpdateSession, "__init__", remembering_nothing)


def succeed_without_a_quorum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PublishReport, "succeeded", property(lambda self: True))


def lose_what_runs(patch: pytest.MonkeyPatch) -> None:
    load = Engine.load

    def losing(self, tensors, version, policy) -> None:  # type: ignore[no-untyped-def]
        load(self, tensors, version, policy)
        self.cancel_all()

    patch.setattr(Engine, "load", losing)


ANYTHING = (Kind.DELAY, (Step.REQUEST, Step.VERSION))
MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Kind, tuple[Step, ...]]] = [
    (skip_the_checksum, Kind.CORRUPT, (Step.SEND,)),
    (apply_before_all_buckets_arrived, *ANYTHING),
    (report_a_commit_that_was_not_applied, *ANYTHING),
    (name_the_version_before, *ANYTHING),
    (lose_what_runs, *ANYTHING),
    (ignore_epochs, Kind.TAKE_OVER, (Step.REQUEST, Step.RECEIVE, Step.SEND)),
    (release_a_torn_endpoint, Kind.TEAR, (Step.COMMIT,)),
    (forget_sessions_that_are_over, Kind.REPEAT_LATE, (Step.REQUEST,)),
    (succeed_without_a_quorum, Kind.CORRUPT, (Step.SEND,)),
]


@pytest.mark.parametrize(("mutate", "kind", "steps"), MUTANTS, ids=[mutant[0].__name__ for mutant in MUTANTS])
def test_a_campaign_finds_a_library_that_would(
    mutate: Callable[[pytest.MonkeyPatch], None],
    kind: Kind,
    steps: tuple[Step, ...],
    monkeypatch: pytest.MonkeyPatch,
    ground: Ground,
) -> None:
    mutate(monkeypatch)
    tried = seeds_with(kind, steps)[:MOST_TRIES]
    assert any(run_schedule(seed, ground).problems for seed in tried), tried


# ---------------------------------------------------------------------------------------------------------------
# The proxy


async def proxied(rule: Rule, sent: bytes, num_expected: int) -> bytes:
    """What comes back of ``sent`` from an echo behind a proxy, until it is cut or all of it came."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = TcpProxy("127.0.0.1", server.sockets[0].getsockname()[1])
    await proxy.start()
    proxy.rule = rule
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


def test_the_proxy_passes_all_on_and_cuts_swallows_or_changes_as_it_is_told() -> None:
    sent = bytes(range(256)) * 16
    assert asyncio.run(proxied(Rule(), sent, len(sent))) == sent
    assert len(asyncio.run(proxied(Rule(cut_after_bytes=1000), sent, len(sent)))) <= 1000
    assert asyncio.run(proxied(Rule(is_blackhole=True), sent, len(sent))) == b""
    changed = asyncio.run(proxied(Rule(num_corrupted=1), sent, len(sent)))
    assert sum(a != b for a, b in zip(changed, sent, strict=True)) == 1


# ---------------------------------------------------------------------------------------------------------------
# Real servers


@pytest.mark.parametrize("seed", range(2))
def test_real_servers_that_are_killed_stopped_and_cut_off_are_reported_truly(seed: int, ground: Ground) -> None:
    palette = Palette(dict(ground.template.named_parameters()), seed)
    assert run_process_schedule(seed, ground.directory / "checkpoint", palette, ground.fleet) == []
