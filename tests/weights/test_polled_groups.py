"""What is NCCL's in a process group, over gloo: deadlines of our own, aborts that block, and torch's environment."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inflight.conformance.checks import Check
from inflight.conformance.kit import Kit
from inflight.conformance.targets import TransportTarget
from inflight.conformance.transport.catalogue import CHECKS
from inflight.conformance.verdicts import CheckOutcome
from inflight.errors import ConfigError, PublishError, TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import payload_spec
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender, process_group
from inflight.weights.transports.groups import GroupKind, PolledGroup, new_gloo_group
from inflight.weights.transports.nccl_group import QUIET, environment, new_nccl_group
from inflight.weights.transports.process_group import ProcessGroupReceiver, ProcessGroupSender
from tests.gates import NEVER_S, SOON_S, wait_until
from tests.selection import first_of_each
from tests.threads import wait_for_call
from tests.weights.polled import KIND
from tests.weights.test_abandoned import Local
from tests.weights.workers import PlainWorker

Pair = tuple[ProcessGroupSender, ProcessGroupReceiver]


def paired(kind: GroupKind) -> Pair:
    sender = ProcessGroupSender(kind=kind)
    (spec,) = sender.specs("run", [1], 10.0)
    receiver = ProcessGroupReceiver(spec, kind=kind)
    joining = threading.Thread(target=receiver.join)
    joining.start()
    sender.join()
    joining.join(10)
    return sender, receiver


@pytest.fixture
def pair() -> Iterator[Pair]:
    sender, receiver = paired(KIND)
    yield sender, receiver
    receiver.abort()
    sender.abort()


def bucket(index: int, size_bytes: int = 100) -> WeightBucket:
    flat = torch.full((size_bytes,), index, dtype=torch.uint8)
    return WeightBucket(index, (payload_spec(size_bytes),), (flat,))


def assert_travels(pair: Pair) -> None:
    sender, receiver = pair
    for index in (7, 8):
        sending = threading.Thread(target=sender.send, args=(bucket(index), 10.0))
        sending.start()
        (flat,) = receiver.receive((payload_spec(100),), 10.0)
        sending.join(10)
        assert flat.tolist() == [index] * 100


def test_an_operation_that_is_pending_at_its_deadline_raises_and_the_process_forms_the_next_group(pair: Pair) -> None:
    _, receiver = pair
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"receiving a bucket failed: not done after 0\.3 s"):
        receiver.receive((payload_spec(100),), 0.3)
    assert 0.25 < time.monotonic() - started < SOON_S
    receiver.abort()
    following = paired(KIND)
    assert_travels(following)
    for end in following:
        end.abort()


def test_a_receive_that_waits_takes_little_of_the_processor(pair: Pair) -> None:
    _, receiver = pair
    busy = time.process_time()
    with pytest.raises(TransferError):
        receiver.receive((payload_spec(100),), 0.5)
    assert time.process_time() - busy < 0.25


def test_what_goes_wrong_in_an_operation_is_raised() -> None:
    class Broken:
        """A pending operation that fails, as one does whose peer ends."""

        def broadcast(self, *_: object) -> Any:
            return self

        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            raise dist.DistBackendError("NCCL error: remote process exited")

    with pytest.raises(RuntimeError, match="remote process exited"):
        PolledGroup(Broken()).make_broadcast(torch.zeros(1), 1.0)()


class SlowToAbort:
    """Gloo's group, whose abort returns only when it is let go: NCCL's may take seconds."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.may_abort = threading.Event()
        self.has_aborted = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def abort(self) -> None:
        self.may_abort.wait(NEVER_S)
        self._group.abort()
        self.has_aborted.set()


def test_abort_returns_at_once_though_the_groups_own_blocks_and_memory_is_held_until_then() -> None:
    groups: list[PolledGroup] = []

    def make(*told: Any) -> PolledGroup:
        groups.append(PolledGroup(SlowToAbort(new_gloo_group(*told))))
        return groups[-1]

    sender, receiver = paired(replace(KIND, make=make))
    (received,) = (group for group in groups if group.raw._group.rank() == 1)
    told: list[TransferError] = []

    def receive() -> None:
        try:
            receiver.receive((payload_spec(100),), NEVER_S)
        except TransferError as error:
            told.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    wait_for_call(waiting, ProcessGroupReceiver.receive)
    wait_until(lambda: received._unfinished, "nothing is received")
    receiver.abort()
    waiting.join(SOON_S)
    assert "abandoned" in str(told[0])
    assert len(received._unfinished) == 1  # the device may still write there
    received.raw.may_abort.set()
    assert received.raw.has_aborted.wait(SOON_S)
    wait_until(lambda: not received._unfinished, "memory is still held")
    sender.abort()
    for group in groups:
        group.raw.may_abort.set()


def c_environment(name: str) -> str | None:
    """What C code reads, as torch's does."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = getenv(name.encode())
    return None if found is None else found.decode()


def test_torch_reads_our_settings_while_a_group_is_made_and_the_users_at_any_other_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *others = QUIET
    monkeypatch.setenv(first, "1")
    for name in others:
        monkeypatch.delenv(name, raising=False)
    with environment(QUIET):
        assert {name: c_environment(name) for name in QUIET} == QUIET
    assert [c_environment(name) for name in QUIET] == ["1"] + [None] * len(others)
    with pytest.raises(RuntimeError, match="no GPU"), environment(QUIET):
        raise RuntimeError("no GPU")
    assert [os.environ.get(name) for name in QUIET] == ["1"] + [None] * len(others)


def test_groups_that_are_made_at_once_leave_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, *_) = QUIET
    monkeypatch.setenv(name, "1")

    def make() -> None:
        for _ in range(50):
            with environment(QUIET):
                assert c_environment(name) == QUIET[name]
                time.sleep(0.0005)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert os.environ[name] == "1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nccl_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="nccl sends from a GPU, and torch sees none here"):
        make_sender("nccl")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this build of torch has NCCL")
def test_a_torch_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransferError, match="has no NCCL"):
        new_nccl_group(dist.HashStore(), 0, 1)


@pytest.fixture
def only_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of every process group are those of NCCL."""
    monkeypatch.setattr(process_group, "_KINDS", {"gloo": KIND})


@pytest.mark.usefixtures("only_polled")
def test_a_publish_compares_buckets_on_their_device_and_a_damaged_one_ends_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(model_dir)
    announced: list[str | None] = []
    send: Callable[..., None] = ProcessGroupSender.send
    is_damaged = False

    def watched(sender: ProcessGroupSender, sent: WeightBucket, timeout_s: float) -> None:
        announced.append(sent.checksum)
        if is_damaged:
            flat = sent.tensors[0].clone()
            flat.view(-1).view(torch.uint8)[0] ^= 1
            sent = replace(sent, tensors=(flat, *sent.tensors[1:]))
        send(sender, sent, timeout_s)

    monkeypatch.setattr(ProcessGroupSender, "send", watched)
    with WeightPublisher([local.endpoint], ProcessGroupSender(), run_id="here", connect_timeout_s=20) as publisher:
        for encoding in ("raw", "bfloat16"):
            publisher.group.encoder.encoding = encoding  # type: ignore[assignment]
            report = publish_weights(PlainWorker(local.tensors, 1 + len(announced)), publisher, bucket_bytes=30_000)
            assert report is not None and report.applied_everywhere
        assert len(announced) > 4 and all(found is not None and found.startswith("sums64:") for found in announced)
        is_damaged = True
        with pytest.raises(PublishError, match="damaged in transit: its checksum is sums64:"):
            publish_weights(PlainWorker(local.tensors, 100), publisher, bucket_bytes=30_000, deadline_s=10)


@pytest.fixture(scope="module")
def kit() -> Iterator[Kit]:
    with Kit(TransportTarget(factory="tests.weights.polled:POLLED")) as kit:
        yield kit


@pytest.mark.parametrize("check", first_of_each(CHECKS, lambda check: check.level), ids=str)
@pytest.mark.usefixtures("forks")
def test_a_polled_group_conforms(check: Check, kit: Kit) -> None:
    verdict = kit.run(check)
    assert verdict.outcome is CheckOutcome.PASSED, verdict.message + verdict.stacks
