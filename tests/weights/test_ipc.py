"""Weights through a device's memory, here the host's: handles are JSON, and memory that is read stays as it is."""

from __future__ import annotations

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
from inflight.weights.publish import WeightPublisher, publish_weights
from inflight.weights.transports import device_memory, ipc, make_sender
from inflight.weights.transports.device_memory import HostMemory, MemoryHandle
from inflight.weights.transports.installed import IpcTransport
from inflight.weights.transports.ipc import IpcReceiver, IpcSender
from inflight.wire import IpcSpec
from tests.weights.stored import assert_same, make_buckets, payload, plain_update, publish, receive
from tests.weights.test_abandoned import Local
from tests.weights.workers import PlainWorker


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[IpcSender]:
    sender = IpcSender(tmp_path, HostMemory())
    yield sender
    sender.abort()


def joined(sender: IpcSender) -> tuple[IpcReceiver, Path]:
    (spec,) = sender.specs("run", [1], 5.0)
    receiver = IpcReceiver(spec, HostMemory())
    receiver.join()
    return receiver, Path(spec.directory)


def arenas(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("arena-*") if not path.suffix)


def test_what_the_sender_writes_later_does_not_change_what_was_received(sender: IpcSender) -> None:
    receiver, _ = joined(sender)
    update = plain_update()
    buckets = make_buckets(update)
    publish(sender, update, buckets)
    received = receive(receiver, update, buckets)
    assert_same(received, buckets)
    assert sender._arena is not None
    sender._arena.flat.fill_(7)
    assert_same(received, buckets)


def test_memory_is_used_again_once_everybody_is_done(sender: IpcSender) -> None:
    receiver, directory = joined(sender)
    used = set()
    for version in range(1, 6):
        update = plain_update(version)
        buckets = make_buckets(update)
        publish(sender, update, buckets)
        used.update(arenas(directory))
        assert_same(receive(receiver, update, buckets), buckets)
        sender.end(is_done=True)
    assert len(used) == 1


@pytest.mark.parametrize("ending", ["not done", "not ended", "given up"])
def test_a_laggard_keeps_its_bytes_until_it_reads_no_more(sender: IpcSender, ending: str) -> None:
    receiver, _ = joined(sender)
    first = plain_update(1)
    buckets = make_buckets(first)
    publish(sender, first, buckets)
    received = receive(receiver, first, buckets)
    if ending == "not done":
        sender.end(is_done=False)
    elif ending == "given up":
        sender.abort()
        sender.specs("run", [1], 5.0)
    for version in (2, 3):
        publish(sender, plain_update(version), make_buckets(plain_update(version)))
        sender.end(is_done=True)
    assert_same(received, buckets)
    assert len(sender._retired) == 1
    if ending == "given up":
        receiver.abort()
    else:
        receiver.begin(plain_update(4).ref)
    sender.end(is_done=True)
    assert sender._retired == []


def test_memory_of_a_reader_that_was_killed_is_not_kept(sender: IpcSender) -> None:
    (spec,) = sender.specs("run", [1], 5.0)
    update = plain_update()
    buckets = make_buckets(update)
    publish(sender, update, buckets)
    code = f"""
import time
from inflight.weights.transports.device_memory import HostMemory
from inflight.weights.transports.ipc import IpcReceiver
from inflight.wire import IpcSpec
from tests.weights.stored import make_buckets, plain_update, receive
receiver = IpcReceiver(IpcSpec.model_validate_json({spec.model_dump_json()!r}), HostMemory())
receiver.join()
update = plain_update()
print(sum(int(flat.sum()) for flat in receive(receiver, update, make_buckets(update))), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert int(reader.stdout.readline()) == sum(int(bucket.tensors[0].sum()) for bucket in buckets)
        sender.end(is_done=False)
        assert len(sender._retired) == 1
        reader.kill()
        reader.wait(10)
    sender.end(is_done=False)
    assert sender._retired == []


def test_a_handle_is_json_without_anything_pickled(sender: IpcSender) -> None:
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
        ("too small", "too few"),
        ("gone", "No such file"),
        ("open to others", "not private"),
    ],
)
def test_what_is_not_the_senders_is_refused_at_once(sender: IpcSender, what: str, words: str) -> None:
    receiver, directory = joined(sender)
    update = plain_update()
    publish(sender, update, make_buckets(update))
    corrupted(directory, what)
    receiver.begin(update.ref)
    began = time.monotonic()
    with pytest.raises(TransferError, match=words):
        receiver.receive((payload(1 << 16),), 10.0)
    assert time.monotonic() - began < 1.0


def test_memory_of_a_device_that_is_not_visible_is_refused_with_the_reason(tmp_path: Path) -> None:
    spec = IpcSpec(run_id="run", transport="ipc", directory=str(tmp_path), place="GPU-0b1c", timeout_s=1.0)
    with pytest.raises(TransferError, match="memory of GPU-0b1c cannot be mapped here; use another transport"):
        IpcReceiver(spec, HostMemory()).join()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = IpcSpec(run_id="run", transport="ipc", directory=str(tmp_path / "none"), place="host", timeout_s=1.0)
    with pytest.raises(TransferError, match=r"none does not exist: .*one host"):
        IpcReceiver(spec, HostMemory()).join()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU here; use the shm transport"):
        IpcTransport().sender(address="127.0.0.1", directory=None)


def test_nothing_is_left_behind_once_all_are_done(tmp_path: Path) -> None:
    sender = IpcSender(tmp_path, HostMemory())
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
    """The transport ``ipc`` shares the host's memory, and servers on the CPU declare it."""
    monkeypatch.setattr(ipc, "CudaMemory", HostMemory)
    monkeypatch.setattr(device_memory, "CudaMemory", HostMemory)
    monkeypatch.setattr(IpcTransport, "needs_gpu", False)


@pytest.mark.usefixtures("on_the_host")
def test_publishes_arrive_at_an_engine_and_one_that_fails_leaves_the_old_weights(model_dir: Path) -> None:
    local = Local(model_dir)
    with WeightPublisher([local.endpoint], make_sender("ipc"), run_id="here", connect_timeout_s=20) as publisher:
        for version in (1, 2, 3):
            tensors = {name: tensor + version for name, tensor in local.tensors.items()}
            report = publish_weights(PlainWorker(tensors, version), publisher, bucket_bytes=30_000)
            assert report is not None and report.applied_everywhere
            loaded = dict(local.model.named_parameters())
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        broken = PlainWorker({**local.tensors, "more": torch.zeros(1)}, version=4)
        with pytest.raises(PublishError):
            publish_weights(broken, publisher, deadline_s=20)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        assert publisher.transport == "ipc"


def test_an_engine_on_the_cpu_refuses_it_with_the_reason(model_dir: Path, tmp_path: Path) -> None:
    local = Local(model_dir)
    reason = r"does not declare the ipc transport; .* this server's weights are on the CPU"
    with (
        pytest.raises(Exception, match=reason),
        WeightPublisher([local.endpoint], IpcSender(tmp_path, HostMemory()), run_id="here"),
    ):
        pass
