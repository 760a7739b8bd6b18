"""Weights through memory of one host: no copy, memory used again, and nothing left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inflight.errors import TransferError
from inflight.weights.encode.bucket_bytes import unpack
from inflight.weights.transports.arenas import ArenaReceiver, ArenaSender
from inflight.weights.transports.private_directory import PrivateDirectory
from inflight.weights.transports.shared_memory import FileMemory
from inflight.wire import DirectorySpec
from tests.gates import NEVER_S, SOON_S
from tests.weights.stored import (
    assert_same,
    doomed_sender,
    make_buckets,
    mappings,
    open_handles,
    payload,
    plain_update,
    publish,
    receive,
)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[ArenaSender]:
    sender = ArenaSender(FileMemory(), tmp_path)
    yield sender
    sender.abort()


def joined(sender: ArenaSender) -> tuple[ArenaReceiver, Path]:
    (spec,) = sender.specs("run", [1], 5.0)
    receiver = ArenaReceiver(spec, FileMemory())
    receiver.join()
    return receiver, Path(spec.directory)


def arenas(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("arena-*"))


def test_by_default_the_memory_is_that_of_the_host_and_goes_with_the_group() -> None:
    sender = ArenaSender(FileMemory())
    (spec,) = sender.specs("run", [1], 5.0)
    assert spec.directory.startswith("/dev/shm/inflight-weights-") and Path(spec.directory).is_dir()
    sender.abort()
    assert not Path(spec.directory).exists()


def test_only_this_user_can_reach_what_is_stored(sender: ArenaSender) -> None:
    receiver, directory = joined(sender)
    update = plain_update()
    publish(sender, update, make_buckets(update))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (arena,) = directory.glob("arena-*")
    assert stat.S_IMODE(arena.stat().st_mode) == 0o600
    receiver.abort()


def test_received_tensors_are_views_of_the_senders_memory(sender: ArenaSender) -> None:
    receiver, directory = joined(sender)
    update = plain_update()
    buckets = make_buckets(update)
    publish(sender, update, buckets)
    received = receive(receiver, update, buckets)
    assert mappings(str(directory)) >= 1
    (arena,) = directory.glob("arena-*")
    with open(arena, "r+b") as file:
        file.write(b"\x07")
    assert received[0][0] == 7
    received[1][0] = 1 + received[1][0]  # what a reader does by mistake stays with it
    other, _ = joined(sender)
    publish(sender, update, buckets)
    assert_same(receive(other, update, buckets), buckets)


def test_buckets_are_packed_in_memory_that_was_written_before_and_sent_without_a_copy(sender: ArenaSender) -> None:
    receiver, directory = joined(sender)
    for version in range(1, 4):
        update = plain_update(version)
        buckets = make_buckets(update)
        sender.begin(update)
        for bucket in buckets:
            size_bytes = sum(tensor.nbytes for tensor in bucket.tensors)
            memory = sender.reserve(bucket.index, size_bytes)
            assert (memory is None) == (version == 1)  # its pages are not there yet
            if memory is None:
                sender.send(bucket, 5.0)
                continue
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bucket.tensors])
            memory.copy_(flat)
            placed = replace(bucket, tensors=tuple(unpack(memory, bucket.specs)))
            sender.send(placed, 5.0)
        assert_same(receive(receiver, update, buckets), buckets)
        sender.end(is_done=True)
        assert len(arenas(directory)) == 1
    encoded = plain_update(9).model_copy(update={"encodings": ("bfloat16",)})
    sender.begin(encoded)
    assert sender.reserve(0, 8) is None
    sender.end(is_done=False)
    assert sender.reserve(0, 8) is None


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
    assert len(used) == 1
    sender.specs("run", [1], 5.0)  # a joiner comes
    publish(sender, plain_update(6), make_buckets(plain_update(6)))
    assert arenas(directory) == list(used)


@pytest.mark.parametrize("ending", ["done", "not done", "not ended", "abandoned"])
def test_a_laggard_keeps_its_bytes_while_the_next_update_is_written(sender: ArenaSender, ending: str) -> None:
    receiver, directory = joined(sender)
    first = plain_update(1)
    buckets = make_buckets(first)
    publish(sender, first, buckets)
    received = receive(receiver, first, buckets)
    if ending == "done":
        sender.end(is_done=True)
    elif ending == "not done":
        sender.end(is_done=False)
        assert arenas(directory) == []
    elif ending == "abandoned":
        sender.abort()
        sender.specs("run", [1], 5.0)
    second = plain_update(2)
    publish(sender, second, make_buckets(second))
    assert_same(received, buckets)


def test_an_endpoint_that_serves_from_what_arrived_makes_the_sender_alternate(sender: ArenaSender) -> None:
    receiver, directory = joined(sender)
    served: list[torch.Tensor] = []
    used = []
    for version in range(1, 7):
        update = plain_update(version)
        buckets = make_buckets(update)
        publish(sender, update, buckets)
        arrived = receive(receiver, update, buckets)
        sender.end(is_done=True)
        served = arrived
        used.append(arenas(directory))
        assert_same(served, buckets)
    assert used == [["arena-1"], *[["arena-1", "arena-2"]] * 5]
    del served, arrived
    sender.end(is_done=True)


def test_memory_that_one_large_update_took_is_returned_when_small_ones_follow(sender: ArenaSender) -> None:
    _, directory = joined(sender)
    update = plain_update(1, size_bytes=1 << 20)
    sender.begin(update)
    for bucket in make_buckets(update):
        sender.send(bucket, 5.0)
    sender.end(is_done=True)
    before = arenas(directory)
    for version in (2, 3):
        small = plain_update(version, size_bytes=4096)
        publish(sender, small, make_buckets(small))
        sender.end(is_done=True)
    assert arenas(directory) != before
    (arena,) = directory.glob("arena-*")
    assert arena.stat().st_blocks * 512 <= 3 * 4096


def corrupted(directory: Path, what: str) -> None:
    arena = next(directory.glob("arena-*"))
    record = next(directory.glob("*.00000.json"))
    fields = json.loads(record.read_text())
    if what == "arena truncated":
        os.truncate(arena, 4096)
    elif what == "arena a link":
        arena.rename(directory / "moved")
        arena.symlink_to(directory / "moved")
    elif what == "arena a pipe":
        arena.unlink()
        os.mkfifo(arena)
    elif what == "record a link":
        record.rename(directory / "moved")
        record.symlink_to(directory / "moved")
    elif what == "record cut":
        record.write_text(record.read_text()[:20])
    elif what == "record endless":
        record.write_text("[" * (1 << 17))
    elif what == "another directory":
        record.write_text(json.dumps(fields | {"arena": "../arena-1"}))
    elif what == "beyond the end":
        record.write_text(json.dumps(fields | {"offset": 1 << 40}))
    elif what == "another session":
        record.write_text(json.dumps(fields | {"ref": fields["ref"] | {"session_id": "x"}}))
    else:
        assert what == "open to others"
        directory.chmod(0o755)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("arena truncated", "truncated"),
        ("arena a link", "cannot be opened"),
        ("arena a pipe", "not a regular file"),
        ("record a link", "cannot be opened"),
        ("record cut", "cannot be used"),
        ("record endless", "at most"),
        ("another directory", "cannot be used: arena"),
        ("beyond the end", "truncated"),
        ("another session", "another update"),
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


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    spec = DirectorySpec(run_id="run", transport="shm", directory=str(tmp_path / "none"), timeout_s=1.0)
    with pytest.raises(TransferError, match=r"none does not exist; .*one host"):
        ArenaReceiver(spec, FileMemory()).join()
    with pytest.raises(TransferError, match="making a directory below"):
        ArenaSender(FileMemory(), tmp_path / "none").specs("run", [1], 1.0)


def test_what_a_killed_sender_left_is_removed_by_the_next_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    living = ArenaSender(FileMemory(), tmp_path)
    receiver, kept = joined(living)
    update = plain_update()
    publish(living, update, make_buckets(update))
    process = doomed_sender("shm", tmp_path)
    assert process.stdout is not None
    stale = Path(process.stdout.readline().strip())
    other = ArenaSender(FileMemory(), tmp_path)
    other.specs("run", [1], 1.0)
    assert stale.is_dir()

    gone = DirectorySpec(run_id="run", transport="shm", directory=str(stale), timeout_s=1.0)
    laggard = ArenaReceiver(gone, FileMemory())
    first = plain_update()
    received = receive(laggard, first, make_buckets(first)[:1])
    process.kill()
    process.wait()
    process.stdout.close()
    with pytest.raises(TransferError, match=r"bucket 1 .*does not exist"):
        laggard.receive((payload(1 << 16),), 0.05)
    other.abort()
    other.specs("run", [1], 1.0)
    assert not stale.exists() and kept.is_dir()
    assert_same(received, make_buckets(first)[:1])
    assert_same(receive(receiver, update, make_buckets(update)), make_buckets(update))
    living.abort()
    other.abort()
    assert list(tmp_path.iterdir()) == []


def test_directories_of_others_are_left_alone_and_empty_ones_of_ours_go(tmp_path: Path) -> None:
    ours = [f"inflight-weights-{digit * 32}" for digit in "0123"]
    (tmp_path / ours[0]).mkdir()
    (tmp_path / ours[1]).write_text("")
    (tmp_path / ours[2]).mkdir()
    (tmp_path / ours[2] / "data").write_text("")
    (tmp_path / ours[3]).symlink_to(tmp_path / ours[2])
    for name in ("inflight-check-1a2b", "inflight-weights-", "else"):
        (tmp_path / name).mkdir()
    handles = open_handles()
    home = PrivateDirectory(tmp_path)
    home.remove()
    home.remove()
    kept = {*ours[1:], "inflight-check-1a2b", "inflight-weights-", "else"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert open_handles() == handles


def test_memory_that_is_used_up_is_an_error_and_not_the_end_of_the_process(sender: ArenaSender, tmp_path: Path) -> None:
    receiver, _ = joined(sender)
    update = plain_update(size_bytes=1 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(TransferError, match="too large"):
            publish(sender, update, make_buckets(update))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    receiver.abort()
