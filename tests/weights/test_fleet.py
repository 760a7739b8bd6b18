"""The health of a fleet: who is left out, who is asked again, and that nobody is healthy without an applied publish."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ConfigError, FencedError, PublishError
from inflight.http.client import HttpEndpoint
from inflight.types import EndpointOutcome
from inflight.weights.send.endpoint_update import ANSWER_S
from inflight.weights.send.fleet import Fleet, MemberState, StateChange
from inflight.weights.send.publisher import WeightPublisher
from inflight.weights.transports import make_sender
from tests.gates import NEVER_S, SOON_S
from tests.servers import TOKEN, ServerProcess
from tests.weights.workers import PlainWorker, assert_serves, checkpoint, weight_version

Make = Callable[..., Fleet]
Start = Callable[..., ServerProcess]


@pytest.fixture
def make_fleet(connect: Callable[..., WeightPublisher]) -> Iterator[Make]:
    """Make fleets that are closed at the end of the test; ``transport`` and ``run_id`` are the publisher's."""
    fleets: list[Fleet] = []

    def make(*servers: ServerProcess, quorum: int | None = None, **options: Any) -> Fleet:
        fleets.append(Fleet(connect(*servers, **options), quorum=quorum, token=TOKEN))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.fixture
def worker(model_dir: Path) -> PlainWorker:
    return PlainWorker(checkpoint(model_dir), 0)


def publish(fleet: Fleet, worker: PlainWorker, deadline_s: float = 20.0) -> dict[str, EndpointOutcome]:
    """Publish the next version; returns the outcomes."""
    worker.version += 1
    report = fleet.publish(worker, deadline_s=deadline_s)
    return {part.endpoint: part.outcome for part in report.endpoints}


@pytest.mark.parametrize("transport", ["gloo", "http"])
def test_who_dies_is_left_out_and_is_healthy_again_only_with_the_present_version(
    transport: str, make_fleet: Make, start_server: Start, model_dir: Path, worker: PlainWorker
) -> None:
    steady, fickle, late = (start_server(model_dir) for _ in range(3))
    fleet = make_fleet(steady, fickle, transport=transport)
    assert set(fleet.states.values()) == {MemberState.JOINING}
    publish(fleet, worker)
    assert fleet.healthy == (steady.url, fickle.url)

    fickle.kill()
    publish(fleet, worker)
    assert fleet.states == {steady.url: MemberState.HEALTHY, fickle.url: MemberState.DEAD}
    assert fleet.changes == (StateChange(fickle.url, MemberState.HEALTHY, MemberState.DEAD),)
    assert fickle.url in fleet.notes[0]
    assert_serves(steady, 2)

    start_server(model_dir, "--port", fickle.url.rpartition(":")[2])
    fleet.set_members([steady.url, fickle.url, late.url])
    assert fleet.states[late.url] is MemberState.JOINING
    fleet.ask_all()
    publish(fleet, worker)
    assert fleet.healthy == (steady.url, fickle.url, late.url)
    assert StateChange(late.url, None, MemberState.HEALTHY) in fleet.changes
    assert weight_version(fickle).version == weight_version(late).version == 3

    fleet.set_members([fickle.url, late.url])
    publish(fleet, worker)
    assert fleet.healthy == (fickle.url, late.url)
    assert_serves(steady, 3)
    with pytest.raises(ConfigError, match="'nonsense' is not an endpoint"):
        fleet.set_members([steady.url, "nonsense"])
    assert fleet.healthy == (fickle.url, late.url)


def test_who_is_silent_is_a_suspect_and_asked_once_more_before_it_counts_as_dead(
    make_fleet: Make, start_server: Start, model_dir: Path, worker: PlainWorker
) -> None:
    steady, slow = start_server(model_dir), start_server(model_dir)
    fleet = make_fleet(steady, slow)
    publish(fleet, worker)
    slow.stop_in_place()
    publish(fleet, worker, deadline_s=6.0)
    assert fleet.states == {steady.url: MemberState.HEALTHY, slow.url: MemberState.SUSPECT}
    publish(fleet, worker)
    assert fleet.states == {steady.url: MemberState.HEALTHY, slow.url: MemberState.DEAD}
    publish(fleet, worker)  # whether its pause is over or not
    assert fleet.states[slow.url] is MemberState.DEAD
    assert_serves(steady, 4)


@pytest.mark.parametrize("transport", ["gloo", "http"])
def test_a_stopped_server_costs_a_publish_two_seconds_and_comes_back_by_itself(
    transport: str, make_fleet: Make, start_server: Start, model_dir: Path, worker: PlainWorker
) -> None:
    steady, slow = start_server(model_dir), start_server(model_dir)
    fleet = make_fleet(steady, slow, transport=transport)
    publish(fleet, worker)
    slow.stop_in_place()
    began = time.monotonic()
    assert publish(fleet, worker, deadline_s=NEVER_S) == {steady.url: EndpointOutcome.APPLIED}
    assert time.monotonic() - began < SOON_S
    assert fleet.states == {steady.url: MemberState.HEALTHY, slow.url: MemberState.SUSPECT}
    assert fleet.notes == (f"{slow.url} did not report within 2 s which version it serves: left out of this publish",)
    slow.go_on()
    assert publish(fleet, worker) == {steady.url: EndpointOutcome.APPLIED, slow.url: EndpointOutcome.APPLIED}
    assert fleet.healthy == (steady.url, slow.url)
    for server in (steady, slow):
        assert_serves(server, 3)


def test_one_that_is_slow_to_answer_is_waited_for_where_nobody_could_go_on_without_it(
    make_fleet: Make, start_server: Start, model_dir: Path, worker: PlainWorker
) -> None:
    slow = start_server(model_dir)
    fleet = make_fleet(slow)
    slow.stop_in_place()
    timer = threading.Timer(ANSWER_S + 1.0, slow.go_on)
    timer.start()
    assert publish(fleet, worker, deadline_s=NEVER_S) == {slow.url: EndpointOutcome.APPLIED}
    timer.join()


def test_fewer_than_the_quorum_is_no_success_and_leaves_nobody_healthy_until_enough_are_back(
    make_fleet: Make, start_server: Start, model_dir: Path, worker: PlainWorker
) -> None:
    first, second = start_server(model_dir), start_server(model_dir)
    fleet = make_fleet(first, second, transport="http", quorum=2)
    publish(fleet, worker)
    second.kill()
    worker.version += 1
    report = fleet.publish(worker, deadline_s=20.0)
    assert not report.succeeded
    assert fleet.healthy == ()
    assert fleet.states == {first.url: MemberState.JOINING, second.url: MemberState.DEAD}
    assert weight_version(first).version == 1
    start_server(model_dir, "--port", second.url.rpartition(":")[2])
    fleet.ask_all()
    assert publish(fleet, worker) == {first.url: EndpointOutcome.APPLIED, second.url: EndpointOutcome.APPLIED}
    assert fleet.healthy == (first.url, second.url)


def test_an_endpoint_that_is_not_there_yet_joins_when_it_is(
    make_fleet: Make, start_server: Start, model_dir: Path, worker: PlainWorker
) -> None:
    first, late = start_server(model_dir), start_server(model_dir)
    late.kill()
    fleet = make_fleet(first)
    fleet.set_members([first.url, late.url])
    assert publish(fleet, worker) == {first.url: EndpointOutcome.APPLIED}
    assert fleet.states[late.url] is MemberState.DEAD
    start_server(model_dir, "--port", late.url.rpartition(":")[2])
    fleet.ask_all()
    assert publish(fleet, worker) == {first.url: EndpointOutcome.APPLIED, late.url: EndpointOutcome.APPLIED}


def test_a_trainer_that_was_replaced_is_told_so_and_does_not_try_again(
    make_fleet: Make, start_server: Start, model_dir: Path, worker: PlainWorker
) -> None:
    server = start_server(model_dir)
    old = make_fleet(server, run_id="same")
    publish(old, worker)
    new = make_fleet(server, run_id="same")
    publish(new, worker)
    with pytest.raises(FencedError, match="incarnation 2 has taken over"):
        publish(old, worker)
    publish(new, worker)
    assert_serves(server, worker.version)


def test_a_refusal_that_publishing_again_would_not_change_is_raised(
    make_fleet: Make, start_server: Start, model_dir: Path
) -> None:
    server = start_server(model_dir)
    fleet = make_fleet(server)
    tensors = checkpoint(model_dir)
    tensors.pop(next(iter(tensors)))
    with pytest.raises(PublishError, match="refused"):
        fleet.publish(PlainWorker(tensors, 1), deadline_s=10.0)
    assert fleet.healthy == ()


def test_shared_memory_is_released_before_the_connections_are_closed_which_a_hanging_server_delays(
    make_fleet: Make, start_server: Start, model_dir: Path, worker: PlainWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(start_server(model_dir), transport="shm")
    publish(fleet, worker)
    sender: Any = fleet._publisher.group.sender
    home: Path = sender._home.path
    assert home.exists()
    left: list[bool] = []
    closing = HttpEndpoint.aclose

    def aclose(endpoint: HttpEndpoint) -> Coroutine[Any, Any, None]:
        left.append(home.exists())
        return closing(endpoint)

    monkeypatch.setattr(HttpEndpoint, "aclose", aclose)
    fleet.close()
    assert left and not any(left)


def test_a_quorum_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="quorum must be at least 1, not 0"):
        Fleet(WeightPublisher([HttpEndpoint("http://127.0.0.1:9")], make_sender("gloo"), run_id="run"), quorum=0)
