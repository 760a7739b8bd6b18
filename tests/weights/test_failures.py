"""Servers that die or hang at every stage of a publish: it ends in time, and its report is true."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.errors import (
    ConfigError,
    ProtocolError,
    PublishError,
    TransferError,
    UnreachableError,
    UpdateRefusedError,
)
from inflight.http.client import HttpEndpoint
from inflight.types import EndpointOutcome, PublishReport
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.files import DirectorySender
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import BucketTransfer, EndpointState, ProcessGroupSpec, UpdateRef, WeightUpdate, WeightVersion
from tests.gates import NEVER_S, SOON_S, reserved_port, until
from tests.selection import first_of_each
from tests.servers import TOKEN, ServerProcess
from tests.threads import wait_for_call
from tests.weights.workers import (
    PlainWorker,
    announcement_of,
    ask,
    assert_serves,
    checkpoint,
    generate,
    logprobs,
    request,
    silenced,
    wait_until_ready,
    weight_version,
)

BUCKET_BYTES = 21_000_000  # the large model travels in three buckets
LAST_BUCKET = 2
DEADLINE_S = 5.0
"""Of publishes to a server that hangs: the others do their part meanwhile, on a machine that does other work too."""
STAGES = ("before the publish", "after it accepted", "during a bucket", "before the commit")


class Saboteur(HttpEndpoint):
    """A server over HTTP to which something is done at one stage of an update, as seen from the publisher."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server.url, token=TOKEN)
        self.stage = ""
        self.act: Callable[[], None] = lambda: None

    def strike(self, stage: str) -> None:
        if stage == self.stage:
            self.stage = ""
            self.act()

    async def request_weight_update(self, update: WeightUpdate) -> None:
        self.strike("before the publish")
        await super().request_weight_update(update)
        self.strike("after it accepted")

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        receiving = asyncio.ensure_future(super().receive_weights(bucket))
        try:
            if bucket.bucket_index == 1:
                await asyncio.sleep(0.01)
                self.strike("during a bucket")
            await receiving
        finally:
            receiving.cancel()

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        self.strike("before the commit")
        return await super().commit_weight_update(ref)


@pytest.fixture(scope="module")
def survivor(large_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server to which nothing happens."""
    server = ServerProcess(large_model_dir, tmp_path_factory.mktemp("survivor"))
    server.wait_until_ready()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sleeper(large_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that is stopped and woken up."""
    server = ServerProcess(large_model_dir, tmp_path_factory.mktemp("sleeper"))
    server.wait_until_ready()
    yield server
    server.kill()


def fleet(run_id: str, *servers: ServerProcess, target: int = -1) -> tuple[WeightPublisher, Saboteur]:
    """A publisher to the servers; things can be done to the one at ``target``."""
    saboteur = Saboteur(servers[target])
    endpoints = [saboteur if s is servers[target] else HttpEndpoint(s.url, token=TOKEN) for s in servers]
    return WeightPublisher(endpoints, ProcessGroupSender(), run_id=run_id, connect_timeout_s=20), saboteur


def publish(
    worker: PlainWorker, publisher: WeightPublisher, deadline_s: float = 30.0, without: ServerProcess | None = None
) -> PublishReport:
    """Publish to every server but one."""
    chosen = {e: can for e, can in publisher.endpoints.items() if without is None or e.name != without.url}
    report = publish_weights(worker, publisher, endpoints=chosen, deadline_s=deadline_s, bucket_bytes=BUCKET_BYTES)
    assert worker.num_exhausted == worker.num_started == 1
    return report


def failed(worker: PlainWorker, publisher: WeightPublisher, deadline_s: float) -> PublishReport:
    with pytest.raises(PublishError) as caught:
        publish(worker, publisher, deadline_s)
    assert worker.num_exhausted == worker.num_started == 1
    assert not caught.value.report.applied_everywhere
    return caught.value.report


def assert_only_this_was_lost(
    name: str, outcome: EndpointOutcome, report: PublishReport, stage: str, survivor: ServerProcess
) -> None:
    """A commit that succeeded cannot be taken back; at every earlier stage the survivor serves the old version."""
    applied = stage == "before the commit"
    reports = {endpoint.endpoint: endpoint for endpoint in report.endpoints}
    lost, alive = reports[name], reports[survivor.url]
    assert (alive.outcome, alive.serves) == ((EndpointOutcome.APPLIED, 2) if applied else (EndpointOutcome.ABORTED, 1))
    assert (lost.outcome, lost.serves) == (outcome, None)
    assert lost.detail
    assert_serves(survivor, 2 if applied else 1)


@pytest.mark.parametrize("stage", first_of_each(STAGES, lambda _: "any"))
def test_a_server_killed_at_any_stage_is_reported_and_the_others_go_on(
    stage: str, large_model_dir: Path, survivor: ServerProcess, start_server: Callable[..., ServerProcess]
) -> None:
    victim = start_server(large_model_dir)
    tensors = checkpoint(large_model_dir)
    publisher, saboteur = fleet(f"kill {stage}", victim, survivor, target=0)
    with publisher:
        assert publish(PlainWorker(tensors), publisher).applied_everywhere
        saboteur.stage, saboteur.act = stage, victim.kill
        started = time.monotonic()
        report = failed(PlainWorker(silenced(tensors), version=2), publisher, NEVER_S)
        assert time.monotonic() - started < SOON_S
        assert_only_this_was_lost(victim.url, EndpointOutcome.UNREACHABLE, report, stage, survivor)
        assert "GLHF" not in str(report)

        report = failed(PlainWorker(tensors, version=3), publisher, 20)
        assert [e.outcome for e in report.endpoints] == [EndpointOutcome.UNREACHABLE, EndpointOutcome.ABORTED]
        assert publish(PlainWorker(tensors, version=3), publisher, without=victim).applied_everywhere
        assert_serves(survivor, 3)


@pytest.mark.parametrize("stage", first_of_each(STAGES, lambda _: "any"))
def test_a_server_that_hangs_at_any_stage_is_reported_in_time_and_the_others_go_on(
    stage: str, large_model_dir: Path, survivor: ServerProcess, sleeper: ServerProcess
) -> None:
    tensors = checkpoint(large_model_dir)
    publisher, saboteur = fleet(f"hang {stage}", survivor, sleeper)
    with publisher:
        assert publish(PlainWorker(tensors), publisher).applied_everywhere
        saboteur.stage, saboteur.act = stage, sleeper.stop_in_place
        started = time.monotonic()
        try:
            report = failed(PlainWorker(silenced(tensors), version=2), publisher, DEADLINE_S)
            assert time.monotonic() - started < SOON_S
            assert_only_this_was_lost(sleeper.url, EndpointOutcome.TIMED_OUT, report, stage, survivor)
            assert publish(PlainWorker(tensors, version=3), publisher, without=sleeper).applied_everywhere
            assert_serves(survivor, 3)
        finally:
            sleeper.go_on()
        # What reached it while it slept is answered now; at the latest its lease ends. It is never torn.
        wait_until_ready(sleeper)
        assert weight_version(sleeper).version in (1, 2)
        assert generate(sleeper).completions[0].finish_reason == "length"


def test_a_group_that_a_hanging_server_never_joins_is_given_up_in_time(
    large_model_dir: Path, survivor: ServerProcess, sleeper: ServerProcess
) -> None:
    tensors = checkpoint(large_model_dir)
    publisher, _ = fleet("never joins", survivor, sleeper)
    with publisher:
        publish(PlainWorker(tensors), publisher)
        publisher.group.lose()
        sleeper.stop_in_place()
        try:
            started = time.monotonic()
            report = failed(PlainWorker(tensors, version=2), publisher, DEADLINE_S)
            assert time.monotonic() - started < SOON_S
            assert [(e.outcome, e.serves) for e in report.endpoints] == [
                (EndpointOutcome.ABORTED, 1),
                (EndpointOutcome.TIMED_OUT, None),
            ]
            assert_serves(survivor, 1)
        finally:
            sleeper.go_on()
        wait_until_ready(sleeper)
        assert publish(PlainWorker(tensors, version=2), publisher).applied_everywhere


def test_a_group_whose_trainer_never_comes_fails_in_time_and_the_server_serves_on(sleeper: ServerProcess) -> None:
    spec = ProcessGroupSpec(
        run_id="absent",
        transport="gloo",
        group_name="absent",
        master_address="127.0.0.1",
        master_port=reserved_port(),
        secret="0" * 64,
        rank=1,
        world_size=2,
        timeout_s=1.0,
    )
    started = time.monotonic()
    with pytest.raises(TransferError, match="store"):
        ask(sleeper.url, lambda e: e.init_process_group(spec))
    assert time.monotonic() - started < SOON_S
    assert generate(sleeper).completions[0].finish_reason == "length"


def test_a_sender_that_gives_a_group_up_ends_every_join_at_once() -> None:
    sender = ProcessGroupSender()
    sender.specs("run", [1], NEVER_S)
    ended: list[BaseException] = []

    def join() -> None:
        try:
            sender.join()
        except TransferError as error:
            ended.append(error)

    joining = threading.Thread(target=join)
    joining.start()
    wait_for_call(joining, ProcessGroupSender.join)
    sender.abort()
    joining.join(SOON_S)
    assert len(ended) == 1


class Refuser(HttpEndpoint):
    """Refuses to join any group."""

    async def init_process_group(self, spec: ProcessGroupSpec) -> None:
        raise ConfigError("this one does not join")


def test_a_refusal_to_join_ends_the_others_joins_at_once(survivor: ServerProcess, sleeper: ServerProcess) -> None:
    endpoints = [HttpEndpoint(survivor.url, token=TOKEN), Refuser(sleeper.url, token=TOKEN)]
    publisher = WeightPublisher(endpoints, ProcessGroupSender(), run_id="refused", connect_timeout_s=NEVER_S)
    started = time.monotonic()
    with pytest.raises(ConfigError, match="does not join"), publisher:
        pass
    assert time.monotonic() - started < SOON_S
    second, _ = fleet("after the refusal", survivor, sleeper)
    with second:
        assert [endpoint.name for endpoint in second.endpoints] == [survivor.url, sleeper.url]


def test_the_error_of_a_group_that_none_could_join_names_what_failed_on_each(
    survivor: ServerProcess, sleeper: ServerProcess, tmp_path: Path
) -> None:
    endpoints = [Refuser(survivor.url, token=TOKEN), Refuser(sleeper.url, token=TOKEN)]
    publisher = WeightPublisher(endpoints, DirectorySender(tmp_path), run_id="refused", connect_timeout_s=30)
    with pytest.raises(ConfigError, match="does not join") as caught, publisher:
        pass
    assert caught.value.__notes__ == ["also failed: ConfigError: this one does not join"]


def test_a_publisher_that_lost_all_its_servers_says_so(
    model_dir: Path, start_server: Callable[..., ServerProcess]
) -> None:
    server = start_server(model_dir)
    tensors = checkpoint(model_dir)
    publisher, _ = fleet("all lost", server)
    with publisher:
        publish(PlainWorker(tensors), publisher)
        server.kill()
        for _ in range(2):
            report = failed(PlainWorker(tensors, version=2), publisher, 10)
            assert [(e.outcome, e.serves) for e in report.endpoints] == [(EndpointOutcome.UNREACHABLE, None)]
        with pytest.raises(UnreachableError):
            publisher.run(publisher.group.form, publisher.endpoints, publisher.incarnation, 10.0, 1)
        with pytest.raises(ConfigError, match="no endpoint is left"):
            publish(PlainWorker(tensors, version=2), publisher, without=server)


def test_a_receive_that_ends_late_does_not_touch_the_group_formed_meanwhile(
    large_model_dir: Path, survivor: ServerProcess
) -> None:
    """The receive of a given-up update is left behind in a thread; when it times out, a new group is in use."""
    tensors = checkpoint(large_model_dir)
    first, _ = fleet("late", survivor)
    with first:
        publish(PlainWorker(tensors), first)
        worker = PlainWorker(tensors, version=2)
        update = announcement_of(worker, first.run_id, bucket_bytes=BUCKET_BYTES)
        transfer = BucketTransfer(run_id=first.run_id, version=2, bucket_index=0, timeout_s=5.0)

        async def conversation(endpoint: HttpEndpoint) -> None:
            await endpoint.request_weight_update(update)
            late = asyncio.ensure_future(endpoint.receive_weights(transfer))  # and nobody sends

            async def receives() -> bool:
                return (await endpoint.weight_version()).state is EndpointState.UPDATING

            await until(receives, "the receive does not begin")
            with pytest.raises(UpdateRefusedError, match="still being received"):
                await endpoint.receive_weights(transfer)
            await endpoint.abort_weight_update(update.ref)
            await endpoint.generate(request())
            second = ProcessGroupSender()
            (spec,) = second.specs("late", [1], 10)
            spec = spec.model_copy(update={"incarnation": first.incarnation})
            await asyncio.gather(endpoint.init_process_group(spec), asyncio.to_thread(second.join))
            with pytest.raises(TransferError):
                await late
            await endpoint.request_weight_update(update)  # the new group is still owned
            await endpoint.abort_weight_update(update.ref)
            second.abort()

        ask(survivor.url, conversation)
    assert_serves(survivor, 1)


def test_the_fingerprint_of_the_survivor_is_that_of_the_old_weights(
    large_model_dir: Path, survivor: ServerProcess, sleeper: ServerProcess
) -> None:
    """Not only the version reports it: the very weights are the old ones after a publish that failed on the way."""
    tensors = checkpoint(large_model_dir)
    publisher, saboteur = fleet("fingerprint", survivor, sleeper)
    with publisher:
        publish(PlainWorker(tensors), publisher)
        before = logprobs(survivor)
        saboteur.stage = "during a bucket"

        def gone() -> None:
            raise ProtocolError("pulled out", sleeper.url)

        saboteur.act = gone
        report = failed(PlainWorker(silenced(tensors), version=2), publisher, 20)
        assert [(e.outcome, e.serves) for e in report.endpoints] == [(EndpointOutcome.ABORTED, 1)] * 2
        assert logprobs(survivor) == before == logprobs(sleeper)
        assert publish(PlainWorker(silenced(tensors), version=2), publisher).applied_everywhere
        assert logprobs(survivor) == logprobs(sleeper) != before
