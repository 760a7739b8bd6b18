"""Buckets of a process group that travel ahead: while the one before is compared, and before it was answered."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inflight.errors import PublishError, TransferError
from inflight.http.client import HttpEndpoint
from inflight.types import EndpointOutcome, WeightBucket
from inflight.weights.encode.bucket_bytes import payload_spec
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_receiver, make_sender
from inflight.weights.transports.process_group import ProcessGroupReceiver, ProcessGroupSender
from inflight.wire import BucketTransfer, TransportName
from tests.gates import NEVER_S, SOON_S
from tests.servers import TOKEN, ServerProcess
from tests.weights.stored import make_buckets, plain_update
from tests.weights.workers import PlainWorker, assert_serves, checkpoint, silenced

BUCKET_BYTES = 21_000_000  # the large model travels in three buckets


@pytest.fixture
def pair() -> Iterator[tuple[ProcessGroupSender, ProcessGroupReceiver]]:
    sender = ProcessGroupSender()
    (spec,) = sender.specs("run", [1], 10.0)
    receiver = ProcessGroupReceiver(spec)
    joining = threading.Thread(target=receiver.join)
    joining.start()
    sender.join()
    joining.join(10)
    yield sender, receiver
    receiver.abort()
    sender.abort()


def bucket(index: int, size_bytes: int) -> WeightBucket:
    flat = torch.full((size_bytes,), index, dtype=torch.uint8)
    return WeightBucket(index, (payload_spec(size_bytes),), (flat,))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_after_a_failed_receive_no_later_bucket_is_taken_for_the_missing_one(
    pair: tuple[ProcessGroupSender, ProcessGroupReceiver], is_ahead: bool
) -> None:
    _, receiver = pair
    specs = (payload_spec(100),)
    if is_ahead:
        receiver.receive_ahead(specs, 10.0)
    with pytest.raises(TransferError):
        receiver.receive(specs, 0.2)
    with pytest.raises(TransferError, match="no weight group"):
        receiver.receive(specs, 0.2)


def test_a_bucket_arrives_before_it_is_asked_for(pair: tuple[ProcessGroupSender, ProcessGroupReceiver]) -> None:
    sender, receiver = pair
    size_bytes = 8_000_000  # more than the sockets hold: it leaves only if somebody takes it
    receiver.receive_ahead((payload_spec(size_bytes),), 10.0)
    sender.send(bucket(7, size_bytes), 10.0)
    (flat,) = receiver.receive((payload_spec(size_bytes),), 10.0)
    assert flat.tolist()[:: size_bytes // 10] == [7] * 10
    threading.Thread(target=sender.send, args=(bucket(8, 100), 10.0)).start()
    (flat,) = receiver.receive((payload_spec(100),), 10.0)
    assert flat.tolist() == [8] * 100


def test_another_size_than_what_is_ahead_is_told(pair: tuple[ProcessGroupSender, ProcessGroupReceiver]) -> None:
    sender, receiver = pair
    receiver.receive_ahead((payload_spec(100),), 10.0)
    sender.send(bucket(1, 100), 10.0)
    with pytest.raises(TransferError, match="expected a bucket of 100 bytes, not 99"):
        receiver.receive((payload_spec(99),), 10.0)


def test_who_waits_for_what_is_ahead_gives_up_at_its_own_deadline(
    pair: tuple[ProcessGroupSender, ProcessGroupReceiver],
) -> None:
    _, receiver = pair
    receiver.receive_ahead((payload_spec(100),), NEVER_S)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"not done after 0\.2 s"):
        receiver.receive((payload_spec(100),), 0.2)
    assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_giving_the_group_up_waits_for_nothing_that_is_ahead(
    pair: tuple[ProcessGroupSender, ProcessGroupReceiver], is_waited_for: bool
) -> None:
    _, receiver = pair
    receiver.receive_ahead((payload_spec(100),), NEVER_S)
    told: list[TransferError] = []

    def receive() -> None:
        try:
            receiver.receive((payload_spec(100),), NEVER_S)
        except TransferError as error:
            told.append(error)

    waiting = threading.Thread(target=receive)
    if is_waited_for:
        waiting.start()
    started = time.monotonic()
    receiver.abort()
    if is_waited_for:
        waiting.join(SOON_S)
        assert "abandoned" in str(told[0])
    assert time.monotonic() - started < SOON_S


class Recorder:
    """What happened, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def note(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def has(self, line: str, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: line in self.lines, timeout_s)


class RecordingSender(ProcessGroupSender):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        super().send(bucket, timeout_s)
        self._recorder.note(f"sent {bucket.index}")


class SlowToAnswer(HttpEndpoint):
    """Answers for bucket 0 only when bucket 1 has left, or after a while."""

    def __init__(self, server: ServerProcess, recorder: Recorder) -> None:
        super().__init__(server.url, token=TOKEN)
        self._recorder = recorder

    async def receive_weights(self, bucket: BucketTransfer) -> None:
        self._recorder.note(f"asked {bucket.bucket_index}")
        await super().receive_weights(bucket)
        if bucket.bucket_index == 0:
            await asyncio.to_thread(self._recorder.has, "sent 1", SOON_S)
        self._recorder.note(f"answered {bucket.bucket_index}")


@pytest.fixture(scope="module")
def server(large_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(large_model_dir, tmp_path_factory.mktemp("server"))
    server.wait_until_ready()
    yield server
    server.kill()


def test_a_bucket_leaves_before_the_one_before_was_answered_and_is_asked_for_after_it(
    server: ServerProcess, large_model_dir: Path
) -> None:
    recorder = Recorder()
    worker = PlainWorker(silenced(checkpoint(large_model_dir)))
    with WeightPublisher([SlowToAnswer(server, recorder)], RecordingSender(recorder), run_id="ahead") as publisher:
        report = publish_weights(worker, publisher, bucket_bytes=BUCKET_BYTES, deadline_s=60)
    assert report is not None
    assert report.applied_everywhere
    lines = recorder.lines
    assert lines.index("sent 1") < lines.index("answered 0") < lines.index("asked 1")
    assert [line for line in lines if line.startswith("answered")] == ["answered 0", "answered 1", "answered 2"]
    assert report.spans.wire_s <= report.spans.total_s
    assert_serves(server, 1)


class Damager(ProcessGroupSender):
    """Changes a byte of one bucket after its checksum was taken."""

    damaged = 1

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        if bucket.index == self.damaged:
            flat = bucket.tensors[0].clone()
            flat.view(-1).view(torch.uint8)[0] ^= 1
            bucket = WeightBucket(bucket.index, bucket.specs, (flat, *bucket.tensors[1:]), checksum=bucket.checksum)
        super().send(bucket, timeout_s)


def test_a_damaged_bucket_ends_the_session_though_the_next_one_travels_already(
    server: ServerProcess, large_model_dir: Path
) -> None:
    tensors = checkpoint(large_model_dir)
    sender = Damager()
    with WeightPublisher([HttpEndpoint(server.url, token=TOKEN)], sender, run_id="damaged") as publisher:
        with pytest.raises(PublishError, match="damaged in transit") as caught:
            publish_weights(PlainWorker(tensors), publisher, bucket_bytes=BUCKET_BYTES, deadline_s=60)
        assert [e.outcome for e in caught.value.report.endpoints] == [EndpointOutcome.ABORTED]
        assert_serves(server, 1)  # what the test before left
        sender.damaged = -1
        publish_weights(PlainWorker(silenced(tensors), version=2), publisher, bucket_bytes=BUCKET_BYTES, deadline_s=60)
    assert_serves(server, 2)


@pytest.mark.parametrize("transport", ["gloo", "shm", "file", "http"])
def test_a_bucket_that_a_session_left_behind_is_refused_by_the_next_one(
    transport: TransportName, tmp_path: Path
) -> None:
    """In a process group it would end the receivers' processes: gloo does not survive bytes of another size."""
    old, new = plain_update(1, session_id="old"), plain_update(1, session_id="new")
    sender = make_sender(transport, directory=tmp_path)
    (spec,) = sender.specs("run", [1], 10.0)
    receiver = make_receiver(spec)
    joining = threading.Thread(target=receiver.join)
    joining.start()
    sender.join()
    joining.join(10)
    stray, due = (replace(make_buckets(update)[0], ref=update.ref) for update in (old, new))
    for is_begun in (False, True):
        if is_begun:
            sender.begin(new)
        with pytest.raises(TransferError, match="session 'old', which has ended" if is_begun else "has ended|begun"):
            sender.send(stray, 10.0)
    receiver.begin(new.ref)
    sending = threading.Thread(target=sender.send, args=(due, 10.0))
    sending.start()
    (flat,) = receiver.receive((payload_spec(1 << 16),), 10.0)
    sending.join(10)
    assert torch.equal(flat, due.tensors[0])
    receiver.abort()
    sender.abort()
