"""Weights through files: what lies in them, what is kept, and what a reader refuses."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inflight.errors import ConfigError, TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import checksum
from inflight.weights.transports import make_sender
from inflight.weights.transports.bucket_files import StoredUpdate
from inflight.weights.transports.files import DirectoryReceiver, DirectorySender
from inflight.wire import TensorSpec, UpdateRef, WeightUpdate
from tests.gates import NEVER_S, SOON_S
from tests.weights.stored import (
    assert_same,
    doomed_sender,
    encoded,
    latest,
    make_buckets,
    make_update,
    payload,
    plain_update,
    publish,
    raw_bytes,
    read_manifest,
    receive,
)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[DirectorySender]:
    sender = DirectorySender(tmp_path)
    sender.specs("run", [1], 5.0)
    yield sender
    sender.abort()


def reader(tmp_path: Path) -> DirectoryReceiver:
    (spec,) = DirectorySender(tmp_path).specs("run", [1], 5.0)
    receiver = DirectoryReceiver(spec)
    receiver.join()
    return receiver


def sessions(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())


def test_without_a_directory_there_is_no_sender() -> None:
    with pytest.raises(ConfigError, match="needs a directory"):
        make_sender("file")


def test_raw_buckets_are_safetensors_files_with_the_tensors_of_the_manifest(
    sender: DirectorySender, tmp_path: Path
) -> None:
    update = make_update()
    buckets = make_buckets(update)
    publish(sender, update, buckets)
    loaded: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "run" / "1-s").glob("*.safetensors")):
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + length) % 64 == 0
        loaded |= load_file(path)
    sent = {spec.name: tensor for bucket in buckets for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True)}
    assert set(loaded) == set(sent)
    for name, tensor in sent.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_bucket_file_is_the_header_and_the_packed_bytes(sender: DirectorySender, tmp_path: Path) -> None:
    update = make_update(encodings=("bfloat16",))
    raw = make_buckets(update)
    buckets = [encoded(update, bucket) if bucket.index == 1 else bucket for bucket in raw]
    publish(sender, update, buckets)
    assert list(load_file(tmp_path / "run" / "1-s" / "00001.safetensors")) == ["payload"]
    for bucket in buckets:
        data = (tmp_path / "run" / "1-s" / f"0000{bucket.index}.safetensors").read_bytes()
        size_bytes = raw_bytes(bucket).numel()
        assert data[len(data) - size_bytes :] == raw_bytes(bucket).numpy().tobytes()
    stored = read_manifest(tmp_path, update.ref)
    assert stored.update == update
    assert [bucket.encoding for bucket in stored.buckets] == ["raw", "bfloat16", "raw", "raw"]
    assert [bucket.checksum for bucket in stored.buckets] == [checksum(raw_bytes(bucket)) for bucket in buckets]


def test_a_payload_of_an_encoding_that_was_not_announced_is_refused(sender: DirectorySender) -> None:
    update = make_update(encodings=("bfloat16",))
    sender.begin(update)
    with pytest.raises(TransferError, match="float8 was not announced"):
        sender.send(WeightBucket(0, (payload(5),), (torch.zeros(5, dtype=torch.uint8),), "float8"), 1.0)


def test_a_version_is_the_latest_once_its_last_bucket_is_stored(sender: DirectorySender, tmp_path: Path) -> None:
    assert latest(tmp_path, "run") is None
    first, second = plain_update(1), plain_update(2)
    publish(sender, first, make_buckets(first))
    assert latest(tmp_path, "run") == first.ref
    sender.end(is_done=False)
    sender.begin(second)
    sender.send(make_buckets(second)[0], 5.0)
    assert latest(tmp_path, "run") == first.ref
    with pytest.raises(TransferError, match="the update is incomplete, or has been removed"):
        read_manifest(tmp_path, second.ref)
    sender.send(make_buckets(second)[1], 5.0)
    assert latest(tmp_path, "run") == second.ref
    assert not list(tmp_path.rglob("*.part"))


def test_a_follower_reads_the_latest_version_by_itself(sender: DirectorySender, tmp_path: Path) -> None:
    update = plain_update(4)
    publish(sender, update, make_buckets(update))
    sender.end(is_done=True)
    sender.abort()
    ref = latest(tmp_path, "run")
    assert ref is not None
    stored = read_manifest(tmp_path, ref)
    receiver = reader(tmp_path)
    receiver.begin(ref)
    received = [receiver.receive((payload(bucket.size_bytes),), 5.0)[0] for bucket in stored.buckets]
    assert_same(received, make_buckets(update))
    assert [checksum(flat) for flat in received] == [bucket.checksum for bucket in stored.buckets]


def test_the_newest_two_versions_stay_and_the_open_one(sender: DirectorySender, tmp_path: Path) -> None:
    for version in range(1, 6):
        update = plain_update(version)
        publish(sender, update, make_buckets(update))
        if version > 1:
            assert f"{version - 1}-s" in sessions(tmp_path)
        sender.end(is_done=True)
    assert sessions(tmp_path) == ["4-s", "5-s"]


def test_a_version_that_is_not_done_stays_until_the_next_begins(sender: DirectorySender, tmp_path: Path) -> None:
    half = plain_update(1)
    sender.begin(half)
    sender.send(make_buckets(half)[0], 5.0)
    sender.end(is_done=False)
    assert_same(receive(reader(tmp_path), half, make_buckets(half)[:1]), make_buckets(half)[:1])
    after = plain_update(2)
    sender.begin(after)
    assert sessions(tmp_path) == ["2-s"]


def test_newest_is_what_was_written_last_since_a_run_may_go_back(sender: DirectorySender, tmp_path: Path) -> None:
    for version in (98, 99, 50, 51, 52):
        update = plain_update(version)
        publish(sender, update, make_buckets(update))
        sender.end(is_done=True)
        time.sleep(0.01)
    assert sessions(tmp_path) == ["51-s", "52-s"]


def test_what_is_not_an_update_is_never_removed(sender: DirectorySender, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("")
    (tmp_path / "run" / "7-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "notes").mkdir()
    (tmp_path / "run" / "1-s").write_text("")
    for version in range(2, 6):
        update = plain_update(version)
        publish(sender, update, make_buckets(update))
        sender.end(is_done=True)
    assert (tmp_path / "elsewhere" / "kept").exists()
    assert {"7-link", "notes", "4-s", "5-s"} == set(sessions(tmp_path))


def test_an_abort_removes_what_is_incomplete_and_keeps_what_is_whole(sender: DirectorySender, tmp_path: Path) -> None:
    whole, half = plain_update(1), plain_update(2)
    publish(sender, whole, make_buckets(whole))
    sender.begin(half)
    sender.send(make_buckets(half)[0], 5.0)
    sender.abort()
    assert sessions(tmp_path) == ["1-s"]
    assert_same(receive(reader(tmp_path), whole, make_buckets(whole)), make_buckets(whole))


def test_what_a_killed_sender_left_is_incomplete_and_goes_with_the_next_update(tmp_path: Path) -> None:
    process = doomed_sender("file", tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    assert latest(tmp_path, "run") is None
    (tmp_path / "run" / ".latest.json.0.part").write_text("")
    update = plain_update(1)
    assert_same(receive(reader(tmp_path), update, make_buckets(update)[:1]), make_buckets(update)[:1])
    sender = DirectorySender(tmp_path)
    sender.specs("run", [1], 5.0)
    after = plain_update(1, session_id="again")
    publish(sender, after, make_buckets(after))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1-again", "latest.json"]


def test_memory_of_the_receiver_is_used_again_with_the_next_update(sender: DirectorySender, tmp_path: Path) -> None:
    receiver = reader(tmp_path)
    update = plain_update(1)
    publish(sender, update, make_buckets(update))
    first = {flat.data_ptr() for flat in receive(receiver, update, make_buckets(update))}
    assert {flat.data_ptr() for flat in receive(receiver, update, make_buckets(update))} == first


def corrupted(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run" / "1-s" / "00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])

    def rewritten(fields: object) -> bytes:
        text = json.dumps(fields).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    if what == "truncated":
        os.truncate(path, len(data) - 1)
    elif what == "too long":
        path.write_bytes(data + b"x")
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "not safetensors":
        path.write_bytes(b"\xff" * len(data))
    elif what == "header no JSON":
        path.write_bytes(data[:8] + b"x" * length + data[8 + length :])
    elif what == "header a list":
        path.write_bytes(rewritten([]))
    elif what == "tensor with a gap":
        path.write_bytes(rewritten(fields | {"w0": fields["w0"] | {"data_offsets": [1, 1 << 16]}}))
    elif what == "tensor unknown":
        path.write_bytes(rewritten(fields | {"w0": fields["w0"] | {"dtype": "I4"}}))
    elif what == "another bucket":
        path.write_bytes((path.parent / "00001.safetensors").read_bytes())
    elif what == "another session":
        path.write_bytes(rewritten(fields | {"__metadata__": fields["__metadata__"] | {"session_id": "x"}}))
    elif what == "a link":
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
    elif what == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif what == "session a link":
        path.parent.rename(tmp_path / "moved")
        path.parent.symlink_to(tmp_path / "moved")
    else:
        assert what == "run a link"
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").symlink_to(tmp_path / "moved")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("truncated", "truncated: it holds 65535 bytes of data, but 65536 were announced"),
        ("too long", "too long"),
        ("empty", "not a safetensors file"),
        ("not safetensors", "not a safetensors file"),
        ("header no JSON", "cannot be used"),
        ("header a list", "damaged"),
        ("tensor with a gap", "does not follow"),
        ("tensor unknown", "damaged"),
        ("another bucket", "another update or bucket"),
        ("another session", "another update or bucket"),
        ("a link", "cannot be opened"),
        ("a pipe", "not a regular file"),
        ("session a link", "cannot be opened"),
        ("run a link", "cannot be opened"),
    ],
)
def test_what_is_not_the_bucket_is_refused_at_once_and_named(
    sender: DirectorySender, tmp_path: Path, what: str, words: str
) -> None:
    update = plain_update()
    publish(sender, update, make_buckets(update))
    receiver = reader(tmp_path)
    corrupted(tmp_path, what)
    receiver.begin(update.ref)
    began = time.monotonic()
    with pytest.raises(TransferError, match=words) as raised:
        receiver.receive((payload(1 << 16),), NEVER_S)
    assert time.monotonic() - began < SOON_S
    assert "00000" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be used"),
        ('{"run_id": "run", "version": -1}', "version"),
        ('{"run_id": "run", "version": 1, "session_id": "../x"}', "session_id"),
        ('{"run_id": "other", "version": 1}', "belongs to run 'other'"),
        (" " * 5000, "at most 4096"),
    ],
)
def test_a_latest_file_that_is_damaged_is_an_error_that_names_it(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest.json").write_text(text)
    with pytest.raises(TransferError, match=words) as raised:
        latest(tmp_path, "run")
    assert "latest.json" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"buckets": []}, "the listed files are not those of the"),
        ({"size_bytes": 1}, "has 65536 bytes, but is stored as 1 bytes of raw"),
        ({"size_bytes": 1 << 40, "encoding": "delta"}, "bytes of delta"),
        ({"file": "../00000.safetensors"}, "buckets.0.file"),
        ({"file": "00007.safetensors"}, "the listed files are not those of the"),
        ({"version": 9}, "another update"),
    ],
)
def test_a_manifest_that_does_not_agree_with_itself_is_an_error(
    sender: DirectorySender, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    update = plain_update()
    publish(sender, update, make_buckets(update))
    path = tmp_path / "run" / "1-s" / "manifest.json"
    fields = json.loads(path.read_text())
    bucket = fields["buckets"][0]
    bucket |= {name: value for name, value in change.items() if name in bucket}
    if "version" in change:
        fields["update"]["version"] = change["version"]
    fields["buckets"] = change.get("buckets", fields["buckets"])
    path.write_text(json.dumps(fields))
    with pytest.raises(TransferError, match=words):
        read_manifest(tmp_path, update.ref)


def test_names_of_any_form_stay_below_the_directory(tmp_path: Path) -> None:
    sender = DirectorySender(tmp_path / "store")
    ref = UpdateRef(run_id="../../etc", version=1, session_id="..")
    sender.specs(ref.run_id, [1], 5.0)
    update = make_update(run_id=ref.run_id, session_id=ref.session_id)
    publish(sender, update, make_buckets(update))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["%2E.%2F..%2Fetc"]
    assert latest(tmp_path / "store", ref.run_id) == ref


def test_a_directory_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TransferError, match="file"):
        DirectorySender(tmp_path / "file").specs("run", [1], 1.0)


def test_a_large_manifest_with_many_tensors_is_read_back(sender: DirectorySender, tmp_path: Path) -> None:
    specs = [TensorSpec(name=f"model.layers.{i}.weight", dtype="bfloat16", shape=(2,)) for i in range(3000)]
    update: WeightUpdate = make_update(specs=specs, cuts=(0, 3000))
    publish(sender, update, make_buckets(update))
    stored: StoredUpdate = read_manifest(tmp_path, update.ref)
    assert stored.update == update
    assert_same(receive(reader(tmp_path), update, make_buckets(update)), make_buckets(update))
