"""Publishing to real servers: what a success reports, and what every refusal leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inflight.errors import (
    ConfigError,
    PublishError,
    TrainerError,
    UnauthorizedError,
    UnreachableError,
    UpdateRefusedError,
)
from inflight.http.client import HttpEndpoint
from inflight.types import EndpointOutcome, PublishReport
from inflight.weights.encode.buckets import plan_buckets
from inflight.weights.send import endpoint_update
from inflight.weights.send.gathering import gather_only
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports.process_group import ProcessGroupSender
from inflight.wire import (
    EndpointState,
    GenerateResponse,
    InFlightPolicy,
    UpdateRef,
    WeightUpdate,
    WeightVersion,
)
from tests.gates import NEVER_S, SOON_S, BrakedServer, until, wait_until
from tests.servers import TOKEN
from tests.weights.workers import (
    PlainWorker,
    announcement_of,
    ask,
    assert_serves,
    checkpoint,
    generate,
    logprobs,
    request,
    scaled,
    silenced,
    weight_version,
)

Connect = Callable[..., WeightPublisher]
Servers = tuple[BrakedServer, BrakedServer]


def publish(worker: PlainWorker, publisher: WeightPublisher, **options: Any) -> PublishReport:
    report = publish_weights(worker, publisher, deadline_s=options.pop("deadline_s", 20), **options)
    assert report is not None
    return report


def refused(worker: PlainWorker, publisher: WeightPublisher, **options: Any) -> PublishReport:
    with pytest.raises(PublishError) as caught:
        publish(worker, publisher, **options)
    assert worker.num_exhausted == worker.num_started == 1
    assert not caught.value.report.applied_everywhere
    return caught.value.report


def start_request(server: BrakedServer, *, max_tokens: int = 700) -> Future[GenerateResponse]:
    """A request that runs while the test continues; returns once it is being sampled.

    Unless the brake is on, the request may have ended a moment later.
    """
    future: Future[GenerateResponse] = Future()

    def run() -> None:
        try:
            future.set_result(ask(server.url, lambda e: e.generate(request(uuid.uuid4().hex, max_tokens=max_tokens))))
        except BaseException as error:
            future.set_exception(error)

    with contextlib.nullcontext() if server.brake.is_on else server.brake:
        threading.Thread(target=run, daemon=True).start()
        wait_until(lambda: weight_version(server).num_running, "the request does not run")
    return future


def test_a_publish_reports_every_endpoint_and_where_the_time_went(
    two_servers: Servers, model_dir: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_update, "_FIRST_TOKEN_WAIT_S", SOON_S)  # a braked server takes more than milliseconds
    worker = PlainWorker(silenced(checkpoint(model_dir)))
    publisher = connect(*two_servers)
    with two_servers[0].brake:
        running = start_request(two_servers[0])
        two_servers[0].brake.wait_for_forwards(2)
        report = publish(worker, publisher)
    assert report.applied_everywhere
    assert (report.run_id, report.version) == (publisher.run_id, 1)
    assert report.size_bytes == sum(tensor.nbytes for tensor in worker.tensors.values())
    assert [(e.endpoint, e.outcome, e.serves) for e in report.endpoints] == [
        (server.url, EndpointOutcome.APPLIED, 1) for server in two_servers
    ]
    spans = report.spans
    assert 0 < spans.gather_s < spans.total_s
    assert 0 < spans.wire_s < spans.total_s
    assert 0 < spans.pause_s < spans.total_s - spans.wire_s  # what arrives is staged while sampling continues
    assert 0 < spans.load_s < spans.pause_s
    assert spans.first_token_s is not None
    assert 0 < spans.first_token_s < 5
    for endpoint in report.endpoints:
        assert endpoint.timings is not None
        assert endpoint.timings.load_s <= endpoint.timings.paused_s <= spans.pause_s
    completion = running.result(SOON_S).completions[0]
    assert [span.version for span in completion.version_spans] == [0, 1]
    for server in two_servers:
        assert_serves(server, 1)
        assert logprobs(server) == pytest.approx([-math.log(258)] * 6, abs=1e-6)


def test_several_buckets_bring_the_same_weights_as_one(two_servers: Servers, model_dir: Path, connect: Connect) -> None:
    tensors = scaled(checkpoint(model_dir), 0.7)
    one, several = two_servers
    publish(PlainWorker(tensors), connect(one))
    worker = PlainWorker(tensors)
    assert len(plan_buckets(worker.parameter_specs(), 5000)) > 5
    publish(worker, connect(several), bucket_bytes=5000)
    assert logprobs(one) == logprobs(several)
    publish(PlainWorker(silenced(tensors)), connect(several), bucket_bytes=1)
    assert logprobs(several) == pytest.approx([-math.log(258)] * 6, abs=1e-6)


def test_the_order_of_the_tensors_is_the_workers_own(two_servers: Servers, model_dir: Path, connect: Connect) -> None:
    tensors = checkpoint(model_dir)
    publisher = connect(*two_servers)
    publish(PlainWorker(tensors), publisher)
    expected = logprobs(two_servers[0])
    publish(PlainWorker(scaled(tensors, 0.5), version=2), publisher)
    assert logprobs(two_servers[0]) != expected
    publish(PlainWorker(dict(reversed(tensors.items())), version=3), publisher, bucket_bytes=10_000)
    assert logprobs(two_servers[0]) == expected


@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_every_policy_publishes_while_a_request_runs(
    policy: str, two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    server = two_servers[0]
    publisher = connect(server)
    publish(PlainWorker(checkpoint(model_dir)), publisher)
    with server.brake, ThreadPoolExecutor(1) as others:
        running = start_request(server, max_tokens=300)
        server.brake.wait_for_forwards(2)
        if policy == "drain":  # once it has begun, the request may end
            others.submit(wait_until, lambda: weight_version(server).updating_to == 2).add_done_callback(
                lambda _: server.brake.release()
            )
        report = publish(PlainWorker(silenced(checkpoint(model_dir)), version=2), publisher, in_flight=policy)
    assert report.applied_everywhere
    completion = running.result(SOON_S).completions[0]
    versions = [span.version for span in completion.version_spans]
    if policy in ("keep", "recompute"):
        assert versions == [1, 2]
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 300)
        first_new = completion.version_spans[1].start
        assert completion.logprobs[first_new:] == pytest.approx([-math.log(258)] * (300 - first_new), abs=1e-6)
    else:
        assert versions == [1]
        assert completion.finish_reason == ("length" if policy == "drain" else "abort")


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors.items() if n != name}


NORM = "model.norm.weight"
MISFITS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "shape": (lambda t: {**t, NORM: torch.ones(33)}, r"model.norm.weight is \(33,\), expected \(32,\)"),
    "missing": (lambda t: without(t, NORM), "missing tensors: .*model.norm.weight"),
    "extra": (lambda t: {**t, "model.bias": torch.ones(3)}, "tensors unknown to this endpoint: .*model.bias"),
    "dtype": (lambda t: {**t, NORM: t[NORM].bfloat16()}, "model.norm.weight is bfloat16, expected float32"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(
    misfit: str, two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    change, reason = MISFITS[misfit]
    tensors = checkpoint(model_dir)
    publisher = connect(*two_servers)
    publish(PlainWorker(tensors, version=3), publisher)
    before = logprobs(two_servers[0])
    running = start_request(two_servers[0], max_tokens=200)
    worker = PlainWorker(change(silenced(tensors)), version=4)
    report = refused(worker, publisher, bucket_bytes=10_000)
    for endpoint in report.endpoints:
        assert (endpoint.outcome, endpoint.serves) == (EndpointOutcome.REFUSED, 3)
        assert re.search(reason, endpoint.detail), endpoint.detail
    assert report.spans.wire_s == 0
    completion = running.result(SOON_S).completions[0]
    assert (completion.finish_reason, [s.version for s in completion.version_spans]) == ("length", [3])
    assert logprobs(two_servers[0]) == before
    for server in two_servers:
        assert_serves(server, 3)
    assert publish(PlainWorker(tensors, version=4), publisher).applied_everywhere


def test_an_older_version_is_refused_and_the_present_one_may_be_published_again(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    tensors = checkpoint(model_dir)
    publisher = connect(*two_servers)
    publish(PlainWorker(tensors, version=5), publisher)
    report = refused(PlainWorker(silenced(tensors), version=4), publisher)
    assert {(e.outcome, e.serves) for e in report.endpoints} == {(EndpointOutcome.REFUSED, 5)}
    assert "version 5 of this run is already served" in report.endpoints[0].detail
    assert_serves(two_servers[1], 5)
    publish(PlainWorker(silenced(tensors), version=5), publisher)
    assert logprobs(two_servers[1]) == pytest.approx([-math.log(258)] * 6, abs=1e-6)


def announcement(tensors: dict[str, torch.Tensor], run_id: str, version: int, **changes: Any) -> WeightUpdate:
    return announcement_of(PlainWorker(tensors, version=version), run_id, **changes)


def test_a_run_that_does_not_own_the_group_is_refused(two_servers: Servers, model_dir: Path, connect: Connect) -> None:
    tensors = checkpoint(model_dir)
    publisher = connect(two_servers[0])
    publish(PlainWorker(tensors), publisher)
    with pytest.raises(UpdateRefusedError, match="does not own the weight group"):
        ask(two_servers[0].url, lambda e: e.request_weight_update(announcement(tensors, "stranger", 9)))
    assert_serves(two_servers[0], 1)


def test_a_run_that_returns_after_another_one_takes_the_next_incarnation(two_servers: Servers, model_dir: Path) -> None:
    server, tensors = two_servers[0], checkpoint(model_dir)
    run, other = uuid.uuid4().hex, uuid.uuid4().hex
    incarnations = []
    for version, run_id in enumerate((run, run, other, run, other, run), start=1):
        with WeightPublisher.connect([server.url], run_id=run_id, token=TOKEN) as publisher:
            publish(PlainWorker(tensors, version=version), publisher)
            incarnations.append(publisher.incarnation)
    assert incarnations == [1, 2, 1, 3, 2, 4]


def test_a_second_update_is_refused_while_one_is_open_and_does_not_disturb_it(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    server = two_servers[0]
    tensors = checkpoint(model_dir)
    publisher = connect(server)
    publish(PlainWorker(tensors), publisher)
    (endpoint,) = publisher.endpoints
    publisher.run(endpoint.request_weight_update, announcement(tensors, publisher.run_id, 2))
    for version in (2, 3):
        with pytest.raises(UpdateRefusedError, match="version 2 is still open"):
            ask(
                server.url,
                lambda e, v=version: e.request_weight_update(announcement(tensors, publisher.run_id, v)),
            )
    report = refused(PlainWorker(tensors, version=3), publisher)
    assert [(e.outcome, e.serves) for e in report.endpoints] == [(EndpointOutcome.REFUSED, 1)]
    assert weight_version(server).updating_to == 2
    ask(server.url, lambda e: e.abort_weight_update(UpdateRef(run_id=publisher.run_id, version=2)))
    assert publish(PlainWorker(tensors, version=3), publisher).applied_everywhere


def test_aborting_is_idempotent_and_refused_for_an_update_that_is_not_open(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    server = two_servers[0]
    publisher = connect(server)
    publish(PlainWorker(checkpoint(model_dir)), publisher)
    update = announcement(checkpoint(model_dir), publisher.run_id, 2)

    async def conversation(endpoint: Any) -> list[WeightVersion]:
        nothing_open = await endpoint.abort_weight_update(update.ref)
        await endpoint.request_weight_update(update)
        for wrong in (UpdateRef(run_id=update.run_id, version=3), UpdateRef(run_id="stranger", version=2)):
            with pytest.raises(UpdateRefusedError, match="the open update is version 2"):
                await endpoint.abort_weight_update(wrong)
        paused = await endpoint.weight_version()
        once, twice = [await endpoint.abort_weight_update(update.ref) for _ in range(2)]
        return [nothing_open, paused, once, twice]

    answers = ask(server.url, conversation)
    assert [a.state for a in answers] == [EndpointState.READY, EndpointState.PAUSED, *[EndpointState.READY] * 2]
    assert {a.version for a in answers} == {1}
    assert_serves(server, 1)


def test_a_group_formed_during_an_open_update_ends_it(two_servers: Servers, model_dir: Path, connect: Connect) -> None:
    server = two_servers[0]
    tensors = checkpoint(model_dir)
    first = connect(server)
    publish(PlainWorker(tensors), first)
    (endpoint,) = first.endpoints
    first.run(endpoint.request_weight_update, announcement(tensors, first.run_id, 2))
    second = connect(server)
    assert_serves(server, 1)
    publish(PlainWorker(silenced(tensors), version=1), second)
    assert weight_version(server).run_id == second.run_id
    report = refused(PlainWorker(tensors, version=3), first)
    assert [(e.outcome, e.serves) for e in report.endpoints] == [(EndpointOutcome.REFUSED, 1)]
    assert "does not own the weight group" in report.endpoints[0].detail


def test_a_drain_that_cannot_end_in_time_is_refused_and_the_requests_go_on(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    server = two_servers[0]
    publisher = connect(*two_servers)
    publish(PlainWorker(checkpoint(model_dir)), publisher)
    server.brake.put_on()
    running = start_request(server, max_tokens=1000)
    started = time.monotonic()
    report = refused(
        PlainWorker(silenced(checkpoint(model_dir)), version=2), publisher, in_flight="drain", deadline_s=0.4
    )
    server.brake.release()
    assert time.monotonic() - started < SOON_S
    assert [(e.outcome, e.serves) for e in report.endpoints] == [
        (EndpointOutcome.REFUSED, 1),
        (EndpointOutcome.ABORTED, 1),
    ]
    assert "1 requests were still running" in report.endpoints[0].detail
    completion = running.result(SOON_S).completions[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 1000)
    assert [span.version for span in completion.version_spans] == [1]
    assert_serves(two_servers[1], 1)


def test_an_aborted_drain_ends_the_request_that_waits_for_it_and_no_later_update(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    server = two_servers[0]
    tensors = checkpoint(model_dir)
    publisher = connect(server)
    publish(PlainWorker(tensors), publisher)
    server.brake.put_on()
    running = start_request(server, max_tokens=1000)
    drain = announcement(tensors, publisher.run_id, 2, in_flight="drain", deadline_s=2.0)
    later = announcement(tensors, publisher.run_id, 3)

    async def conversation(endpoint: Any) -> WeightVersion:
        waiting = asyncio.ensure_future(endpoint.request_weight_update(drain))

        async def drains() -> bool:
            return (await endpoint.weight_version()).updating_to == 2

        await until(drains, "the drain does not begin")
        await endpoint.abort_weight_update(drain.ref)
        await endpoint.request_weight_update(later)
        await asyncio.sleep(2.2)  # past the drain's own deadline
        with pytest.raises(Exception, match="was ended before sampling was paused"):
            await waiting
        version = await endpoint.weight_version()
        await endpoint.abort_weight_update(later.ref)
        return version

    paused = ask(server.url, conversation)
    server.brake.release()
    assert (paused.state, paused.updating_to) == (EndpointState.PAUSED, 3)
    assert running.result(SOON_S).completions[0].finish_reason == "length"


def test_what_cannot_be_published_is_refused_before_endpoints_are_asked(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    tensors = checkpoint(model_dir)
    publisher = connect(two_servers[0])
    publish(PlainWorker(tensors), publisher)
    for wrong, problem in (
        (torch.nn.Linear(1, 1), r"needs a WeightSource, not Linear: pass ModuleWeights\(model\)"),
        (tensors, "needs a WeightSource, not dict"),
        (PlainWorker(tensors, version=-1), "version.* -1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            publish(wrong, publisher)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="run_id is empty"):
        WeightPublisher.connect([two_servers[0].url], run_id="", token=TOKEN)
    assert_serves(two_servers[0], 1)


def test_a_publish_during_another_one_is_refused_and_does_not_disturb_it(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    tensors = checkpoint(model_dir)
    publisher = connect(two_servers[0])
    is_gathering, may_gather = threading.Event(), threading.Event()

    def hold(index: int) -> None:
        if index == 1:  # the first bucket has been sent
            is_gathering.set()
            assert may_gather.wait(SOON_S)

    with ThreadPoolExecutor(1) as thread:
        worker = PlainWorker(tensors, version=2, on_bucket=hold)
        first = thread.submit(publish, worker, publisher, bucket_bytes=1000, deadline_s=SOON_S)
        assert is_gathering.wait(SOON_S)
        with pytest.raises(ConfigError, match="publish from one thread at a time"):
            publish(PlainWorker(tensors, version=3), publisher)
        may_gather.set()
        assert first.result(SOON_S).applied_everywhere
    publish(PlainWorker(tensors, version=3), publisher)
    assert_serves(two_servers[0], 3)


def test_a_process_that_does_not_close_its_publisher_ends_silently(two_servers: Servers) -> None:
    program = (
        "from inflight import WeightPublisher\n"
        f"publisher = WeightPublisher.connect([{two_servers[0].url!r}], run_id='unclosed', token={TOKEN!r})\n"
        "publisher.start(lambda: __import__('asyncio').sleep(3600))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON_S)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_closing_a_publisher_cancels_the_calls_that_are_running(two_servers: Servers, connect: Connect) -> None:
    publisher = connect(two_servers[0])
    pending = publisher.start(asyncio.sleep, SOON_S)
    publisher.close()
    assert pending.cancelled()
    with pytest.raises(ConfigError, match="is not connected"):
        publisher.start(asyncio.sleep, 0)


@pytest.mark.parametrize("initialised", [False, True])
def test_torchs_default_process_group_is_left_alone(
    initialised: bool, two_servers: Servers, model_dir: Path, connect: Connect, tmp_path: Path
) -> None:
    if initialised:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        default = dist.group.WORLD
        publisher = connect(two_servers[0])
        publish(PlainWorker(checkpoint(model_dir)), publisher)
        publisher.close()
        assert dist.is_initialized() is initialised
        assert dist.group.WORLD is default
        if initialised:
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 1
    finally:
        if initialised:
            dist.destroy_process_group()


def test_a_wrong_token_is_unauthorized_and_leaves_nothing_behind(two_servers: Servers) -> None:
    before = threading.active_count()
    with pytest.raises(UnauthorizedError):
        WeightPublisher.connect([two_servers[0].url], run_id="run", token="wrong", connect_timeout_s=2)
    # A join that was abandoned while it connected to the store retries, for up to twice its own timeout.
    wait_until(lambda: threading.active_count() <= before, "a thread is left")


def test_an_unreachable_server_is_named(two_servers: Servers) -> None:
    started = time.monotonic()
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"):
        WeightPublisher.connect(
            [two_servers[0].url, "http://127.0.0.1:9"], run_id="run", token=TOKEN, connect_timeout_s=NEVER_S
        )
    assert time.monotonic() - started < SOON_S


def test_a_server_named_twice_is_a_mistake(two_servers: Servers) -> None:
    with pytest.raises(ConfigError, match="listed twice"):
        WeightPublisher.connect([two_servers[0].url] * 2, run_id="run", token=TOKEN)


def test_a_url_in_place_of_a_list_of_urls_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"not a list of URLs: pass \['http://127\.0\.0\.1:8000'\]"):
        WeightPublisher.connect("http://127.0.0.1:8000", run_id="run")


def test_user_mistakes_ask_nothing_of_the_servers(two_servers: Servers, model_dir: Path, connect: Connect) -> None:
    publisher = connect(two_servers[0])
    publish(PlainWorker(checkpoint(model_dir)), publisher)
    for options in ({"in_flight": "sometimes"}, {"deadline_s": 0}):
        worker = PlainWorker(checkpoint(model_dir), version=2)
        with pytest.raises(ConfigError):
            publish(worker, publisher, **options)
        assert worker.num_exhausted == worker.num_started == 1
    worker = PlainWorker(checkpoint(model_dir), version=2)
    worker.rank = 1
    with pytest.raises(ConfigError, match=r"for rank 0; rank 1 calls gather_only"):
        publish_weights(worker, publisher)
    assert worker.num_exhausted == 1
    assert_serves(two_servers[0], 1)


def test_a_publisher_that_is_not_connected_says_so(model_dir: Path) -> None:
    publisher = WeightPublisher([HttpEndpoint("http://127.0.0.1:9")], ProcessGroupSender(), run_id="run")
    worker = PlainWorker(checkpoint(model_dir))
    with pytest.raises(ConfigError, match="not connected"):
        publish_weights(worker, publisher)
    assert worker.num_exhausted == worker.num_started == 1


def test_ranks_other_than_zero_only_gather(model_dir: Path) -> None:
    worker = PlainWorker(checkpoint(model_dir))
    worker.rank = 1
    gather_only(worker)
    assert worker.num_exhausted == worker.num_started == 1


def raise_at(index: int) -> Callable[[int], None]:
    def on_bucket(i: int) -> None:
        if i == index:
            raise TrainerError(f"no bucket {i}")

    return on_bucket


@pytest.mark.parametrize("index", [0, 1, 5])
def test_an_error_of_the_worker_reaches_the_caller_and_no_server_stays_paused(
    index: int, two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    publisher = connect(*two_servers)
    publish(PlainWorker(checkpoint(model_dir)), publisher)
    worker = PlainWorker(silenced(checkpoint(model_dir)), version=2, on_bucket=raise_at(index))
    with pytest.raises(TrainerError, match=f"no bucket {index}"):
        publish(worker, publisher, bucket_bytes=10_000)
    assert worker.num_exhausted == worker.num_started == 1
    for server in two_servers:
        assert_serves(server, 1)
    assert publish(PlainWorker(checkpoint(model_dir), version=2), publisher).applied_everywhere


class LyingWorker(PlainWorker):
    """Announces one dtype and yields another."""

    def parameter_specs(self) -> Any:
        return [spec.model_copy(update={"dtype": "float32"}) for spec in super().parameter_specs()]


def test_a_worker_that_yields_other_tensors_than_it_announced_is_found_out_before_anything_is_paused(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    publisher = connect(two_servers[0])
    publish(PlainWorker(checkpoint(model_dir)), publisher)
    tensors = checkpoint(model_dir)
    worker = LyingWorker({**tensors, NORM: tensors[NORM].bfloat16()}, version=2)
    with pytest.raises(TrainerError, match="announced"):
        publish(worker, publisher)
    assert_serves(two_servers[0], 1)


def resources(pid: int | str) -> tuple[int, int]:
    """Threads and open files of a process."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.exhaustive
def test_neither_side_gathers_threads_or_files_over_many_publishes_and_groups(
    two_servers: Servers, model_dir: Path, connect: Connect
) -> None:
    server = two_servers[0]
    publisher = connect(server)
    worker = PlainWorker(checkpoint(model_dir))
    pids = ("self", server.pid)
    for _ in range(5):
        publish(worker, publisher)
    start = [resources(pid) for pid in pids]
    for worker.version in range(1, 201):
        publish(worker, publisher, bucket_bytes=40_000)
    for _ in range(20):
        publisher.group.lose()
        publish(worker, publisher)
    for pid, (threads, files) in zip(pids, start, strict=True):
        now = resources(pid)
        assert now[0] <= threads + 2
        assert now[1] <= files + 3
    assert generate(server).completions[0].finish_reason == "length"
