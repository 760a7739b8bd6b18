"""What the four transports that store buckets have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from inflight.contracts import WeightReceiver, WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import unpack
from inflight.weights.transports import make_receiver, make_sender
from inflight.weights.transports.arenas import ArenaReceiver, ArenaSender
from inflight.weights.transports.device_memory import HostMemory
from inflight.weights.transports.ipc import IpcMemory
from inflight.wire import IpcSpec, TransportSpec
from tests.gates import NEVER_S, SOON_S
from tests.threads import wait_for_call
from tests.weights.stored import (
    MIXED,
    assert_same,
    encoded,
    make_buckets,
    make_update,
    open_handles,
    payload,
    plain_update,
    publish,
    raw_bytes,
    receive,
)

Group = tuple[WeightSender, WeightReceiver]


def receiver_of(spec: TransportSpec) -> WeightReceiver:
    return ArenaReceiver(spec, IpcMemory(HostMemory())) if isinstance(spec, IpcSpec) else make_receiver(spec)


@pytest.fixture(params=["shm", "ipc", "file", "http"])
def sender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightSender]:
    """``ipc`` shares the host's memory here."""
    store = tmp_path / "store"
    store.mkdir()
    is_ipc = request.param == "ipc"
    sender = ArenaSender(IpcMemory(HostMemory()), store) if is_ipc else make_sender(request.param, directory=store)
    yield sender
    sender.abort()


@pytest.fixture
def join(sender: WeightSender) -> Iterator[Callable[..., list[WeightReceiver]]]:
    """Form groups; all receivers are abandoned at the end."""
    receivers: list[WeightReceiver] = []

    def join(num_endpoints: int = 1, run_id: str = "run") -> list[WeightReceiver]:
        joined = [receiver_of(spec) for spec in sender.specs(run_id, [1] * num_endpoints, 5.0)]
        receivers.extend(joined)
        sender.join()
        for receiver in joined:
            receiver.join()
        return joined

    yield join
    for receiver in receivers:
        receiver.abort()


Join = Callable[..., list[WeightReceiver]]


def test_both_ends_satisfy_the_contract_and_are_not_collective(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    assert isinstance(sender, WeightSender) and isinstance(receiver, WeightReceiver)
    assert not sender.is_collective


@pytest.mark.parametrize(
    ("run_id", "session_id"),
    [("run", "s"), ("../..", ""), (".", ".."), ("a/b c%2Fü", "-._"), ("r" * 400, "s" * 64)],
    ids=["plain", "parent", "dot", "quoted", "long"],
)
def test_mixed_dtypes_and_empty_tensors_arrive_bit_for_bit_at_every_endpoint(
    sender: WeightSender, join: Join, run_id: str, session_id: str, tmp_path: Path
) -> None:
    receivers = join(2, run_id)
    update = make_update(run_id=run_id, session_id=session_id)
    buckets = make_buckets(update)
    publish(sender, update, buckets)
    for receiver in receivers:
        received = receive(receiver, update, buckets)
        assert_same(received, buckets)
        for flat, bucket in zip(received, buckets, strict=True):
            for tensor, sent in zip(unpack(flat, bucket.specs), bucket.tensors, strict=True):
                assert (tensor.dtype, tensor.shape) == (sent.dtype, sent.shape)
                assert torch.equal(tensor.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
    sender.end(is_done=True)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_tensors_may_be_asked_for_by_their_own_specs(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    update = make_update(cuts=(0, len(MIXED)))
    (bucket,) = make_buckets(update)
    publish(sender, update, [bucket])
    receiver.begin(update.ref)
    for tensor, sent in zip(receiver.receive(bucket.specs, 5.0), bucket.tensors, strict=True):
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


def test_encoded_buckets_arrive_as_their_payload(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    update = make_update(encodings=("bfloat16",))
    buckets = [encoded(update, bucket) for bucket in make_buckets(update)]
    assert raw_bytes(buckets[1]).numel() < update.buckets[1].size_bytes
    publish(sender, update, buckets)
    assert_same(receive(receiver, update, buckets), buckets)


def test_update_after_update_arrives_whole(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    for version in range(1, 8):
        update = plain_update(version, size_bytes=4096 * version if version < 5 else 1000)
        buckets = make_buckets(update)
        publish(sender, update, buckets)
        assert_same(receive(receiver, update, buckets), buckets)
        sender.end(is_done=version % 3 != 0)


def test_a_bucket_that_comes_late_is_waited_for(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    update = plain_update()
    buckets = make_buckets(update)
    publish(sender, update, buckets[:1])
    late = threading.Timer(0.2, lambda: sender.send(buckets[1], SOON_S))
    late.start()
    assert_same(receive(receiver, update, buckets), buckets)
    late.join()


def test_a_bucket_that_is_not_there_is_named_after_the_timeout(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    update = plain_update(7)
    publish(sender, update, make_buckets(update)[:1])
    receive(receiver, update, make_buckets(update)[:1])
    began, busy = time.monotonic(), time.thread_time()
    with pytest.raises(
        TransferError, match=r"receiving bucket 1 of version 7 failed: .*00001.* does not exist after 1 s"
    ):
        receiver.receive((payload(1 << 16),), 1.0)
    assert 0.9 < time.monotonic() - began < SOON_S
    assert time.thread_time() - busy < 0.5


def test_buckets_of_another_session_are_not_taken_for_this_ones(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    update = plain_update(1, session_id="one")
    publish(sender, update, make_buckets(update))
    for other in (plain_update(1, session_id="two"), plain_update(2, session_id="one"), plain_update(1, session_id="")):
        receiver.begin(other.ref)
        # Not for lack of time: the bucket of the sender's own session is received at once.
        with pytest.raises(TransferError):
            receiver.receive((payload(1 << 16),), 0.2)
    receiver.begin(update.ref)
    receive(receiver, update, make_buckets(update))


def test_a_bucket_of_another_size_is_refused(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    update = plain_update(size_bytes=1000)
    publish(sender, update, make_buckets(update))
    for wrong in (999, 1001, 0):
        receiver.begin(update.ref)
        with pytest.raises(TransferError, match=f"1000 bytes.*{wrong} were announced"):
            receiver.receive((payload(wrong),), 1.0)


def test_more_bytes_than_were_announced_are_not_stored(sender: WeightSender, join: Join) -> None:
    join()
    update = plain_update(size_bytes=4096)
    sender.begin(update)
    tensors = (torch.zeros(3 * 4096, dtype=torch.uint8),)
    with pytest.raises(TransferError, match="bucket 0"):
        sender.send(WeightBucket(0, (payload(3 * 4096),), tensors), 1.0)


def test_abort_ends_a_receive_that_is_pending_in_another_thread(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    update = plain_update()
    sender.begin(update)
    receiver.begin(update.ref)
    raised: list[BaseException] = []

    def pending() -> None:
        try:
            receiver.receive((payload(1 << 16),), NEVER_S)
        except TransferError as error:
            raised.append(error)

    thread = threading.Thread(target=pending)
    thread.start()
    wait_for_call(thread, type(receiver).receive)
    receiver.abort()
    receiver.abort()
    thread.join(SOON_S)
    assert "abandoned" in str(raised[0])
    with pytest.raises(TransferError, match="abandoned"):
        receiver.receive((payload(1 << 16),), 1.0)
    with pytest.raises(TransferError, match="abandoned"):
        receiver.join()


def test_calls_without_a_group_or_an_update_say_so(sender: WeightSender, join: Join) -> None:
    update = plain_update()
    for call in (sender.join, lambda: sender.begin(update), lambda: sender.send(make_buckets(update)[0], 1.0)):
        with pytest.raises(TransferError, match=r"no weight group is open|no update has begun"):
            call()
    (receiver,) = join()
    with pytest.raises(TransferError, match="no update has begun"):
        receiver.receive((payload(1),), 1.0)
    with pytest.raises(TransferError, match="no update has begun"):
        sender.send(make_buckets(update)[0], 1.0)
    sender.end(is_done=True)
    sender.abort()
    sender.abort()


def test_a_sender_that_was_given_up_opens_a_new_group(sender: WeightSender, join: Join) -> None:
    for version in (1, 2):
        (receiver,) = join()
        update = plain_update(version)
        publish(sender, update, make_buckets(update))
        assert_same(receive(receiver, update, make_buckets(update)), make_buckets(update))
        sender.abort()
        with pytest.raises(TransferError):
            sender.begin(update)


def test_an_attempt_without_a_name_is_repeated_from_its_first_bucket(sender: WeightSender, join: Join) -> None:
    (receiver,) = join()
    update = plain_update(session_id="")
    publish(sender, update, make_buckets(update, seed=1)[:1])
    sender.end(is_done=False)
    publish(sender, update, make_buckets(update, seed=2))
    assert_same(receive(receiver, update, make_buckets(update)), make_buckets(update, seed=2))


def test_nothing_of_a_complete_attempt_is_left_once_it_is_repeated(
    sender: WeightSender, join: Join, tmp_path: Path
) -> None:
    (receiver,) = join()
    update = plain_update(session_id="")
    publish(sender, update, make_buckets(update, seed=1))
    sender.end(is_done=True)
    sender.begin(update)
    receiver.begin(update.ref)
    with pytest.raises(TransferError, match="does not exist"):
        receiver.receive((payload(1 << 16),), 0.2)
    assert not [*tmp_path.rglob("manifest.json")]


@pytest.mark.exhaustive
def test_many_updates_leave_no_handles_files_or_mappings_behind(
    sender: WeightSender, join: Join, tmp_path: Path
) -> None:
    (receiver,) = join()
    counts = []
    for version in range(1, 301):
        update = plain_update(version, size_bytes=5000, num_buckets=1)
        buckets = make_buckets(update)
        publish(sender, update, buckets)
        if version % 10 != 5:
            assert_same(receive(receiver, update, buckets), buckets)
        sender.end(is_done=version % 10 != 5)
        if version in (20, 300):
            num_maps = len(Path("/proc/self/maps").read_text().splitlines())
            num_files = len(list(tmp_path.rglob("*")))
            counts.append((open_handles(), num_files, num_maps, threading.active_count()))
    (handles, files, maps, threads), after = counts
    assert after[0] <= handles + 1 and after[1] <= files and after[2] <= maps + 10 and after[3] <= threads + 2
