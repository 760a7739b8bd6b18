"""Checks that what a store contains has the documented format, so that independent implementations can read it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import torch
import xxhash

from inflight.conformance.calls import SLACK_S, results
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.tcp_proxy import TcpProxy
from inflight.conformance.transport.buckets import bucket_of, bytes_of
from inflight.conformance.transport.pair import GroupMember, update_of
from inflight.conformance.transport.subject import FORM_S, TransportSubject, failure_of
from inflight.contracts import WeightReceiver
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.wire import DirectorySpec, HttpFileSpec, UpdateRef, WeightUpdate

LEVEL = "bytes"
RUN_ID = ".a run/7% \u00fc"
SESSION = "try_2.a-b"
_NUM_LATER = 3
"""Number of later updates after which an update that is not leased has been removed."""
_LEASE, _LEASE_OF_ANOTHER = "lease-0123456789abcdef", "lease-fedcba9876543210"
_LOWER = -8
"""Number of an update that is stored after others, and whose version is lower than theirs."""
_LEASED_S = 15.0
"""Age at which a lease no longer keeps its update."""
_ALIGNMENT = 64
_REFUSED_S = 1.0
_CUT_BYTES, _NUM_CUT = 300_000, 3
"""The first connection is cut after this many bytes of a bucket that has four times as many; the number of connections
that are cut in all."""
_SLOW_BYTES_PER_S = 10_000
_REPLACED_BYTES_PER_S, _REPLACED_S = 200_000, 0.6
"""Rate at which a bucket is read that is replaced meanwhile, and the time from the start of the read until then."""
_OPENING_BYTES_PER_S = 20_000
"""The same rate for a bucket that is replaced before the reader has read its header."""
_CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


class _Tree(ABC):
    """The files of one run, as a reader sees them."""

    def __init__(self) -> None:
        self._run = "%2E" + quote(RUN_ID[1:], safe="")

    @abstractmethod
    def read(self, *names: str) -> bytes | None:
        """Return the content of a file of the run, or None if it does not exist."""

    @abstractmethod
    def lease(self, update: str, name: str = _LEASE) -> None:
        """Take or renew a reader's lease on an update."""

    def message(self, *names: str) -> Any:
        """Return a JSON file's value, or None if the file does not exist."""
        content = self.read(*names)
        return None if content is None else json.loads(content)


class _Directory(_Tree):
    def __init__(self, spec: DirectorySpec) -> None:
        super().__init__()
        self.path = Path(spec.directory) / self._run

    def read(self, *names: str) -> bytes | None:
        path = self.path.joinpath(*names)
        return path.read_bytes() if path.exists() else None

    def lease(self, update: str, name: str = _LEASE) -> None:
        (self.path / update / name).write_text("")


class _Url(_Tree):
    def __init__(self, spec: HttpFileSpec, client: httpx.Client) -> None:
        super().__init__()
        self._base, self._token, self._client = spec.url, spec.token, client

    def get(self, *names: str, token: str | None = None, **headers: str) -> httpx.Response:
        url = "/".join((self._base, quote(self._run, safe=""), *names))
        secret = self._token if token is None else token
        authorization = {"authorization": f"Bearer {secret}"} if secret else {}
        return self._client.get(url, headers={**authorization, **headers})

    def read(self, *names: str) -> bytes | None:
        answer = self.get(*names)
        require(answer.status_code in (200, 404), f"GET {'/'.join(names)} has status {answer.status_code}")
        return answer.content if answer.status_code == 200 else None

    def lease(self, update: str, name: str = _LEASE) -> None:
        answer = self.get(update, name)
        require(answer.status_code == 200, f"GET of a lease on a complete update has status {answer.status_code}")


@check("T-43", "files", deadline_s=70)
@look_at(
    "names of files and directories; the header of a bucket's file; the order in which a bucket, the manifest and "
    "latest.json appear; which updates are removed"
)
def stored_files_have_their_form(t: TransportSubject) -> None:
    """The files of an update have the documented names and contents: a bucket is a safetensors file, and once every
    bucket has been written, the manifest appears and latest.json names the update. If a bucket cannot be written,
    neither happens, even if an earlier attempt with the same name succeeded. The newest complete updates,
    whatever their versions, and those that are leased are kept, and others are removed. A lease can be renewed. Files
    that another implementation wrote are read if they have this format, and refused if they belong to another bucket,
    are links, or lie in a linked directory. Over HTTP, a reader whose connection is cut continues where it
    stopped, unless the file has been replaced, and bytes that arrive slowly do not extend its timeout."""
    (spec,) = t.sender.specs(RUN_ID, [1], FORM_S)
    receiver = t.receiver(GroupMember(spec))
    results(t.start_joins([receiver]), FORM_S + SLACK_S)
    if isinstance(spec, HttpFileSpec):
        with httpx.Client(timeout=FORM_S, trust_env=False) as client:
            _require_form(t, _Url(spec, client), receiver)
        _require_continued(t, spec)
    else:
        assert isinstance(spec, DirectorySpec)
        _require_form(t, _Directory(spec), receiver)


def _require_form(t: TransportSubject, tree: _Tree, receiver: WeightReceiver) -> None:
    require(tree.message("latest.json") is None, "latest.json exists before an update is complete")
    names = [_require_stored(t, tree, receiver, number) for number in range(2)]
    tree.lease(names[1])
    for number in range(2, 2 + _NUM_LATER):
        names.append(_require_stored(t, tree, receiver, number))
        tree.lease(names[2], _LEASE_OF_ANOTHER)
    _require_kept(tree, names)
    names += _require_four_leased_kept(t, tree, receiver, [*names[1:3], *names[-2:]])
    lower = _require_stored(t, tree, receiver, _LOWER)
    tree.lease(names[-2], "lease-00112233445566ff")  # a new file in its directory does not make an update newer
    for _ in range(2):  # the second time under the same name
        newest = _require_stored(t, tree, receiver, _LOWER + 1)
    words = f"update {lower} was removed although it is the second newest: updates of higher versions are older"
    require(tree.message(lower, "manifest.json") is not None, words)
    if isinstance(tree, _Url):
        _require_answers(tree, newest)
        _require_lease_renewed(t, tree, receiver)
    if isinstance(tree, _Directory):
        _require_lease_ends(t, tree, receiver, names[2])
        _require_foreign_files_are_read(t, tree, receiver)
        _require_incomplete_without_a_bucket(t, tree)
    t.note(updates=[*names, lower, newest])


def example_buckets(number: int) -> list[WeightBucket]:
    """Return two small buckets of tensors of several dtypes and shapes, whose values depend on ``number``."""
    values = torch.arange(12, dtype=torch.float32) + 100 * number
    mixed = [
        values[:6].view(2, 3),
        values[:3].to(torch.bfloat16),
        torch.empty(0),
        values[5].double(),
        values[:5].half(),
    ]
    return [bucket_of(*mixed), bucket_of(values, index=1)]


def _require_stored(t: TransportSubject, tree: _Tree, receiver: WeightReceiver, number: int) -> str:
    """Send an update of two buckets, require that its files have the documented format, and return its name."""
    buckets = example_buckets(number)
    update = update_of(buckets, 10 + number, SESSION if number % 2 else "")
    # A bucket may be raw although its update announces another encoding.
    update = update.model_copy(update={"run_id": RUN_ID, "encodings": ("bfloat16",) if number % 2 else ()})
    name = f"{update.version}-{SESSION}" if number % 2 else f"{update.version}"
    previous = tree.message("latest.json")
    t.sender.begin(update)
    receiver.begin(update.ref)
    for bucket in buckets:
        is_early = tree.message(name, "manifest.json") is not None or tree.message("latest.json") != previous
        words = f"before bucket {bucket.index} of two is stored"
        require(not is_early, f"{words}, manifest.json of the update exists, or latest.json has changed")
        (receive,) = t.start_receives([receiver], bucket)
        results([receive, t.start_send(bucket)], FORM_S + SLACK_S)
        _require_safetensors(tree.read(name, f"{bucket.index:05}.safetensors"), update.ref, bucket)
    manifest = tree.message(name, "manifest.json") or {}
    require(
        bool(manifest) and WeightUpdate.model_validate(manifest["update"]) == update,
        f"manifest.json of a complete update does not contain its announcement: {str(manifest)[:300]}",
    )
    listed = [
        {key: it.get(key) for key in ("file", "size_bytes", "checksum", "encoding")} for it in manifest["buckets"]
    ]
    due = [_listed(bucket) for bucket in buckets]
    require(listed == due, f"manifest.json lists the buckets {listed}, not {due}")
    found = tree.message("latest.json")
    require(
        found is not None and UpdateRef.model_validate(found) == update.ref,
        f"after update {name} was complete, latest.json contains {found}",
    )
    t.sender.end(is_done=True)
    return name


def data_of(bucket: WeightBucket) -> bytes:
    """Return the bytes of all tensors of a bucket, in order."""
    return b"".join(bytes(bytes_of(tensor).numpy().tobytes()) for tensor in bucket.tensors)


def _listed(bucket: WeightBucket) -> dict[str, Any]:
    data = data_of(bucket)
    digest = xxhash.xxh3_128_hexdigest(data)
    return {"file": f"{bucket.index:05}.safetensors", "size_bytes": len(data), "checksum": digest, "encoding": "raw"}


def _header(ref: UpdateRef, bucket: WeightBucket) -> dict[str, Any]:
    identity = {"run_id": ref.run_id, "version": str(ref.version), "session_id": ref.session_id}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **identity, "bucket": str(bucket.index)}}
    begin = 0
    for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True):
        end = begin + tensor.nbytes
        header[spec.name] = {"dtype": _CODES[tensor.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    return header


def _require_safetensors(content: bytes | None, ref: UpdateRef, bucket: WeightBucket) -> None:
    what = f"the file of bucket {bucket.index}"
    require(content is not None, f"{what} does not exist after its send has returned")
    assert content is not None
    start = 8 + int.from_bytes(content[:8], "little")
    require(start <= len(content) and start % _ALIGNMENT == 0, f"the data of {what} begins at byte {start}")
    found, due = json.loads(content[8:start]), _header(ref, bucket)
    require(found == due, f"the header of {what} is {json.dumps(found)[:400]}, not {json.dumps(due)[:400]}")
    in_order = [name for name in found if name != "__metadata__"]
    require(in_order == [spec.name for spec in bucket.specs], f"{what} has its tensors in the order {in_order}")
    require(content[start:] == data_of(bucket), f"{what} contains other bytes than those of the tensors that were sent")


def _require_kept(tree: _Tree, names: Sequence[str]) -> None:
    kept = {name: tree.message(name, "manifest.json") is not None for name in names}
    require(not kept[names[0]], f"{len(names) - 1} updates later, update {names[0]}, which is not leased, still exists")
    require(kept[names[1]], f"{_NUM_LATER} updates later, update {names[1]}, which is leased, has been removed")
    require(kept[names[-1]], f"update {names[-1]}, the newest one, has been removed")
    if isinstance(tree, _Directory):
        require(kept[names[-2]], f"update {names[-2]}, the second newest, has been removed")
        left = [str(it.relative_to(tree.path)) for it in tree.path.rglob("*.part")]
        require(not left, f"temporary files are left: {left}")


def _require_four_leased_kept(
    t: TransportSubject, tree: _Tree, receiver: WeightReceiver, names: list[str]
) -> list[str]:
    """Require that four leased updates are kept in addition to the newest two, even if one of those is leased too.

    Two of the four must already be leased. Returns the names of the updates that this function stores.
    """
    leases = [f"lease-{i:016x}" for i in range(3)]
    for name, lease in zip(names[2:], leases, strict=False):
        tree.lease(name, lease)
    first = _NUM_LATER + 2
    later = [_require_stored(t, tree, receiver, number) for number in (first, first + 1)]
    tree.lease(later[-1], leases[-1])
    later.append(_require_stored(t, tree, receiver, first + 2))
    lost = [name for name in [*names, *later[1:]] if tree.message(name, "manifest.json") is None]
    words = f"updates {names} are leased, {later[1:]} are the newest, and the first of those is leased too"
    require(not lost, f"{words}, but {lost} have been removed")
    return later


def _require_answers(tree: _Url, name: str) -> None:
    """Require the statuses and headers that readers over HTTP depend on."""
    file = (name, "00001.safetensors")
    whole = tree.get(*file)
    part = tree.get(*file, range="bytes=9-40")
    statuses = {
        "without a token": (tree.get(*file, token="").status_code, 401),
        "with a wrong token": (tree.get("latest.json", token="wrong").status_code, 401),
        "of an update that does not exist": (tree.get("999", "00000.safetensors").status_code, 404),
        "of a lease on an update that does not exist": (tree.get("999", _LEASE).status_code, 404),
        "of a range": (part.status_code, 206),
    }
    wrong = {f"a GET {what}": found for what, (found, due) in statuses.items() if found != due}
    require(
        not wrong,
        f"GETs have wrong statuses {wrong}; all GETs, in order, should have {[due for _, due in statuses.values()]}",
    )
    require(part.content == whole.content[9:41], "the range from byte 9 to byte 40 differs from the whole file there")
    tags = [answer.headers.get("etag") for answer in (whole, part)]
    require(tags[0] is not None and tags[0] == tags[1], f"two answers for one file have the ETags {tags}")


def _require_lease_renewed(t: TransportSubject, tree: _Url, receiver: WeightReceiver) -> None:
    """Require that an update whose lease has been renewed is kept for longer than the first lease lasts."""
    name = _require_stored(t, tree, receiver, 20)
    for _ in range(2):
        tree.lease(name)
        time.sleep(0.6 * _LEASED_S)
    for number in range(21, 21 + _NUM_LATER):
        _require_stored(t, tree, receiver, number)
    is_kept = tree.message(name, "manifest.json") is not None
    words = f"{1.2 * _LEASED_S:g} s after its first lease and {0.6 * _LEASED_S:g} s after the lease was renewed"
    require(is_kept, f"update {name} has been removed {words}")


def _require_continued(t: TransportSubject, spec: HttpFileSpec) -> None:
    """Require that a bucket arrives whose first connections are cut in the middle, and that a receive ends at its
    timeout if bytes arrive too slowly."""
    bucket = bucket_of(torch.arange(_CUT_BYTES, dtype=torch.float32))
    update = update_of([bucket], 50).model_copy(update={"run_id": RUN_ID})
    with _proxy_to(spec.url) as (proxy, url):
        receiver = t.receiver(GroupMember(spec.model_copy(update={"url": url})))
        t.start(receiver.join, "the join over a proxy").result(FORM_S)
        t.sender.begin(update)
        receiver.begin(update.ref)
        results([t.start_send(bucket)], FORM_S + SLACK_S)
        proxy.cut_after_bytes, proxy.num_cuts = _CUT_BYTES, _NUM_CUT
        (receive,) = t.start_receives([receiver], bucket)
        (arrived,) = results([receive], FORM_S + SLACK_S)[0]
        num_cut = _NUM_CUT - proxy.num_cuts
        proxy.cut_after_bytes, proxy.bytes_per_s = None, _SLOW_BYTES_PER_S
        receiver.begin(update.ref)
        (receive,) = t.start_receives([receiver], bucket, _REFUSED_S)
        error = failure_of(receive, _REFUSED_S + SLACK_S)
        t.note(bytes_that_arrive_too_slowly=str(error), seconds=receive.ending(0.0).seconds)
        _require_not_mixed(t, proxy, receiver, bucket, update, _OPENING_BYTES_PER_S, num_cuts=0)
        _require_not_mixed(t, proxy, receiver, bucket, update, _REPLACED_BYTES_PER_S, num_cuts=_NUM_CUT)
        receiver.abort()
    t.note(connections_cut=num_cut)
    require(num_cut > 0, "no connection to the spec's url carried the bucket")
    wrong = int((bytes_of(arrived) != bytes_of(bucket.tensors[0])).sum())
    require(
        not wrong, f"after {num_cut} connections were cut in the middle of a bucket, {wrong} of its bytes are wrong"
    )


def _require_not_mixed(
    t: TransportSubject,
    proxy: TcpProxy,
    receiver: WeightReceiver,
    bucket: WeightBucket,
    update: WeightUpdate,
    bytes_per_s: int,
    num_cuts: int,
) -> None:
    """Require that a receive either returns one of two buckets unmixed or raises TransferError, if another attempt
    replaces the first bucket with the second while it is being read at ``bytes_per_s``, and ``num_cuts`` connections
    are then cut."""
    t.sender.begin(update)
    results([t.start_send(bucket)], FORM_S + SLACK_S)
    proxy.bytes_per_s = bytes_per_s
    receiver.begin(update.ref)
    (receive,) = t.start_receives([receiver], bucket)
    receive.has_ended(_REPLACED_S)
    other = bucket_of(*(tensor + 0.5 for tensor in bucket.tensors))
    t.sender.begin(update_of([other], update.version).model_copy(update={"run_id": RUN_ID}))
    results([t.start_send(other)], FORM_S + SLACK_S)
    proxy.cut_after_bytes, proxy.num_cuts, proxy.bytes_per_s = 0 if num_cuts else None, num_cuts, None
    ending = receive.ending(FORM_S + SLACK_S)
    proxy.cut_after_bytes, proxy.num_cuts = None, 0
    if isinstance(ending.error, TransferError):
        t.note(bucket_that_is_replaced_while_it_is_read=str(ending.error))
        return
    (arrived,) = receive.result(0.0)
    num_of_each = [int((arrived == it.tensors[0]).sum()) for it in (bucket, other)]
    t.note(elements_of_a_bucket_and_of_its_replacement=num_of_each)
    words = f"a bucket replaced during a read is neither the old nor the new one; elements equal to each: {num_of_each}"
    require(len(arrived) in num_of_each, words)


@contextlib.contextmanager
def _proxy_to(url: str) -> Iterator[tuple[TcpProxy, str]]:
    """Run a proxy to the server at ``url`` in another thread; yield the proxy and the URL under which it forwards."""
    to, loop = urlsplit(url), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(call: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(call, loop).result(FORM_S)

    proxy = TcpProxy(to.hostname or "", to.port or 0)
    try:
        run(proxy.start())
        yield proxy, to._replace(netloc=f"127.0.0.1:{proxy.port}").geturl()
    finally:
        run(proxy.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(FORM_S)
        loop.close()


def _require_lease_ends(t: TransportSubject, tree: _Directory, receiver: WeightReceiver, name: str) -> None:
    """Require that an update is removed once its lease has not been renewed for too long."""
    lease = tree.path / name / _LEASE_OF_ANOTHER
    old = lease.stat().st_mtime - _LEASED_S - 5.0
    os.utime(lease, (old, old))
    for number in range(10, 12):
        _require_stored(t, tree, receiver, number)
    is_kept = (tree.path / name / "manifest.json").exists()
    require(not is_kept, f"update {name} still exists although its lease is older than {_LEASED_S:g} s")


def _require_incomplete_without_a_bucket(t: TransportSubject, tree: _Directory) -> None:
    """Require that an update is not complete if one of its buckets could not be written."""
    buckets, latest = example_buckets(30), tree.message("latest.json")
    update = update_of(buckets, 90).model_copy(update={"run_id": RUN_ID})
    t.sender.begin(update)
    blocked = tree.path / "90" / "00000.safetensors"
    (blocked / "in the way").mkdir(parents=True)
    errors = [failure_of(t.start_send(bucket), FORM_S + SLACK_S) for bucket in buckets]
    t.note(bucket_that_cannot_be_written=[str(error) for error in errors])
    is_complete = tree.message("90", "manifest.json") is not None or tree.message("latest.json") != latest
    require(not is_complete, "an update has a manifest.json or is named in latest.json, but lacks a bucket")


def _require_foreign_files_are_read(t: TransportSubject, tree: _Directory, receiver: WeightReceiver) -> None:
    """Require that a bucket's file that the kit has written is received, unless it belongs to another bucket, or the
    file or one of its parent directories is a link."""
    bucket = example_buckets(20)[0]
    ref = UpdateRef(run_id=RUN_ID, version=77, session_id=SESSION)
    path = tree.path / f"77-{SESSION}" / "00000.safetensors"
    path.parent.mkdir()
    faults = {key: {key: value} for key, value in (("run_id", "other"), ("version", "76"), ("bucket", "1"))}
    linked = {"a link": path, "in a directory that is a link": path.parent, "in a run that is a link": tree.path}
    for what, changed in {**faults, **{what: {} for what in linked}, "right": {}}.items():
        header = _header(ref, bucket)
        header["__metadata__"].update(changed)
        text = json.dumps(header, separators=(", ", ": ")).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data_of(bucket))
        if what in linked:
            elsewhere = linked[what].with_name("elsewhere")
            linked[what].rename(elsewhere)
            linked[what].symlink_to(elsewhere)
        receiver.begin(ref)
        timeout_s = FORM_S if what == "right" else _REFUSED_S
        (receive,) = t.start_receives([receiver], bucket, timeout_s)
        if what != "right":
            error = failure_of(receive, timeout_s + SLACK_S)
            t.note(**{f"a file with a fault ({what})": str(error)})
            if what in linked:
                linked[what].unlink()
                elsewhere.rename(linked[what])
            continue
        arrived = results([receive], FORM_S + SLACK_S)[0]
        is_same = all(bytes_of(a).equal(bytes_of(b)) for a, b in zip(arrived, bucket.tensors, strict=True))
        require(is_same, "a safetensors file that the kit wrote was received with other bytes")
