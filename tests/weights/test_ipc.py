"""Weights through a device's memory, here the host's: no copy, handles are JSON, and memory that is read stays."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inflight.errors import ConfigError, PublishError, TransferError
from inflight.types import WeightBucket
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import arenas as arenas_module
from inflight.weights.transports import device_memory, make_sender
from inflight.weights.transports.arenas import ArenaReceiver, ArenaSender, keep_open
from inflight.weights.transports.device_memory import CudaMemory, HostMemory, MemoryHandle
from inflight.weights.transports.installed import IpcTransport
from inflight.weights.transports.ipc import IpcMemory
from inflight.wire import IpcSpec
from tests.gates import NEVER_S, SOON_S
from tests.weights.stored import (
    assert_same,
    make_buckets,
    mappings,
    payload,
    plain_update,
    publish,
    receive,
    share_host_memory,
)
from tests.weights.test_abandoned import Local
from tests.weights.workers import PlainWorker


def shared(directory: Path) -> ArenaSender:
    return ArenaSender(IpcMemory(HostMemory()), directory)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[ArenaSender]:
    sender = shared(tmp_path)
    yield sender
    sender.abort()
    sender.end(is_done=False)
    assert arenas_module._lent == []


def joined(sender: ArenaSender) -> tuple[ArenaReceiver, Path]:
    (spec,) = sender.specs("run", [1], 5.0)
    assert isinstance(spec, IpcSpec)
    receiver = ArenaReceiver(spec, IpcMemory(HostMemory()))
    receiver.join()
    return receiver, Path(spec.directory)


def arenas(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("arena-*") if not path.suffix)


def publish_done(sender: ArenaSender, version: int) -> list[WeightBucket]:
    """Publish a version that every endpoint commits."""
    buckets = make_buckets(plain_update(version))
    publish(sender, plain_update(version), buckets)
    sender.end(is_done=True)
    return buckets


def test_received_tensors_are_views_of_the_senders_memory(sender: ArenaSender) -> None:
    receiver, directory = joined(sender)
    update = plain_update()
    publish(sender, update, make_buckets(update))
    received = receive(receiver, update, make_buckets(update))
    assert received[0].untyped_storage().data_ptr() == received[1].untyped_storage().data_ptr()
    with open(directory / "arena-1.bytes", "r+b") as file:
        file.write(b"\x07")
    assert received[0][0] == 7


def test_memory_is_used_again_once_everybody_is_done(sender: ArenaSender) -> None:
    receiver, directory = joined(sender)
    used = set()
    for version in range(1, 6):
        update = plain_update(version)
        buckets = make_buckets(update)
        publish(sender, update, buckets)
        used.update(arenas(directory))
        assert_same(receive(receiver, update, buckets), buckets)
        sender.end(is_done=True)
    assert used == {"arena-1"}


def test_an_endpoint_that_serves_from_what_arrived_makes_the_sender_alternate(sender: ArenaSender) -> None:
    receiver, directory = joined(sender)
    served = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
    used = []
    for version in range(1, 7):
        update = plain_update(version)
        buckets = make_buckets(update)
        publish(sender, update, buckets)
        served.data = receive(receiver, update, buckets)[1]  # the parameter alone refers to the memory
        sender.end(is_done=True)
        used.append(arenas(directory))
        assert torch.equal(served, buckets[1].tensors[0])
    assert used == [["arena-1"], *[["arena-1", "arena-2"]] * 5]
    receiver.abort()


def test_a_third_publish_takes_another_arena_while_both_are_read_and_frees_the_first_when_it_is_not(
    sender: ArenaSender,
) -> None:
    receiver, directory = joined(sender)
    held = []
    for version in (1, 2, 3, 4):
        update = plain_update(version)
        buckets = make_buckets(update)
        publish(sender, update, buckets)
        held.append((receive(receiver, update, buckets), buckets))
        sender.end(is_done=True)
        for received, sent in held:
            assert_same(received, sent)
    assert arenas(directory) == ["arena-3", "arena-4"]
    assert [arena.path.name for arena in arenas_module._lent] == ["arena-1", "arena-2"]
    assert (directory / "arena-1.bytes").exists()
    del held[0], received
    sender.end(is_done=True)
    assert [arena.path.name for arena in arenas_module._lent] == ["arena-2"]
    assert not (directory / "arena-1.bytes").exists()
    held.clear()


@pytest.mark.parametrize("ending", ["done", "not done", "not ended", "abandoned"])
def test_a_laggard_keeps_its_bytes_until_it_reads_no_more(sender: ArenaSender, ending: str) -> None:
    receiver, _ = joined(sender)
    first = plain_update(1)
    buckets = make_buckets(first)
    publish(sender, first, buckets)
    received = receive(receiver, first, buckets)
    if ending in ("done", "not done"):
        sender.end(is_done=ending == "done")
    elif ending == "abandoned":
        sender.abort()
        sender.specs("run", [1], 5.0)
    for version in (2, 3):
        publish_done(sender, version)
    assert_same(received, buckets)
    assert len(arenas_module._lent) == (ending != "done")


def test_an_update_that_is_over_cannot_be_locked_by_who_comes_too_late(
    sender: ArenaSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, _ = joined(sender)
    update = plain_update()
    publish(sender, update, make_buckets(update))
    own = fcntl.flock

    def late(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", own)
            sender.end(is_done=False)  # after the receiver has opened the file
        own(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(TransferError, match="removed by the sender"):
        receive(receiver, update, make_buckets(update))


def test_memory_of_a_reader_that_was_killed_is_not_kept(sender: ArenaSender) -> None:
    (spec,) = sender.specs("run", [1], 5.0)
    update = plain_update()
    buckets = make_buckets(update)
    publish(sender, update, buckets)
    code = f"""
import time
from inflight.weights.transports.arenas import ArenaReceiver
from inflight.weights.transports.device_memory import HostMemory
from inflight.weights.transports.ipc import IpcMemory
from inflight.wire import IpcSpec
from tests.weights.stored import make_buckets, plain_update, receive
spec = IpcSpec.model_validate_json({spec.model_dump_json()!r})
receiver = ArenaReceiver(spec, IpcMemory(HostMemory()))
receiver.join()
update = plain_update()
received = receive(receiver, update, make_buckets(update))
print(sum(int(flat.sum()) for flat in received), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert int(reader.stdout.readline()) == sum(int(bucket.tensors[0].sum()) for bucket in buckets)
        sender.end(is_done=False)
        assert len(arenas_module._lent) == 1
        reader.kill()
        reader.wait(10)
    sender.end(is_done=False)
    assert arenas_module._lent == []


def test_memory_outlasts_a_sender_that_nobody_holds_any_more(tmp_path: Path) -> None:
    sender = shared(tmp_path)
    receiver, directory = joined(sender)
    update = plain_update()
    publish(sender, update, make_buckets(update))
    received = receive(receiver, update, make_buckets(update))
    sender.abort()
    del sender
    gc.collect()
    assert len(arenas_module._lent) == 1
    assert_same(received, make_buckets(update))
    del received
    shared(tmp_path).end(is_done=False)
    assert arenas_module._lent == [] and not directory.exists()


def test_in_the_senders_own_process_the_lock_ends_with_the_views_and_not_with_the_memory(tmp_path: Path) -> None:
    """CUDA does not map memory of the same process: receivers there get the sender's own."""
    own = torch.arange(100, dtype=torch.uint8)
    handle = MemoryHandle(size_bytes=100, memory="b3du")
    device_memory._of_this_process[handle.memory, handle.offset] = own
    flat = CudaMemory.map_memory(CudaMemory.__new__(CudaMemory), handle, "GPU")
    assert flat.data_ptr() == own.data_ptr()
    with open(tmp_path / "arena", "w") as file, open(tmp_path / "arena") as again:
        fcntl.flock(file, fcntl.LOCK_SH)
        keep_open(flat, file.fileno())
        file.close()
        part = flat[3:7]
        del flat
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert part.tolist() == [3, 4, 5, 6]
        del part
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert own.numel() == 100


def test_what_the_device_still_reads_is_not_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls: a GPU would read on after Python has let go."""
    calls = []
    monkeypatch.setattr(arenas_module, "synchronise_device", lambda device: calls.append((device.type, is_locked())))
    with open(tmp_path / "arena", "w") as file, open(tmp_path / "arena") as again:

        def is_locked() -> bool:
            try:
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

        fcntl.flock(file, fcntl.LOCK_SH)
        flat = torch.zeros(4)
        keep_open(flat, file.fileno())
        file.close()
        del flat
        assert calls == [("cpu", True)]
        assert not is_locked()


def test_a_handle_is_json_without_anything_pickled(sender: ArenaSender) -> None:
    receiver, directory = joined(sender)
    publish(sender, plain_update(), make_buckets(plain_update()))
    fields = json.loads((directory / "arena-1").read_text())
    assert set(fields) == set(MemoryHandle.model_fields)
    assert all(isinstance(value, int | str | bool) for value in fields.values())
    receiver.abort()


def corrupted(directory: Path, what: str) -> None:
    handle = directory / "arena-1"
    fields = json.loads(handle.read_text())
    if what == "handle a link":
        handle.rename(directory / "moved")
        handle.symlink_to(directory / "moved")
    elif what == "handle cut":
        handle.write_text(handle.read_text()[:20])
    elif what == "handle endless":
        handle.write_text("[" * (1 << 17))
    elif what == "not base64":
        handle.write_text(json.dumps(fields | {"memory": "../../etc"}))
    elif what == "too small":
        handle.write_text(json.dumps(fields | {"size_bytes": 4096}))
    elif what == "gone":
        handle.unlink()
    else:
        assert what == "open to others"
        directory.chmod(0o755)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("handle a link", "cannot be opened"),
        ("handle cut", "cannot be used"),
        ("handle endless", "at most"),
        ("not base64", "cannot be used: memory"),
        ("too small", "truncated"),
        ("gone", "No such file"),
        ("open to others", "not private"),
    ],
)
def test_what_is_not_the_senders_is_refused_at_once(sender: ArenaSender, what: str, words: str) -> None:
    receiver, directory = joined(sender)
    update = plain_update()
    publish(sender, update, make_buckets(update))
    corrupted(directory, what)
    receiver.begin(update.ref)
    began = time.monotonic()
    with pytest.raises(TransferError, match=words):
        receiver.receive((payload(1 << 16),), NEVER_S)
    assert time.monotonic() - began < SOON_S


def test_memory_of_a_device_that_is_not_visible_is_refused_with_the_reason(tmp_path: Path) -> None:
    spec = IpcSpec(run_id="run", transport="ipc", directory=str(tmp_path), place="GPU-0b1c", timeout_s=1.0)
    with pytest.raises(TransferError, match="GPU-0b1c cannot be mapped here; otherwise, use another transport"):
        ArenaReceiver(spec, IpcMemory(HostMemory())).join()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = IpcSpec(run_id="run", transport="ipc", directory=str(tmp_path / "none"), place="host", timeout_s=1.0)
    with pytest.raises(TransferError, match=r"none does not exist; .*one host"):
        ArenaReceiver(spec, IpcMemory(HostMemory())).join()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU here; use the shm transport"):
        IpcTransport().sender(address="127.0.0.1", directory=None)


def test_nothing_is_left_behind_once_all_are_done(tmp_path: Path) -> None:
    sender = shared(tmp_path)
    receiver, _ = joined(sender)
    publish(sender, plain_update(), make_buckets(plain_update()))
    receive(receiver, plain_update(), make_buckets(plain_update()))
    handles = len(os.listdir("/proc/self/fd"))
    sender.abort()
    receiver.abort()
    sender.abort()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= handles


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    share_host_memory(monkeypatch.setattr)


@pytest.mark.usefixtures("on_the_host")
def test_publishes_arrive_at_an_engine_and_one_that_fails_leaves_the_old_weights(model_dir: Path) -> None:
    local = Local(model_dir)
    before = mappings(".bytes")
    with WeightPublisher([local.endpoint], make_sender("ipc"), run_id="here", connect_timeout_s=20) as publisher:
        for version in (1, 2, 3):
            tensors = {name: tensor + version for name, tensor in local.tensors.items()}
            report = publish_weights(PlainWorker(tensors, version), publisher, bucket_bytes=30_000)
            assert report is not None and report.applied_everywhere
            loaded = dict(local.model.named_parameters())
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        assert mappings(".bytes") <= before + 2  # those of the sender: nothing is served from its memory
        broken = PlainWorker({**local.tensors, "more": torch.zeros(1)}, version=4)
        with pytest.raises(PublishError):
            publish_weights(broken, publisher, deadline_s=20)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        assert publisher.group.transport == "ipc"
    assert arenas_module._lent == []
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items()), "the publisher has left"


def test_an_engine_on_the_cpu_refuses_it_with_the_reason(model_dir: Path, tmp_path: Path) -> None:
    local = Local(model_dir)
    reason = r"does not support the ipc transport; .* this server's weights are on the CPU"
    with (
        pytest.raises(Exception, match=reason),
        WeightPublisher([local.endpoint], shared(tmp_path), run_id="here"),
    ):
        pass
