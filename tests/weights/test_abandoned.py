"""Publishers that die or are interrupted, and weights that are torn while they are applied."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.slot_attention import ATTENTION_NAME, register_slot_attention
from inflight.errors import PoisonedError, PublishError, UnreachableError, UpdateRefusedError
from inflight.model.checkpoints import load_causal_lm
from inflight.types import EndpointOutcome
from inflight.weights.receive import receiver
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import BucketTransfer, EndpointState, GenerateResponse, UpdateRef
from tests.gates import NEVER_S, SOON_S, BrakedServer, until, wait_until
from tests.selection import first_of_each
from tests.servers import ServerProcess
from tests.weights.test_publish import start_request
from tests.weights.workers import (
    PlainWorker,
    announcement_of,
    assert_serves,
    checkpoint,
    request,
    silenced,
    wait_until_ready,
    weight_version,
)
from tests.zygote import python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(large_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrakedServer]:
    server = BrakedServer(large_model_dir, tmp_path_factory.mktemp("server"))
    server.wait_until_ready()
    yield server
    server.kill()


def start_publisher(server: ServerProcess, model: Path, way: str) -> subprocess.Popen[str]:
    command = [python(), "-m", "tests.weights.publisher_program", server.url, str(model), way]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_server_whose_publisher_was_killed_resumes_by_itself_when_the_lease_ends(
    server: BrakedServer, large_model_dir: Path
) -> None:
    server.brake.put_on()
    running = start_request(server, max_tokens=100)
    with start_publisher(server, large_model_dir, "paused") as publisher:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "paused\n"
        assert weight_version(server).state is EndpointState.PAUSED
        publisher.kill()
        publisher.wait(timeout=10)
        assert weight_version(server).state is EndpointState.PAUSED
    server.brake.release()
    wait_until_ready(server)
    completion = running.result(SOON_S).completions[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 100)
    assert_serves(server, 1)


@pytest.mark.exhaustive
def test_a_server_whose_publisher_was_killed_in_the_middle_of_a_bucket_resumes_by_itself_at_once(
    server: BrakedServer, large_model_dir: Path
) -> None:
    running = start_request(server, max_tokens=1000)
    with start_publisher(server, large_model_dir, "sending") as publisher:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "sending\n"
        assert weight_version(server).state is EndpointState.UPDATING
        publisher.kill()
        publisher.wait(timeout=10)
    wait_until_ready(server)
    completion = running.result(SOON_S).completions[0]
    assert completion.finish_reason == "length"
    assert 2 not in [span.version for span in completion.version_spans]
    assert_serves(server, 1)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own answer to SIGINT, also where the tests were started with it ignored, as by a shell's ``&``."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_soon() -> None:
    threading.Timer(0.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def interrupt_when_it_drains(server: ServerProcess) -> None:
    wait_until(lambda: weight_version(server).updating_to == 2, "the drain has not begun")
    interrupt_soon()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "moment", first_of_each(["while gathering", "while the requests drain", "while a bucket travels"], lambda _: "any")
)
def test_an_interrupted_publish_holds_no_server_and_the_next_one_succeeds(
    moment: str, server: BrakedServer, large_model_dir: Path, connect: Callable[..., WeightPublisher]
) -> None:
    tensors = checkpoint(large_model_dir)
    publisher = connect(server)
    publish_weights(PlainWorker(tensors), publisher)
    running = start_request(server, max_tokens=400)
    worker, options = PlainWorker(silenced(tensors), version=2), {"bucket_bytes": 21_000_000}
    if moment == "while gathering":

        def on_bucket(index: int) -> None:
            if index == 1:
                interrupt_soon()
                deadline = time.monotonic() + NEVER_S
                while time.monotonic() < deadline:  # a signal that arrives just before a sleep does not end it
                    time.sleep(0.01)

        worker.on_bucket = on_bucket
    elif moment == "while the requests drain":
        options["in_flight"] = "drain"
        server.brake.put_on()
        when_drained = threading.Thread(target=interrupt_when_it_drains, args=(server,))
        when_drained.start()
    else:
        worker.on_bucket = lambda index: interrupt_soon() if index == 3 else None
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        publish_weights(worker, publisher, deadline_s=NEVER_S, **options)
    assert time.monotonic() - started < SOON_S
    server.brake.release()
    assert worker.num_exhausted == worker.num_started == 1
    wait_until_ready(server)
    assert weight_version(server).version == 1
    assert running.result(SOON_S).completions[0].finish_reason == "length"
    report = publish_weights(PlainWorker(tensors, version=3), publisher, deadline_s=20)
    assert report is not None
    assert report.applied_everywhere


class Local:
    """The embedded engine as an endpoint in this process, with the model at hand."""

    def __init__(self, path: Path) -> None:
        register_slot_attention()
        self.tensors = checkpoint(path)
        self.model: Any = load_causal_lm(path, attention=ATTENTION_NAME)
        engine = Engine(self.model, max_model_len=1024, max_concurrent=8)
        self.endpoint = EmbeddedEndpoint(engine, self.model, name="local")
        self.thaw: Callable[[], None] = lambda: None

    def freeze(self) -> None:
        """Let every load fail once its first tensor is in the model; sampling continues."""
        engine: Any = self.endpoint._engine
        load = engine.load

        def failing(ready: Any, *others: Any) -> None:
            load(ready._replace(tensors=ready.tensors[:1]), *others)
            raise RuntimeError("out of memory")

        engine.load, self.thaw = failing, lambda: setattr(engine, "load", load)


@pytest.fixture
def local(model_dir: Path) -> Local:
    return Local(model_dir)


def connected(local: Local) -> WeightPublisher:
    return WeightPublisher([local.endpoint], ProcessGroupSender(), run_id="here", connect_timeout_s=20)


def wait_until_running(publisher: WeightPublisher, local: Local) -> None:
    wait_until(lambda: publisher.run(local.endpoint.weight_version).num_running, "the request does not run")


def test_without_a_group_nothing_is_accepted(local: Local) -> None:
    async def conversation() -> None:
        with pytest.raises(UpdateRefusedError, match="no weight group is formed"):
            await local.endpoint.request_weight_update(announcement_of(PlainWorker(local.tensors), "run"))
        assert (await local.endpoint.weight_version()).state is EndpointState.READY
        await local.endpoint.aclose()

    asyncio.run(conversation())


def test_weights_torn_while_applied_poison_the_endpoint_until_a_complete_update(local: Local) -> None:
    endpoint = local.endpoint
    with connected(local) as publisher:
        publish_weights(PlainWorker(local.tensors), publisher)
        running: Future[GenerateResponse] = publisher.start(endpoint.generate, request("running", max_tokens=1000))
        wait_until_running(publisher, local)
        worker = PlainWorker(silenced(local.tensors), version=2)
        worker.on_bucket = lambda index: local.freeze() if index == 3 else None  # sampling is paused by then
        with pytest.raises(PublishError) as caught:
            publish_weights(worker, publisher, bucket_bytes=30_000, deadline_s=20)
        (report,) = caught.value.report.endpoints
        assert (report.outcome, report.serves) == (EndpointOutcome.POISONED, None)
        assert "applying version 2 failed" in report.detail

        assert running.result(SOON_S).completions[0].finish_reason == "abort"
        assert publisher.run(endpoint.weight_version).state is EndpointState.POISONED
        with pytest.raises(PoisonedError):
            publisher.run(endpoint.generate, request())

        local.thaw()
        broken = PlainWorker({**local.tensors, "more": torch.zeros(1)}, version=3)
        with pytest.raises(PublishError) as caught:
            publish_weights(broken, publisher, deadline_s=20)
        assert caught.value.report.endpoints[0].outcome is EndpointOutcome.POISONED
        with pytest.raises(PoisonedError):
            publisher.run(endpoint.generate, request())

        report_of_all = publish_weights(PlainWorker(silenced(local.tensors), version=3), publisher, deadline_s=20)
        assert report_of_all is not None
        assert report_of_all.applied_everywhere
        completion = publisher.run(endpoint.generate, request()).completions[0]
        assert completion.logprobs == pytest.approx([-math.log(258)] * 6, abs=1e-6)
        assert [span.version for span in completion.version_spans] == [3]


def test_weights_torn_while_applied_are_told_so_even_if_the_requests_cannot_be_ended(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the commit, which failed as if it had got no answer, would be repeated, and be refused."""

    async def no_answer() -> None:
        raise UnreachableError("the connection was closed", "local")

    monkeypatch.setattr(local.endpoint, "fail_requests", no_answer)
    with connected(local) as publisher:
        local.freeze()
        with pytest.raises(PublishError) as caught:
            publish_weights(PlainWorker(local.tensors), publisher, deadline_s=20)
        (report,) = caught.value.report.endpoints
        assert (report.outcome, report.serves) == (EndpointOutcome.POISONED, None)
        assert "applying version 1 failed" in report.detail
        assert "could not be ended either: local: the connection was closed" in report.detail


def test_requests_that_come_while_good_weights_are_applied_wait_and_are_not_refused(local: Local) -> None:
    """And an abort that comes then waits for the commit, which cannot be taken back, and tells the truth."""
    endpoint = local.endpoint
    with connected(local) as publisher:
        publish_weights(PlainWorker(local.tensors), publisher)
        update = announcement_of(PlainWorker(local.tensors, version=2), "here")
        sender = publisher.group.sender

        async def conversation() -> None:
            from inflight.types import WeightBucket
            from inflight.wire import BucketTransfer

            await endpoint.request_weight_update(update)
            for bucket in update.buckets:
                transfer = BucketTransfer(run_id="here", version=2, bucket_index=bucket.index, timeout_s=10)
                part = slice(bucket.start, bucket.stop)
                tensors = tuple(silenced(local.tensors).values())[part]
                filled = WeightBucket(bucket.index, update.manifest.tensors[part], tensors)
                await asyncio.gather(endpoint.receive_weights(transfer), asyncio.to_thread(sender.send, filled, 10.0))
            # The engine is kept busy, so that the commit takes as long as the test wants.
            go_on = threading.Event()
            busy = endpoint._engine.call(lambda: go_on.wait(SOON_S))
            committing = asyncio.ensure_future(endpoint.commit_weight_update(update.ref))
            await asyncio.sleep(0)  # it begins
            with pytest.raises(UpdateRefusedError, match="already being applied"):
                await endpoint.commit_weight_update(update.ref)
            early = asyncio.ensure_future(endpoint.generate(request()))
            aborting = asyncio.ensure_future(endpoint.abort_weight_update(UpdateRef(run_id="here", version=2)))
            await asyncio.sleep(0.1)  # long enough for an abort that does not wait
            assert not aborting.done()
            go_on.set()
            aborted = await aborting
            assert busy.done()
            assert (aborted.state, aborted.version) == (EndpointState.READY, 2)
            assert (await committing).version == 2
            completion = (await early).completions[0]
            assert [span.version for span in completion.version_spans] == [2]
            assert completion.logprobs == pytest.approx([-math.log(258)] * 6, abs=1e-6)

        publisher.run(conversation)


def test_closing_an_endpoint_waits_for_weights_that_are_being_applied(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the caller of the commit has stopped waiting."""
    monkeypatch.setattr(receiver, "_CLOSE_S", 30.0)
    endpoint, updates = local.endpoint, local.endpoint._updates
    with connected(local) as publisher:
        publish_weights(PlainWorker(local.tensors), publisher)
        worker = PlainWorker(silenced(local.tensors), version=2)
        update = announcement_of(worker, "here").model_copy(update={"incarnation": publisher.incarnation})

        async def conversation() -> None:
            from inflight.wire import BucketTransfer

            await endpoint.request_weight_update(update)
            for bucket, filled in zip(update.buckets, worker.gather_weights(update.buckets), strict=True):
                transfer = BucketTransfer(run_id="here", version=2, bucket_index=bucket.index, timeout_s=10)
                sending = asyncio.to_thread(publisher.group.sender.send, filled, 10.0)
                await asyncio.gather(endpoint.receive_weights(transfer), sending)
            release = threading.Event()
            endpoint._engine.call(lambda: release.wait(30))
            committing = asyncio.ensure_future(endpoint.commit_weight_update(update.ref))
            await until(lambda: updates._applying and not updates._applying.done(), "the commit has not begun to apply")
            committing.cancel()
            closing = asyncio.ensure_future(updates.aclose())
            await asyncio.wait([closing], timeout=0.1)
            assert not closing.done()
            release.set()
            await closing
            assert updates.session.version == 2

        publisher.run(conversation)


def test_a_trainer_that_takes_over_while_weights_are_applied_takes_nothing_of_them_away(local: Local) -> None:
    """Else the endpoint would serve the old weights under the new version."""
    endpoint = local.endpoint
    with connected(local) as publisher:
        publish_weights(PlainWorker(local.tensors), publisher)
        successor = ProcessGroupSender()
        (spec,) = successor.specs("here", [1], 10.0)
        spec = spec.model_copy(update={"incarnation": publisher.incarnation + 1})

        async def take_over() -> None:
            served, *_ = await asyncio.gather(
                endpoint.commit_weight_update(UpdateRef(run_id="here", version=2)),  # which begins at once
                endpoint.init_process_group(spec),
                asyncio.to_thread(successor.join),
            )
            assert served.version == 2
            completion = (await endpoint.generate(request())).completions[0]
            assert [span.version for span in completion.version_spans] == [2]
            assert completion.logprobs == pytest.approx([-math.log(258)] * 6, abs=1e-6)

        async def receive() -> None:
            worker = PlainWorker(silenced(local.tensors), version=2)
            update = announcement_of(worker, "here").model_copy(update={"incarnation": publisher.incarnation})
            await endpoint.request_weight_update(update)
            for bucket, filled in zip(update.buckets, worker.gather_weights(update.buckets), strict=True):
                transfer = BucketTransfer(run_id="here", version=2, bucket_index=bucket.index, timeout_s=10)
                sending = asyncio.to_thread(publisher.group.sender.send, filled, 10.0)
                await asyncio.gather(endpoint.receive_weights(transfer), sending)

        publisher.run(receive)
        publisher.run(take_over)
        successor.abort()


def test_a_hold_that_comes_after_its_deadline_is_refused_and_the_engine_goes_on(local: Local) -> None:
    endpoint = local.endpoint
    with connected(local) as publisher:
        publish_weights(PlainWorker(local.tensors), publisher)
        publish_weights(PlainWorker(local.tensors, version=2), publisher)

        async def conversation() -> None:
            update = announcement_of(PlainWorker(local.tensors, version=3), "here", deadline_s=0.2)
            go_on = threading.Event()
            endpoint._engine.call(lambda: go_on.wait(SOON_S))  # a long step: the pause comes too late
            with pytest.raises(UpdateRefusedError, match="still running"):
                await endpoint.request_weight_update(update)
            go_on.set()
            completion = (await endpoint.generate(request())).completions[0]
            assert [span.version for span in completion.version_spans] == [2]

        publisher.run(conversation)
