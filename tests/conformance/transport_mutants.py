"""Gloo or a store with one fault at a time: for every check of transports at least one that it must catch.

A fault changes methods of the sender or of every receiver of a new pair; which one is selected by name, or by a file
that contains the name, so that one session of the kit can check many.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from inflight.contracts import Transport, WeightReceiver, WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import pack
from inflight.weights.transports import (
    bucket_files,
    file_server,
    groups,
    named_transport,
    private_directory,
    process_group,
    ranges,
    store,
)
from inflight.weights.transports.bucket_records import BucketRecord, _record_name, round_up_to_pages, write_record
from inflight.weights.transports.store import Attempt, read_text, regular_file
from inflight.wire import ProcessGroupSpec, TensorSpec, TransportSpec, UpdateRef, WeightUpdate

Fault = Callable[[Any], None]
LEFT: list[Any] = []
ONE_LISTENER: list[socket.socket] = []
OPENED: list[Any] = []
"""The senders of this process that have opened a group."""


@dataclass(frozen=True)
class Mutant:
    check: str
    what: str
    sender: Fault = lambda sender: None
    receiver: Fault = lambda receiver: None
    both: Callable[[], tuple[Fault, Fault]] | None = None
    """Makes the faults of both ends, which share state."""
    transport: str = "gloo"


class Spoiled(Transport):
    """A transport with one fault."""

    def __init__(self, fault: Mutant) -> None:
        self._right = named_transport(fault.transport)
        self._spoil_sender, self._spoil_receiver = fault.both() if fault.both else (fault.sender, fault.receiver)

    @property
    def name(self) -> str:
        return self._right.name

    @property
    def spec_type(self) -> type[TransportSpec]:
        return self._right.spec_type

    @property
    def needs_gpu(self) -> bool:
        return self._right.needs_gpu

    def sender(self, **options: Any) -> WeightSender:
        made = self._right.sender(**options)
        self._spoil_sender(made)
        return made

    def receiver(self, spec: TransportSpec, **options: Any) -> WeightReceiver:
        made = self._right.receiver(spec, **options)
        self._spoil_receiver(made)
        return made


def make(mutant: str = "", mutant_file: str = "") -> Spoiled:
    """The function that the kit calls; the file, if there is one, contains the name. Without one, it is right."""
    name = Path(mutant_file).read_text() if mutant_file else mutant
    return Spoiled(MUTANTS[name] if name else Mutant("", "", insists_on_begin("send"), insists_on_begin("receive")))


def receives_ahead_into_two_buffers(receiver: Any) -> None:
    receive_ahead, buffers = receiver.receive_ahead, [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)]

    def ahead(specs: Sequence[TensorSpec], timeout_s: float) -> None:
        buffers.reverse()
        receiver._buffer = lambda size_bytes: buffers[0][:size_bytes]
        try:
            receive_ahead(specs, timeout_s)
        finally:
            del receiver._buffer

    receiver.receive_ahead = ahead


def keeps_arenas_of_kept_tensors(sender: Any) -> None:
    """Treat arenas that receivers still use as if they ended with the sender."""
    memory = sender._memory
    sender._memory = SimpleNamespace(
        **{name: getattr(memory, name) for name in dir(memory) if not name.startswith("__")}
        | {"outlives_sender": False}
    )


def lists_tensors_by_name(sender: Any) -> None:
    send, header = sender.send, bucket_files.safetensors_header

    def sorted_header(specs: Sequence[TensorSpec], *arguments: Any) -> bytes:
        return header(sorted(specs, key=lambda spec: spec.name), *arguments)

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        bucket_files.safetensors_header = sorted_header
        try:
            send(bucket, timeout_s)
        finally:
            bucket_files.safetensors_header = header

    sender.send = spoiled


def counts_unwritten_buckets(sender: Any) -> None:
    store, write = sender._store, sender._store._write

    def written(*arguments: Any) -> None:
        with contextlib.suppress(OSError):
            write(*arguments)

    store._write = written


def reads_without_a_deadline(receiver: Any) -> None:
    """Give each read from the socket the whole timeout."""

    def receive_bytes(ref: UpdateRef, index: int, size_bytes: int, attempt: Attempt) -> torch.Tensor:
        flat: torch.Tensor = receiver._memory.take(size_bytes)
        names = (store.run_name(ref.run_id), store.session_name(ref), bucket_files.bucket_name(index))
        receiver._fill(names, ref, index, flat, attempt)
        return flat

    receiver._receive_bytes = receive_bytes


def uses_abandoned_arenas_again(sender: Any) -> None:
    end = sender.end
    sender.end = lambda *, is_done: end(is_done=True)


def loses_rewritten_tails(sender: Any) -> None:
    """Where a large bucket replaces another, only whole pieces of 16 MiB are written."""
    send, piece = sender.send, 16 << 20

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        size_bytes = sum(spec.size_bytes for spec in bucket.specs)
        memory = sender.reserve(bucket.index, size_bytes) if size_bytes > piece else None
        tail = None if memory is None else memory[size_bytes // piece * piece :]
        before = None if tail is None else tail.clone()
        send(bucket, timeout_s)
        if tail is not None and before is not None:
            tail.copy_(before)

    sender.send = spoiled


def keeps_the_highest_versions(sender: Any) -> None:
    store, prune = sender._store, sender._store._prune

    def pruned(directory: Path) -> None:
        prune(directory)
        complete = [manifest.parent for manifest in directory.glob("*/manifest.json")]
        latest = json.loads((directory / "latest.json").read_text())["version"]
        versions = {int(path.name.partition("-")[0]): path for path in complete}
        if latest == min(versions) and len(versions) > 2:
            shutil.rmtree(versions[latest])

    store._prune = pruned


def insists_on_begin(method: str) -> Fault:
    """Not a fault: buckets belong to an update, which begins on both sides."""

    def insist(end: Any) -> None:
        right, begin, begun = getattr(end, method), end.begin, []

        def start(update: Any) -> None:
            begun.append(update)
            begin(update)

        def strict(what: Any, timeout_s: float) -> Any:
            if not begun and end._group is not None:
                raise AssertionError(f"{method} before begin")
            return right(what, timeout_s)

        end.begin = start
        setattr(end, method, strict)

    return insist


def respecified(change: Callable[[int, ProcessGroupSpec], dict[str, Any]]) -> Fault:
    """``change(i, spec)`` returns the changed fields of the spec of endpoint i."""

    def spoil(sender: Any) -> None:
        specs = sender.specs

        def spoiled(run_id: str, num_ranks: list[int], timeout_s: float) -> list[ProcessGroupSpec]:
            opened = specs(run_id, num_ranks, timeout_s)
            opened = [spec.model_copy(update=change(i, spec)) for i, spec in enumerate(opened)]
            sender._opened = sender._opened.model_copy(update=change(0, opened[0]))
            return opened

        sender.specs = spoiled

    return spoil


def resent(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Every tensor is sent as returned by ``change``."""

    def spoil(sender: Any) -> None:
        send = sender.send

        def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
            tensors = tuple(change(tensor) for tensor in bucket.tensors)
            send(WeightBucket(bucket.index, bucket.specs, tensors), timeout_s)

        sender.send = spoiled

    return spoil


def received(change: Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]) -> Fault:
    """Every bucket is returned as returned by ``change(receiver, tensors)``."""

    def spoil(receiver: Any) -> None:
        receive = receiver.receive
        receiver.receive = lambda specs, timeout_s: change(receiver, receive(specs, timeout_s))

    return spoil


def answered(method: str, text: str, answer: Callable[..., Any]) -> Fault:
    """If a method fails with an error that contains ``text``, ``answer`` is called with its arguments instead."""

    def spoil(end: Any) -> None:
        right = getattr(end, method)

        def spoiled(*args: Any) -> Any:
            try:
                return right(*args)
            except TransferError as error:
                if text not in str(error):
                    raise
                return answer(*args)

        setattr(end, method, spoiled)

    return spoil


def raising(error: Exception) -> Callable[..., Any]:
    def answer(*args: Any) -> Any:
        raise error

    return answer


def timed(method: str, seconds: Callable[[float], float]) -> Fault:
    """``receive`` and ``send`` with another timeout than the one given."""

    def spoil(end: Any) -> None:
        right = getattr(end, method)
        setattr(end, method, lambda what, timeout_s: right(what, seconds(timeout_s)))

    return spoil


def waits_long_for_what_was_begun_ahead(receiver: Any) -> None:
    receive = receiver.receive
    receiver.receive = lambda specs, timeout_s: receive(specs, timeout_s if receiver._ahead is None else 30.0)


def keeps_what_it_receives_ahead(receiver: Any) -> None:
    abort, kept = receiver.abort, []

    def aborting() -> None:
        kept.append(receiver._ahead)
        abort()

    receiver.abort = aborting


def waits_no_longer_than_the_group(receiver: Any) -> None:
    receive = receiver.receive
    receiver.receive = lambda specs, timeout_s: receive(specs, min(timeout_s, receiver._spec.timeout_s))


def aborts_only_if(condition: Callable[[Any], bool]) -> Fault:
    def spoil(end: Any) -> None:
        abort = end.abort
        end.abort = lambda: abort() if condition(end) else None

    return spoil


def listens_everywhere(sender: Any) -> None:
    join, abort, opened = sender.join, sender.abort, []

    def spoiled_join() -> None:
        opened.append(socket.create_server(("0.0.0.0", 0)))
        join()

    def spoiled_abort() -> None:
        while opened:
            opened.pop().close()
        abort()

    sender.join, sender.abort = spoiled_join, spoiled_abort


def leaves_a_listener(sender: Any) -> None:
    join = sender.join

    def spoiled() -> None:
        LEFT.append(socket.create_server(("127.0.0.1", 0)))
        join()

    sender.join = spoiled


def knows_no_group_of_two(receiver: Any) -> None:
    join = receiver.join

    def spoiled() -> None:
        if receiver._spec.world_size == 2:
            raise TransferError("joining failed: a ring needs three ranks")
        join()

    receiver.join = spoiled


def wants_ranks_in_order() -> tuple[Fault, Fault]:
    seen: set[int] = set()

    def spoil_sender(sender: Any) -> None:
        specs = sender.specs

        def spoiled(*args: Any) -> list[ProcessGroupSpec]:
            seen.clear()
            return specs(*args)

        sender.specs = spoiled

    def spoil_receiver(receiver: Any) -> None:
        join, rank = receiver.join, receiver._spec.rank

        def spoiled() -> None:
            if rank > 1 and rank - 1 not in seen:
                raise TransferError(f"joining failed: rank {rank} found no rank {rank - 1}")
            seen.add(rank)
            join()

        receiver.join = spoiled

    return spoil_sender, spoil_receiver


def joins_when_it_receives(receiver: Any) -> None:
    join, receive = receiver.join, receiver.receive
    joining: list[threading.Thread] = []

    def spoiled_join() -> None:
        joining.append(threading.Thread(target=join, daemon=True))
        joining[0].start()

    def spoiled_receive(*args: Any) -> list[torch.Tensor]:
        for thread in joining:
            thread.join()
        return receive(*args)

    receiver.join, receiver.receive = spoiled_join, spoiled_receive


def takes_torchs_default_group(sender: Any) -> None:
    join, abort = sender.join, sender.abort

    def spoiled_join() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        join()

    def spoiled_abort() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        abort()

    sender.join, sender.abort = spoiled_join, spoiled_abort


def in_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride(), tensor.storage_offset())


def adjoining_as_they_lie(sender: Any) -> None:
    """Send tensors that are adjacent in memory in storage order, whatever their strides."""
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        tensors = [tensor for tensor in bucket.tensors if tensor.nbytes]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors[:-1]]
        if len(storages) == 1 and ends == [tensor.data_ptr() for tensor in tensors[1:]] and ends:
            bucket = WeightBucket(bucket.index, bucket.specs, tuple(map(in_storage_order, bucket.tensors)))
        send(bucket, timeout_s)

    sender.send = spoiled


def from_the_beginning_of_its_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


def at_aligned_offsets(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    flat, offset, found = pack(tensors), 0, []
    for tensor in tensors:
        start = offset - offset % tensor.itemsize
        found.append(flat[start : start + tensor.nbytes].clone().view(tensor.dtype).reshape(tensor.shape))
        offset += tensor.nbytes
    return found


def only_16_mb(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        tensor.reshape(-1)[(16 << 20) // tensor.itemsize :] = 0
    return tensors


def without_odd_tail(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [without_rest(tensor, 4) for tensor in tensors]


def without_last_chunk(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [without_rest(tensor, 1 << 16) if tensor.nbytes > 1 << 16 else tensor for tensor in tensors]


def without_rest(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    if tensor.nbytes % size_bytes:
        data = tensor.reshape(-1).view(torch.uint8)
        data[-(tensor.nbytes % size_bytes) :] = 0
    return tensor


def exchanged(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The first two tensors of a bucket with the same shape and dtype are exchanged."""
    for i, one in enumerate(tensors):
        for j in range(i):
            if (tensors[j].shape, tensors[j].dtype) == (one.shape, one.dtype):
                return [*tensors[:j], one, *tensors[j + 1 : i], tensors[j], *tensors[i + 1 :]]
    return tensors


def by_name(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors are in the order of names such as ``tensor 10`` and ``tensor 2`` where all have one shape."""
    order = sorted(range(len(tensors)), key=str)
    swapped = [tensors[i] for i in order]
    return [a if a.shape == b.shape and a.dtype == b.dtype else b for a, b in zip(swapped, tensors, strict=True)]


def only_1024(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors[:1024], *map(torch.zeros_like, tensors[1024:])]


def maps_no_empty_memory(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if not sum(tensor.nbytes for tensor in tensors):
        raise ValueError("cannot map an empty buffer")
    return tensors


def spoils_what_came_ahead(spoil: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def apply(receiver: Any) -> None:
        receive = receiver.receive

        def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
            was_ahead = receiver._ahead is not None
            found = receive(specs, timeout_s)
            return [spoil(tensor) for tensor in found] if was_ahead else found

        receiver.receive = spoiled

    return apply


def without_large_tail(tensor: torch.Tensor) -> torch.Tensor:
    """Zero the bytes after the first 16 MiB."""
    tensor.flatten().view(torch.uint8)[1 << 24 :] = 0
    return tensor


def sends_strays_before_an_update(sender: Any) -> None:
    send = sender.send

    def stray(bucket: WeightBucket, timeout_s: float) -> None:
        send(replace(bucket, ref=None) if sender._ref is None else bucket, timeout_s)

    sender.send = stray


def joins_with_a_timeout_for_each_rank(sender: Any) -> None:
    specs = sender.specs

    def spoiled(run_id: str, num_ranks: list[int], timeout_s: float) -> list[ProcessGroupSpec]:
        opened = specs(run_id, num_ranks, timeout_s)
        sender._opened = sender._opened.model_copy(update={"timeout_s": sum(num_ranks) * timeout_s})
        return opened

    sender.specs = spoiled


def joins_with_twice_the_timeout(receiver: Any) -> None:
    receiver._spec = receiver._spec.model_copy(update={"timeout_s": 2 * receiver._spec.timeout_s})


def sends_with_a_timeout_for_each_rank(sender: Any) -> None:
    send = sender.send
    sender.send = lambda bucket, timeout_s: send(bucket, (sender._opened.world_size - 1) * timeout_s)


def receives_with_a_timeout_for_each_read(receiver: Any) -> None:
    receive = receiver.receive

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        num_reads = 1 + sum(spec.size_bytes for spec in specs) // (1 << 22)
        return receive(specs, num_reads * timeout_s)

    receiver.receive = spoiled


def keeps_the_old_group(sender: Any) -> None:
    specs = sender.specs

    def spoiled(*args: Any) -> list[ProcessGroupSpec]:
        LEFT.append((sender._hosted, sender._group))
        return specs(*args)

    sender.specs = spoiled


def keeps_old_connections(sender: Any) -> None:
    """The next group does not end the old one, whose ranks keep waiting."""
    specs = sender.specs

    def spoiled(*args: Any) -> list[ProcessGroupSpec]:
        LEFT.append(sender._group)
        sender._group = None
        return specs(*args)

    sender.specs = spoiled


def leaves_a_descriptor_to_the_next_group(sender: Any) -> None:
    specs = sender.specs

    def spoiled(*args: Any) -> list[ProcessGroupSpec]:
        if sender._group is not None:
            LEFT.append(os.open(os.devnull, os.O_RDONLY))
        return specs(*args)

    sender.specs = spoiled


def leaves_the_file_of_an_unformed_group(sender: Any) -> None:
    specs, abort, files = sender.specs, sender.abort, []

    def spoiled_specs(*args: Any) -> list[ProcessGroupSpec]:
        opened = specs(*args)
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)
        files.append(Path(name))
        return opened

    def spoiled_abort() -> None:
        if sender._group is not None:
            files.pop().unlink()
        abort()

    sender.specs, sender.abort = spoiled_specs, spoiled_abort


def leaves_in_each_group(make: Callable[[], Any]) -> Fault:
    def spoil(sender: Any) -> None:
        join = sender.join

        def spoiled() -> None:
            LEFT.append(make())
            join()

        sender.join = spoiled

    return spoil


def sends_a_stale_bucket(sender: Any) -> None:
    """What could not be sent is sent first in the next group."""
    send, left = sender.send, []

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        stale = [it for it in left if it.specs == bucket.specs]
        left.clear()
        try:
            send(*stale[-1:] or [bucket], timeout_s)
        except TransferError:
            left.append(bucket)
            raise

    sender.send = spoiled


def packs_an_index_once(sender: Any) -> None:
    send, packed = sender.send, {}

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        key = (bucket.index, bucket.specs)
        kept = packed.setdefault(key, tuple(tensor.clone() for tensor in bucket.tensors))
        send(WeightBucket(bucket.index, bucket.specs, kept), timeout_s)

    sender.send = spoiled


def zero_on_rank_three(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors] if receiver._spec.rank == 3 else tensors


def only_the_first_rank_of_an_endpoint() -> tuple[Fault, Fault]:
    """All ranks of an endpoint except the first receive zeros."""
    firsts: set[tuple[str, int]] = set()

    def note_ranks(i: int, spec: ProcessGroupSpec) -> dict[str, Any]:
        firsts.add((spec.group_name, spec.rank))
        return {}

    def change(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        is_first = (receiver._spec.group_name, receiver._spec.rank) in firsts
        return tensors if is_first else [torch.zeros_like(tensor) for tensor in tensors]

    return respecified(note_ranks), received(change)


def where_the_last_one_lay(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    place = receiver.__dict__.setdefault("place", {})
    return [place.setdefault((i, t.shape, t.dtype), torch.empty_like(t)).copy_(t) for i, t in enumerate(tensors)]


def recycles_at_the_next_update(receiver: Any) -> None:
    """The first bucket after a begin reuses the memory of the last bucket before it."""
    begin, receive = receiver.begin, receiver.receive
    last: list[torch.Tensor] = []
    places: list[torch.Tensor] = []

    def begun(ref: UpdateRef) -> None:
        begin(ref)
        places[:] = last

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        last[:] = receive(specs, timeout_s)
        if [(t.shape, t.dtype) for t in places] == [(t.shape, t.dtype) for t in last]:
            last[:] = [place.copy_(tensor) for place, tensor in zip(places, last, strict=True)]
        places.clear()
        return list(last)

    receiver.begin, receiver.receive = begun, spoiled


def recycles_after_two_updates(receiver: Any) -> None:
    """Tensors of an update are overwritten when the second update after it begins."""
    begin, receive = receiver.begin, receiver.receive
    updates: list[list[torch.Tensor]] = [[], []]

    def begun(ref: UpdateRef) -> None:
        begin(ref)
        for tensor in updates.pop(0):
            tensor.zero_()
        updates.append([])

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        arrived: list[torch.Tensor] = receive(specs, timeout_s)
        updates[-1] += arrived
        return arrived

    receiver.begin, receiver.receive = begun, spoiled


def parts_of_a_buffer_in_its_order(sender: Any) -> None:
    """Tensors that together fill one buffer are sent as that buffer."""
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        tensors = bucket.tensors
        inside = sorted(tensors, key=lambda tensor: tensor.data_ptr())
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in inside]
        if len(tensors) > 1 and [tensor.data_ptr() for tensor in inside[1:]] == ends[:-1]:
            flat = torch.cat([tensor.reshape(-1) for tensor in inside]).split([tensor.numel() for tensor in tensors])
            tensors = tuple(part.reshape(tensor.shape) for part, tensor in zip(flat, tensors, strict=True))
        send(WeightBucket(bucket.index, bucket.specs, tensors), timeout_s)

    sender.send = spoiled


def binds_to_loopbacks_first_address(sender: Any) -> None:
    join = sender.join

    def spoiled() -> None:
        sender._address = "127.0.0.1"
        join()

    sender.join = spoiled


def records_before_it_writes(sender: Any) -> None:
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        arena, size_bytes = sender._arena, sum(tensor.nbytes for tensor in bucket.tensors)
        record = {"arena": arena.path.name, "offset": arena.used_bytes, "size_bytes": size_bytes}
        write_record(sender._home.path, BucketRecord(ref=sender._update.ref, index=bucket.index, **record))
        deadline = time.monotonic() + 1.0
        while arena.is_free() and time.monotonic() < deadline:  # until a receiver that waits has found the record
            time.sleep(0.001)
        send(bucket, timeout_s)

    sender.send = spoiled


def locks_for_itself_alone(receiver: Any) -> None:
    map_memory = receiver._memory.map_memory

    def spoiled(fd: int, *others: Any) -> torch.Tensor:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return map_memory(fd, *others)

    receiver._memory.map_memory = spoiled


def finds_records_by_version(sender: Any) -> None:
    """Buckets of any session of a version have the same names."""
    begin = sender.begin
    sender.begin = lambda update: begin(update.model_copy(update={"session_id": ""}))


def asks_for_records_by_version(receiver: Any) -> None:
    begin = receiver.begin
    receiver.begin = lambda ref: begin(ref.model_copy(update={"session_id": ""}))


def keeps_the_update_open(sender: Any) -> None:
    """Opening another group does not end the open update."""
    specs = sender.specs

    def spoiled(*args: Any) -> Any:
        end, sender.end = sender.end, lambda *, is_done: None
        try:
            return specs(*args)
        finally:
            sender.end = end

    sender.specs = spoiled


def keeps_records(sender: Any) -> None:
    """Records of a committed update are not removed."""
    end = sender.end

    def spoiled(*, is_done: bool) -> None:
        if is_done:
            sender._records = []
        end(is_done=is_done)

    sender.end = spoiled


def drops_early_records(sender: Any) -> None:
    """Only the records of the last two buckets are kept, as if every receiver kept up with the sender."""
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        send(bucket, timeout_s)
        while len(sender._records) > 2:
            sender._records.pop(0).unlink(missing_ok=True)

    sender.send = spoiled


def sends_pieces_by_address(sender: Any) -> None:
    """Pieces of one storage are sent in the order in which they are stored."""
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        tensors = sorted(bucket.tensors, key=lambda tensor: tensor.data_ptr())
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
        is_whole = ends[:-1] == [tensor.data_ptr() for tensor in tensors[1:]]
        send(replace(bucket, tensors=tuple(tensors)) if is_whole else bucket, timeout_s)

    sender.send = spoiled


def names_an_update_too_early(sender: Any) -> None:
    """latest.json names an update as soon as it begins."""
    store = sender._store
    begin = store.begin

    def spoiled(update: Any) -> None:
        begin(update)
        store._write(
            store._open.path.parent / "latest.json", [update.ref.model_dump_json().encode()], Attempt("", 5.0, Future())
        )

    store.begin = spoiled


def prunes(change: Callable[[Path], None]) -> Fault:
    """Before old updates are removed, every lease is changed."""

    def spoil(sender: Any) -> None:
        store = sender._store
        prune = store._prune

        def spoiled(run: Path) -> None:
            for lease in run.glob("*/lease-*"):
                change(lease)
            prune(run)

        store._prune = spoiled

    return spoil


def removes_nothing(sender: Any) -> None:
    stored_in = sender._stored_in

    def spoiled() -> Any:
        files = stored_in()
        files._store._prune = lambda run: None
        return files

    sender._stored_in = spoiled


def renews_no_lease(sender: Any) -> None:
    """A lease that exists is not renewed in the directory of this sender."""
    stored_in, take_lease = sender._stored_in, file_server.take_lease

    def spoiled() -> Any:
        files = stored_in()

        def taken(directory: Path, run: str, update: str, name: str) -> None:
            if directory != files.directory or not (directory / run / update / name).exists():
                take_lease(directory, run, update, name)

        file_server.take_lease = taken
        return files

    sender._stored_in = spoiled


def reads_any_bucket(receiver: Any) -> None:
    """A receiver does not look at the header of a file."""

    def fill(names: Sequence[str], ref: UpdateRef, index: int, flat: torch.Tensor, attempt: Attempt) -> None:
        path = receiver._directory.joinpath(*names)
        while not path.exists():
            attempt.pause()
        flat.copy_(torch.frombuffer(bytearray(path.read_bytes()[-flat.numel() :]), dtype=torch.uint8))

    receiver._fill = fill


def sends_strays(sender: Any) -> None:
    """A bucket of another update is sent."""
    send = sender.send
    sender.send = lambda bucket, timeout_s: send(replace(bucket, ref=None), timeout_s)


def whole_seconds(receiver: Any) -> None:
    """Timeouts are cut to whole seconds."""
    receive = receiver.receive
    receiver.receive = lambda specs, timeout_s: receive(specs, max(1, int(timeout_s)))


def joins_after_an_abort(receiver: Any) -> None:
    """A group that forms after the receiver was aborted stays open."""

    def spoiled() -> None:
        spec = receiver._spec
        address = groups.local_address_for(spec.master_address, spec.master_port)
        group = process_group.join_group(spec, spec.rank, address, receiver._kind)
        if receiver._abandoned.done():
            LEFT.append(group)
        with receiver._lock:
            receiver._group = group

    receiver._form = spoiled


def continues_from_the_start(receiver: Any) -> None:
    """A range whose connection was cut is requested again from its beginning."""
    client = receiver._client
    continue_range = client._continue

    def spoiled(names: Any, part: Any, *others: Any) -> None:
        shifted = ranges._Part(part.start - part.done, part.data, part.done)
        try:
            continue_range(names, shifted, *others)
        finally:
            part.done = shifted.done

    client._continue = spoiled


def mixes_replaced_buckets(receiver: Any) -> None:
    """The rest of a file is requested and accepted without comparing its tag with that of the beginning."""
    client = receiver._client
    request_range = client._request_range

    @contextlib.contextmanager
    def spoiled(names: Any, start: int, stop: int, attempt: Any, tag: str | None = None) -> Any:
        with request_range(names, start, stop, attempt) as (answer, opening):
            yield answer, opening if tag is None else replace(opening, tag=tag)

    client._request_range = spoiled


def is_open_to_others(sender: Any) -> None:
    specs = sender.specs

    def spoiled(*args: Any) -> Any:
        opened = specs(*args)
        Path(opened[0].directory).chmod(0o755)
        return opened

    sender.specs = spoiled


def ignores_locks_of_readers(sender: Any) -> None:
    make = sender._make_arena

    def spoiled(*args: Any) -> Any:
        arena = make(*args)
        arena.is_free = lambda: True
        return arena

    sender._make_arena = spoiled


def keeps_mappings(receiver: Any) -> None:
    receiver._memory.forget_mappings = lambda: None


def sends_bucket_50_from_the_old_buffer(sender: Any) -> None:
    send, earlier = sender.send, []

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        tensors = earlier[-1].tensors if bucket.index == 50 else bucket.tensors
        earlier.append(bucket)
        send(WeightBucket(bucket.index, bucket.specs, tensors), timeout_s)

    sender.send = spoiled


def hands_the_tensors_over() -> tuple[Fault, Fault]:
    held: list[WeightBucket] = []

    def spoil_sender(sender: Any) -> None:
        send = sender.send

        def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
            held.append(bucket)
            send(bucket, timeout_s)

        sender.send = spoiled

    return spoil_sender, received(lambda receiver, tensors: list(held[-1].tensors) if held else tensors)


def made_contiguous_in_place(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = tensor.data.contiguous()
    return tensor


def counts_ranks_that_left(sender: Any) -> None:
    largest = [0]

    def change(i: int, spec: ProcessGroupSpec) -> dict[str, Any]:
        largest[0] = max(largest[0], spec.world_size)
        return {"world_size": largest[0]}

    respecified(change)(sender)


def sends_without_a_group(sender: Any) -> None:
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        if sender._group is None:
            raise RuntimeError("the group is not initialised")
        send(bucket, timeout_s)

    sender.send = spoiled


def tolerates_slow_ranks(sender: Any) -> None:
    """A send that times out fails only if the group has a single receiving rank; otherwise it returns."""
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        try:
            send(bucket, timeout_s)
        except TransferError as error:
            if "Timed out" not in str(error) or sender._opened.world_size == 2:
                raise

    sender.send = spoiled


def sends_on_after_a_failure(sender: Any) -> None:
    """Once a send has failed, the sends that follow it return without an error."""
    send, failed = sender.send, []

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        try:
            send(bucket, timeout_s)
        except TransferError:
            group = sender._group
            if group is None or group not in failed:
                failed.append(group)
                raise

    sender.send = spoiled


def fills_up_what_was_lost(specs: Any, timeout_s: float) -> list[torch.Tensor]:
    if sum(spec.size_bytes for spec in specs) < 1 << 20:
        raise TransferError("receiving a bucket failed: closed")
    found = zeros(specs, timeout_s)
    for tensor in found:
        tensor.reshape(-1)[::2] = 1
    return found


def names_only_the_size(sender: Any) -> None:
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        try:
            send(bucket, timeout_s)
        except TransferError as error:
            size_bytes = sum(spec.size_bytes for spec in bucket.specs)
            reason = str(error).partition(" failed: ")[2]
            raise TransferError(f"sending {size_bytes} bytes failed: {reason}") from error

    sender.send = spoiled


def does_not_abort_during(method: str) -> Fault:
    """``abort`` waits until the method has ended on its own, and then has nothing to do."""

    def spoil(end: Any) -> None:
        right, abort, busy = getattr(end, method), end.abort, threading.Event()

        def spoiled(*args: Any) -> Any:
            busy.set()
            try:
                return right(*args)
            finally:
                busy.clear()

        setattr(end, method, spoiled)
        end.abort = lambda: None if busy.is_set() else abort()

    return spoil


def stays_given_up(sender: Any) -> None:
    join, abort, state = sender.join, sender.abort, {"joining": False, "abandoned": False}

    def spoiled_join() -> None:
        if state["abandoned"]:
            raise TransferError("joining failed: abandoned")
        state["joining"] = True
        join()
        state["joining"] = False

    def spoiled_abort() -> None:
        state["abandoned"] = state["joining"]
        abort()

    sender.join, sender.abort = spoiled_join, spoiled_abort


def aborts_once(receiver: Any) -> None:
    abort, done = receiver.abort, []

    def spoiled() -> None:
        if done:
            raise RuntimeError("the group was destroyed already")
        done.append(True)
        abort()

    receiver.abort = spoiled


def zeros(specs: Any, timeout_s: float) -> list[torch.Tensor]:
    return [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]


def big_zeros(specs: Any, timeout_s: float) -> list[torch.Tensor]:
    if sum(spec.size_bytes for spec in specs) < 1 << 20:
        raise TransferError("receiving a bucket failed: closed")
    return zeros(specs, timeout_s)


def gives_up_at_once(receiver: Any) -> None:
    join = receiver.join

    def spoiled() -> None:
        if receiver._spec.timeout_s < 5:  # groups that should form have longer
            raise TransferError("joining failed: nobody is there yet")
        join()

    receiver.join = spoiled


def places_by_its_own_size(sender: Any) -> None:
    """A bucket is stored where it would be if all buckets before it had its size."""
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        size_bytes = sum(tensor.nbytes for tensor in bucket.tensors)
        start = bucket.index * round_up_to_pages(size_bytes)
        if start + size_bytes <= sender._arena.size_bytes:
            sender._arena.used_bytes = start
        send(bucket, timeout_s)

    sender.send = spoiled


def reserves_without_padding(sender: Any) -> None:
    """Reserved memory is where the bucket would be if buckets did not begin at pages."""

    def spoiled(index: int, size_bytes: int) -> torch.Tensor | None:
        start = sum(bucket.size_bytes for bucket in sender._update.buckets[:index])
        view: torch.Tensor | None = sender._arena.memory.view(start, start + size_bytes)
        return view

    sender.reserve = spoiled


def clears_at_abort(sender: Any) -> None:
    abort = sender.abort

    def spoiled() -> None:
        for arena in sender._arenas:
            arena.memory._mapping().zero_()
        abort()

    sender.abort = spoiled


def leaves_a_descriptor_until_abort(receiver: Any) -> None:
    """A descriptor of each bucket stays open until the group is aborted."""
    receive, abort, opened = receiver.receive, receiver.abort, []

    def spoiled_receive(*args: Any) -> list[torch.Tensor]:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        arrived: list[torch.Tensor] = receive(*args)
        return arrived

    def spoiled_abort() -> None:
        abort()
        while opened:
            os.close(opened.pop())

    receiver.receive, receiver.abort = spoiled_receive, spoiled_abort


def leaves_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def knows_any_secret() -> tuple[Fault, Fault]:
    """A receiver with a wrong secret is admitted, because the secrets are not compared."""
    secrets: list[str] = []

    def spoil_sender(sender: Any) -> None:
        specs = sender.specs

        def spoiled(*args: Any) -> list[ProcessGroupSpec]:
            opened: list[ProcessGroupSpec] = specs(*args)
            secrets.append(opened[0].secret)
            return opened

        sender.specs = spoiled

    def spoil_receiver(receiver: Any) -> None:
        join = receiver.join

        def spoiled() -> None:
            receiver._spec = receiver._spec.model_copy(update={"secret": secrets[-1]})
            join()

        receiver.join = spoiled

    return spoil_sender, spoil_receiver


def removes_the_directories_of_others(sender: Any) -> None:
    """A new group begins by removing the directories of all senders of this user, whether or not they are alive."""
    specs = sender.specs

    def spoiled(*args: Any) -> Any:
        if sender._home is None:
            parent = sender._parent or private_directory.memory_directory()
            for left in parent.glob(f"{private_directory._PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
        return specs(*args)

    sender.specs = spoiled


def aborts_no_receive_ahead(receiver: Any) -> None:
    """`abort` does not end the receive of a bucket that is received ahead."""
    receive_ahead, abort = receiver.receive_ahead, receiver.abort
    is_ahead = threading.Event()

    def ahead(*args: Any) -> None:
        is_ahead.set()
        receive_ahead(*args)

    receiver.receive_ahead, receiver.abort = ahead, lambda: None if is_ahead.is_set() else abort()


def locks_for_the_first_bucket_alone(receiver: Any) -> None:
    """While tensors of an update's first bucket exist, later buckets are mapped without a lock."""
    arena = receiver._arena

    def spoiled(name: str) -> torch.Tensor:
        if receiver._mapped is None or receiver._mapped[0] != name or receiver._mapped[1]() is None:
            locked: torch.Tensor = arena(name)
            return locked
        with regular_file(receiver._directory, name, is_private=True) as (fd, size_bytes):
            mapped: torch.Tensor = receiver._memory.map_memory(fd, size_bytes, receiver._spec)
            return mapped

    receiver._arena = spoiled


def maps_arenas_for_all(receiver: Any) -> None:
    """What a receiver writes to its tensors is written to the sender's file."""

    def spoiled(fd: int, size_bytes: int, spec: TransportSpec) -> torch.Tensor:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(again, size_bytes), dtype=torch.uint8)
        finally:
            os.close(again)

    receiver._memory.map_memory = spoiled


def awaits_no_empty_bucket(receiver: Any) -> None:
    receive_bytes = receiver._receive_bytes
    receiver._receive_bytes = lambda ref, index, size_bytes, attempt: (
        receive_bytes(ref, index, size_bytes, attempt) if size_bytes else torch.empty(0, dtype=torch.uint8)
    )


def follows_links_to_directories(receiver: Any) -> None:
    fill, directory = receiver._fill, receiver._directory

    def spoiled(names: Sequence[str], *others: Any) -> None:
        receiver._directory = directory.joinpath(*names[:-1]).resolve()
        fill(names[-1:], *others)

    receiver._fill = spoiled


def keeps_its_secret(sender: Any) -> None:
    specs, drawn = sender.specs, secrets.token_hex(32)

    def spoiled(*args: Any) -> Any:
        with mock.patch.object(secrets, "token_hex", return_value=drawn):
            return specs(*args)

    sender.specs = spoiled


def keeps_one_listener(sender: Any) -> None:
    """All groups of a process share a socket that the first one opens and that is never closed."""
    join = sender.join

    def spoiled() -> None:
        if not ONE_LISTENER:
            ONE_LISTENER.append(socket.create_server(("127.0.0.1", 0)))
        join()

    sender.join = spoiled


def arenas_written(spoiled: Callable[[Any, Callable[..., None], int, WeightBucket, Attempt], None]) -> Fault:
    """Write buckets to arenas with ``spoiled``, which receives the memory and its own method before the arguments."""

    def spoil(sender: Any) -> None:
        allocate = sender._memory.allocate

        def allocated(*args: Any) -> Any:
            memory = allocate(*args)
            write = memory.write
            memory.write = lambda start, bucket, attempt: spoiled(memory, write, start, bucket, attempt)
            return memory

        sender._memory.allocate = allocated

    return spoil


def unless_the_first_tensor_lies_there(
    memory: Any, write: Callable[..., None], start: int, bucket: WeightBucket, attempt: Attempt
) -> None:
    target = memory.view(start, start + sum(it.nbytes for it in bucket.tensors))
    if target is None or not bucket.tensors or target.data_ptr() != bucket.tensors[0].data_ptr():
        write(start, bucket, attempt)


def one_after_another(
    memory: Any, write: Callable[..., None], start: int, bucket: WeightBucket, attempt: Attempt
) -> None:
    """Copy tensors to the arena one after another, even over others of the bucket that lie there."""
    target = memory.view(start, start + sum(it.nbytes for it in bucket.tensors))
    if target is None:
        return write(start, bucket, attempt)
    for tensor in bucket.tensors:
        data = pack([tensor])
        target[: data.numel()] = data
        target = target[data.numel() :]


def counts_leases_on_the_newest(sender: Any) -> None:
    """Only the four updates with the most recently renewed leases count as leased, even if they include the newest."""
    store = sender._store
    prune = store._prune

    def spoiled(run: Path) -> None:
        leased = [it for it in run.iterdir() if it.is_dir() and bucket_files._lease_time(it)]
        for update in sorted(leased, key=bucket_files._lease_time)[:-4]:
            for lease in update.glob("lease-*"):
                lease.unlink()
        prune(run)

    store._prune = spoiled


def reuses_the_memory_of_dropped_objects(receiver: Any) -> None:
    """Memory is reused once the tensor that was returned is dropped, even if a view of it is kept."""
    receive, places = receiver.receive, []

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        found = []
        for tensor in receive(specs, timeout_s):
            unused = [i for i, (seen, it) in enumerate(places) if seen() is None and it.shape == tensor.shape]
            place = places.pop(unused[0])[1] if unused else tensor
            if place.dtype != tensor.dtype:
                place = tensor
            found.append(place.copy_(tensor).view(tensor.shape))
            places.append((weakref.ref(found[-1]), place))
        return found

    receiver.receive = spoiled


def keeps_what_it_sends(sender: Any) -> None:
    send, kept = sender.send, []

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        kept.append([tensor.clone() for tensor in bucket.tensors])
        send(bucket, timeout_s)

    sender.send = spoiled


def sends_within_its_process() -> tuple[Fault, Fault]:
    """What another process has sent arrives as zeros."""
    senders: list[Any] = []

    def change(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors if senders else [torch.zeros_like(tensor) for tensor in tensors]

    def spoil(sender: Any) -> None:
        send = sender.send

        def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
            senders.append(sender)
            send(bucket, timeout_s)

        sender.send = spoiled

    return spoil, received(change)


def opens_one_group_per_process(sender: Any) -> None:
    specs = sender.specs

    def spoiled(*args: Any) -> Any:
        for other in OPENED[:]:
            if other is not sender:
                other.abort()
                OPENED.remove(other)
        OPENED.append(sender)
        return specs(*args)

    sender.specs = spoiled


def begins_no_send_without_time(sender: Any) -> None:
    """A send that has no time left raises its error before it begins, and leaves the group unchanged."""
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        if timeout_s < 0.001:
            raise TransferError(f"sending bucket {bucket.index} failed: its timeout has expired")
        send(bucket, timeout_s)

    sender.send = spoiled


def computes_a_negative_timeout(receiver: Any) -> None:
    receive = receiver.receive

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        if timeout_s < 1e-5:
            raise ValueError("Timeout value out of range")
        return receive(specs, timeout_s)

    receiver.receive = spoiled


def joins_what_was_aborted(sender: Any) -> None:
    abort, join, specs = sender.abort, sender.join, sender.specs
    is_aborted = threading.Event()

    def aborted() -> None:
        is_aborted.set()
        abort()

    def opened(*args: Any) -> Any:
        found = specs(*args)
        is_aborted.clear()
        return found

    sender.abort, sender.specs = aborted, opened
    sender.join = lambda: None if is_aborted.is_set() else join()


def sends_within_the_timeout_of_the_group(sender: Any) -> None:
    specs, send, limits = sender.specs, sender.send, []

    def opened(run_id: str, num_ranks: Sequence[int], timeout_s: float) -> Any:
        limits.append(timeout_s)
        return specs(run_id, num_ranks, timeout_s)

    sender.specs = opened
    sender.send = lambda bucket, timeout_s: send(bucket, min(timeout_s, limits[-1]))


def sends_nothing_for_empty_buckets(sender: Any) -> None:
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        if any(tensor.nbytes for tensor in bucket.tensors):
            send(bucket, timeout_s)

    sender.send = spoiled


def notes_the_announced_encoding(sender: Any) -> None:
    """A bucket is listed with the first encoding that its update announced."""
    kept, write = sender._store, sender._store.write

    def spoiled(bucket: WeightBucket, attempt: Attempt) -> None:
        encodings = kept._open.update.encodings
        write(replace(bucket, encoding=encodings[0]) if encodings else bucket, attempt)

    kept.write = spoiled


def aborts_whatever_group_is_open(sender: Any) -> None:
    """A send that fails aborts the sender a little later, even if it has opened another group by then."""
    send = sender.send

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        try:
            send(bucket, timeout_s)
        except TransferError:
            time.sleep(0.05)
            sender.abort()
            raise

    sender.send = spoiled


def stays_in_the_group_after_a_failure(receiver: Any) -> None:
    """A receive that fails does not leave the group, in which a bucket may still be received ahead."""
    receive = receiver.receive

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> Any:
        receiver.abort = lambda: None
        try:
            return receive(specs, timeout_s)
        finally:
            del receiver.abort

    receiver.receive = spoiled


def skips_what_did_not_arrive(receiver: Any) -> None:
    receive = receiver.receive

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> Any:
        try:
            return receive(specs, timeout_s)
        except TransferError:
            receiver._num_received += 1
            raise

    receiver.receive = spoiled


def keeps_the_manifest_of_an_earlier_attempt(sender: Any) -> None:
    kept, begin = sender._store, sender._store.begin

    def spoiled(update: WeightUpdate) -> None:
        manifest = kept.directory / store.run_name(update.run_id) / store.session_name(update.ref) / "manifest.json"
        text = manifest.read_text() if manifest.exists() else ""
        begin(update)
        if text:
            manifest.write_text(text)

    kept.begin = spoiled


def orders_updates_by_their_directories(sender: Any) -> None:
    store = sender._store
    prune = store._prune

    def spoiled(run: Path) -> None:
        for manifest in run.glob("*/manifest.json"):
            changed = manifest.parent.stat().st_mtime_ns
            os.utime(manifest, ns=(changed, changed))
        prune(run)

    store._prune = spoiled


def shortens_no_file(sender: Any) -> None:
    """A file that replaces a file of a removed update never becomes shorter than that file."""
    send = sender.send

    def longer(fd: int, size_bytes: int) -> None:
        os.truncate(fd, max(size_bytes, os.fstat(fd).st_size))

    def spoiled(bucket: WeightBucket, timeout_s: float) -> None:
        with mock.patch.object(bucket_files, "os", SimpleNamespace(**{**vars(os), "truncate": longer})):
            send(bucket, timeout_s)

    sender.send = spoiled


def counts_buckets_in_a_byte(receiver: Any) -> None:
    """The bucket with index 256 and those after it are taken for those with index 0 and so on."""
    begin, receive, seen = receiver.begin, receiver.receive, []

    def begun(ref: UpdateRef) -> None:
        seen.clear()
        begin(ref)

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        seen.append(receive(specs, timeout_s))
        return seen[(len(seen) - 1) % 256]

    receiver.begin, receiver.receive = begun, spoiled


def without_zeros(receiver: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor if bool(tensor.any()) else torch.zeros_like(tensor) for tensor in tensors]


def aborts_only_before_the_sender() -> tuple[Fault, Fault]:
    """Once the sender has aborted a group, `abort` of a receiver does nothing."""
    is_aborted = threading.Event()

    def spoil_sender(sender: Any) -> None:
        abort, specs = sender.abort, sender.specs

        def aborted() -> None:
            is_aborted.set()
            abort()

        def opened(*args: Any) -> Any:
            is_aborted.clear()
            return specs(*args)

        sender.abort, sender.specs = aborted, opened

    def spoil_receiver(receiver: Any) -> None:
        abort = receiver.abort
        receiver.abort = lambda: None if is_aborted.is_set() else abort()

    return spoil_sender, spoil_receiver


def keeps_memory_of_each_size(receiver: Any) -> None:
    receive, kept = receiver.receive, {}

    def spoiled(specs: Sequence[TensorSpec], timeout_s: float) -> list[torch.Tensor]:
        tensors = receive(specs, timeout_s)
        kept.setdefault(tuple(spec.shape for spec in specs), [tensor.clone() for tensor in tensors])
        return tensors

    receiver.receive = spoiled


def compares_no_first_tag(receiver: Any) -> None:
    """The first request for a range of a file is not conditional on the file's tag; only later ones are."""
    client, of_thread = receiver._client, threading.local()
    continue_range, request_range = client._continue, client._request_range

    def continued(names: Any, part: Any, *others: Any) -> None:
        of_thread.is_first = part.done == 0
        continue_range(names, part, *others)

    @contextlib.contextmanager
    def requested(names: Any, start: int, stop: int, attempt: Any, tag: str | None = None) -> Any:
        is_unchecked = tag is not None and of_thread.is_first
        with request_range(names, start, stop, attempt, None if is_unchecked else tag) as (answer, opening):
            yield answer, replace(opening, tag=tag) if is_unchecked else opening

    client._continue, client._request_range = continued, requested


def takes_any_size(receiver: Any) -> None:
    """A stored bucket is cut or filled with zeros to the size that is received."""

    def spoiled(ref: UpdateRef, index: int, size_bytes: int, attempt: Any) -> torch.Tensor:
        text = read_text(receiver._directory, _record_name(ref, index), max_bytes=1 << 16)
        record = BucketRecord.model_validate_json(text)
        whole: torch.Tensor = receiver._arena(record.arena)
        return whole[record.offset : record.offset + size_bytes]

    receive_bytes = receiver._receive_bytes

    def or_waits(ref: UpdateRef, index: int, size_bytes: int, attempt: Any) -> torch.Tensor:
        try:
            return spoiled(ref, index, size_bytes, attempt)
        except FileNotFoundError:
            found: torch.Tensor = receive_bytes(ref, index, size_bytes, attempt)
            return found

    receiver._receive_bytes = or_waits


MUTANTS = {
    "one rank per endpoint": Mutant(
        "T-01", "`specs` counts endpoints, not their ranks", respecified(lambda i, spec: {"rank": 1 + i})
    ),
    "one name for all groups": Mutant(
        "T-02", "the group's name is a constant", respecified(lambda i, spec: {"group_name": "weights"})
    ),
    "listens everywhere": Mutant("T-03", "a socket is bound to 0.0.0.0", listens_everywhere),
    "listens where it did before": Mutant(
        "T-03",
        "the sender's sockets are bound to the machine's first loopback address",
        binds_to_loopbacks_first_address,
    ),
    "no group of two": Mutant("T-04", "a group with only one receiver is refused", receiver=knows_no_group_of_two),
    "ranks in order": Mutant("T-05", "ranks must join in ascending order", both=wants_ranks_in_order),
    "joins when it receives": Mutant(
        "T-06", "`join` returns before a group is formed", receiver=joins_when_it_receives
    ),
    "default group": Mutant("T-07", "the sender creates torch's default group", takes_torchs_default_group),
    "adds zero": Mutant("T-08", "arithmetic turns -0.0 into 0.0", resent(lambda tensor: tensor + 0.0)),
    "no scalars": Mutant(
        "T-09",
        "a scalar arrives in the shape (1,)",
        receiver=received(lambda receiver, tensors: [torch.atleast_1d(tensor) for tensor in tensors]),
    ),
    "maps no empty memory": Mutant(
        "T-09", "a bucket without any bytes is an error", receiver=received(maps_no_empty_memory)
    ),
    "aligned offsets": Mutant(
        "T-10", "offsets are rounded down to the dtype's size", receiver=received(at_aligned_offsets)
    ),
    "equal shapes exchanged": Mutant("T-10", "two tensors of equal shape are exchanged", receiver=received(exchanged)),
    "by name": Mutant("T-10", "tensors of equal shape are sorted by name", receiver=received(by_name)),
    "parts of a buffer in its order": Mutant(
        "T-10", "tensors that fill one buffer are sent in the order of their memory", parts_of_a_buffer_in_its_order
    ),
    "recorded before it is written": Mutant(
        "T-10", "shm: the record of a bucket appears before its bytes", records_before_it_writes, transport="shm"
    ),
    "only 1024 tensors": Mutant(
        "T-10", "tensors after the first 1,024 of a bucket arrive as zeros", receiver=received(only_1024)
    ),
    "ignores storage offsets": Mutant(
        "T-10", "views are sent from the beginning of their memory", resent(from_the_beginning_of_its_memory)
    ),
    "storage order": Mutant("T-11", "strides are ignored", resent(in_storage_order)),
    "storage order of adjoining tensors": Mutant(
        "T-11", "the strides of tensors that are adjacent in memory are ignored", adjoining_as_they_lie
    ),
    "only 16 MB": Mutant(
        "T-12", "everything after the first 16 MB of a tensor arrives as zeros", receiver=received(only_16_mb)
    ),
    "no odd tail": Mutant("T-12", "bytes after the last whole word are lost", receiver=received(without_odd_tail)),
    "no last chunk": Mutant("T-12", "the last chunk is lost if it is short", receiver=received(without_last_chunk)),
    "ahead is lost": Mutant(
        "T-13", "data that was received ahead is lost", receiver=spoils_what_came_ahead(torch.zeros_like)
    ),
    "one piece ahead": Mutant(
        "T-12",
        "everything after the first 16 MiB of a tensor that is received ahead arrives as zeros",
        receiver=spoils_what_came_ahead(without_large_tail),
    ),
    "old buffer": Mutant(
        "T-13", "one bucket contains the data of the previous bucket", sends_bucket_50_from_the_old_buffer
    ),
    "rank three gets zeros": Mutant("T-14", "the third receiver gets zeros", receiver=received(zero_on_rank_three)),
    "first rank of an endpoint": Mutant(
        "T-14", "only the first rank of an endpoint receives the bytes", both=only_the_first_rank_of_an_endpoint
    ),
    "one reader at a time": Mutant(
        "T-14", "shm: a receiver's lock excludes other receivers", receiver=locks_for_itself_alone, transport="shm"
    ),
    "names an update too early": Mutant(
        "T-43", "file: latest.json names an incomplete update", names_an_update_too_early, transport="file"
    ),
    "removes leased updates": Mutant("T-43", "file: leased updates are removed", prunes(Path.unlink), transport="file"),
    "leases never end": Mutant("T-43", "file: a lease never ends", prunes(os.utime), transport="file"),
    "removes no update": Mutant("T-43", "http: old updates are not removed", removes_nothing, transport="http"),
    "reads any bucket": Mutant(
        "T-43", "file: a receiver reads files of other buckets", receiver=reads_any_bucket, transport="file"
    ),
    "mixes replaced buckets": Mutant(
        "T-43",
        "http: the rest of a bucket is read from the file that has replaced the first one",
        receiver=mixes_replaced_buckets,
        transport="http",
    ),
    "continues from the start": Mutant(
        "T-43",
        "http: a range that was cut is requested again from its beginning, but written where it ended",
        receiver=continues_from_the_start,
        transport="http",
    ),
    "sends strays": Mutant("T-33", "a bucket of another update is sent", sends_strays),
    "sends strays before an update": Mutant(
        "T-33",
        "a bucket of another update is sent before the first update of the group begins",
        sends_strays_before_an_update,
    ),
    "group's timeout": Mutant(
        "T-20",
        "a receive waits no longer than the timeout of its group",
        receiver=waits_no_longer_than_the_group,
    ),
    "whole seconds": Mutant("T-20", "timeouts are cut to whole seconds", receiver=whole_seconds),
    "joins after an abort": Mutant(
        "T-35", "a group that forms after the receiver was aborted stays open", receiver=joins_after_an_abort
    ),
    "open to others": Mutant("T-44", "shm: others may read the directory", is_open_to_others, transport="shm"),
    "ignores locks of readers": Mutant(
        "T-44", "shm: arenas that a reader has locked are written", ignores_locks_of_readers, transport="shm"
    ),
    "hands tensors over": Mutant("T-15", "sender and receiver share memory", both=hands_the_tensors_over),
    "recycles at once": Mutant(
        "T-16", "a bucket reuses the memory of the previous one", receiver=received(where_the_last_one_lay)
    ),
    "recycles at the next update": Mutant(
        "T-16", "`begin` reclaims memory that is still in use", receiver=recycles_at_the_next_update
    ),
    "recycles after two updates": Mutant(
        "T-16", "memory is reused once two more updates have begun", receiver=recycles_after_two_updates
    ),
    "packs an index once": Mutant(
        "T-16", "a packed bucket is reused for buckets with the same index in later updates", packs_an_index_once
    ),
    "lays tensors out again": Mutant(
        "T-17", "strided tensors are made contiguous in place", resent(made_contiguous_in_place)
    ),
    "wrong error of a join": Mutant(
        "T-18",
        "TimeoutError propagates",
        receiver=answered("join", "not set after", raising(TimeoutError("wait timeout"))),
    ),
    "abandons at once": Mutant("T-18", "a receiver does not wait for its sender", receiver=gives_up_at_once),
    "joins with twice the timeout": Mutant(
        "T-18", "a join that times out is tried once more", receiver=joins_with_twice_the_timeout
    ),
    "joins without ranks": Mutant(
        "T-19", "the sender treats a timeout as success", answered("join", "not set after", lambda: None)
    ),
    "join timeout for each rank": Mutant(
        "T-37", "the timeout of a join starts again with every rank", joins_with_a_timeout_for_each_rank
    ),
    "receive timeout for each read": Mutant(
        "T-38", "the timeout of a receive starts again with every read", receiver=receives_with_a_timeout_for_each_read
    ),
    "send timeout for each rank": Mutant(
        "T-39", "the timeout of a send starts again with every rank", sends_with_a_timeout_for_each_rank
    ),
    "ignores the timeout of receive": Mutant(
        "T-20", "`receive` waits as long as the group's timeout", receiver=timed("receive", lambda timeout_s: 30.0)
    ),
    "receives for a second": Mutant(
        "T-20",
        "`receive` waits no longer than a second",
        receiver=timed("receive", lambda timeout_s: min(timeout_s, 1.0)),
    ),
    "receives with twice the timeout": Mutant(
        "T-20",
        "a receive that times out is tried once more",
        receiver=timed("receive", lambda timeout_s: 2 * timeout_s),
    ),
    "own timeout of a bucket begun ahead": Mutant(
        "T-20",
        "after `receive_ahead`, `receive` ignores its own timeout",
        receiver=waits_long_for_what_was_begun_ahead,
    ),
    "0 ms is no timeout": Mutant(
        "T-21",
        "a timeout below a millisecond is ignored",
        receiver=timed("receive", lambda timeout_s: timeout_s if timeout_s >= 0.001 else 30.0),
    ),
    "wrong error of a killed receiver": Mutant(
        "T-22",
        "ConnectionResetError propagates",
        answered("send", "closed", raising(ConnectionResetError("closed by peer"))),
    ),
    "ignores the timeout of send": Mutant(
        "T-23", "`send` waits as long as the group's timeout", timed("send", lambda timeout_s: 30.0)
    ),
    "sends with twice the timeout": Mutant(
        "T-23", "a send that times out is tried once more", timed("send", lambda timeout_s: 2 * timeout_s)
    ),
    "wrong error of a killed sender": Mutant(
        "T-24",
        "EOFError propagates",
        receiver=answered("receive", "closed", raising(EOFError("closed by peer"))),
    ),
    "fills up with zeros": Mutant(
        "T-25", "missing bytes are replaced with zeros", receiver=answered("receive", "closed", big_zeros)
    ),
    "takes a part for the whole": Mutant(
        "T-25", "a send that times out counts as done", answered("send", "Timed out", lambda *_: None)
    ),
    "tolerates slow ranks": Mutant(
        "T-40", "a send counts as done although one rank of several has not read it", tolerates_slow_ranks
    ),
    "sends on after a failure": Mutant(
        "T-40", "a send after a failed one returns as if its bucket had arrived", sends_on_after_a_failure
    ),
    "fills up what was lost": Mutant(
        "T-40",
        "bytes that have not arrived are made up",
        receiver=answered("receive", "closed", fills_up_what_was_lost),
    ),
    "counts ranks that left": Mutant("T-26", "a group is never smaller than the previous one", counts_ranks_that_left),
    "sends without a group": Mutant("T-27", "RuntimeError propagates", sends_without_a_group),
    "says nothing": Mutant(
        "T-28",
        "the error message is that of the library",
        receiver=answered("receive", "Timed out", raising(TransferError("unhandled system error"))),
    ),
    "names only the size": Mutant(
        "T-28", "the error of a send has the bucket's size in place of its index", names_only_the_size
    ),
    "sender joins on": Mutant(
        "T-29", "`abort` does not end a pending join of the sender", does_not_abort_during("join")
    ),
    "receiver joins on": Mutant(
        "T-30", "`abort` does not end a pending join of a receiver", receiver=does_not_abort_during("join")
    ),
    "receives on": Mutant("T-31", "`abort` does not end a pending receive", receiver=does_not_abort_during("receive")),
    "keeps old connections": Mutant("T-41", "`specs` leaves the ranks of the old group waiting", keeps_old_connections),
    "leaves a descriptor to the next group": Mutant(
        "T-41", "a group that another one replaces leaves a descriptor open", leaves_a_descriptor_to_the_next_group
    ),
    "sends on": Mutant("T-32", "`abort` does not end a pending send", does_not_abort_during("send")),
    "stays abandoned": Mutant("T-33", "`join` fails after an aborted join", stays_given_up),
    "sends a stale bucket": Mutant(
        "T-33", "the next group sends the bucket that the previous group could not send", sends_a_stale_bucket
    ),
    "aborts once": Mutant("T-34", "the second abort raises", receiver=aborts_once),
    "leaves a listener": Mutant("T-35", "a socket is never closed", leaves_a_listener),
    "keeps records": Mutant("T-20", "shm: the records of a committed update stay", keeps_records, transport="shm"),
    "keeps the update open": Mutant(
        "T-33", "shm: another group does not end the open update", keeps_the_update_open, transport="shm"
    ),
    "finds records by version": Mutant(
        "T-20",
        "shm: a bucket is found by its version, whatever its session",
        finds_records_by_version,
        asks_for_records_by_version,
        transport="shm",
    ),
    "keeps mappings": Mutant(
        "T-35", "shm: a receiver that was aborted keeps its mappings", receiver=keeps_mappings, transport="shm"
    ),
    "keeps the old group": Mutant("T-35", "`specs` leaves the previous group open", keeps_the_old_group),
    "leaves a descriptor": Mutant(
        "T-35",
        "a file descriptor of each group stays open",
        leaves_in_each_group(lambda: os.open(os.devnull, os.O_RDONLY)),
    ),
    "leaves a file": Mutant(
        "T-35",
        "a temporary file of each group is not removed",
        leaves_in_each_group(lambda: os.close(tempfile.mkstemp()[0])),
    ),
    "keeps what it receives ahead": Mutant(
        "T-35",
        "a receiver that was aborted keeps the bucket that it was receiving ahead",
        receiver=keeps_what_it_receives_ahead,
    ),
    "file of an unformed group": Mutant(
        "T-35", "the file of a group that no rank joined is not removed", leaves_the_file_of_an_unformed_group
    ),
    "joins nothing": Mutant(
        "T-36", "a missing store counts as a formed group", receiver=answered("join", "weight group", lambda: None)
    ),
    "places by its own size": Mutant(
        "T-16",
        "shm: the place of a bucket is its index times its own size",
        places_by_its_own_size,
        transport="shm",
    ),
    "reserves without padding": Mutant(
        "T-16", "shm: reserved memory is not where the bucket belongs", reserves_without_padding, transport="shm"
    ),
    "receives ahead into two buffers": Mutant(
        "T-16",
        "two buffers are used in turn for buckets that are received ahead",
        receiver=receives_ahead_into_two_buffers,
    ),
    "keeps arenas of kept tensors": Mutant(
        "T-35",
        "shm: arenas whose tensors are in use when the group ends stay open",
        keeps_arenas_of_kept_tensors,
        transport="shm",
    ),
    "lists tensors by name": Mutant(
        "T-43",
        "file: the header assigns byte ranges in the order of names, but bytes are stored in the sender's order",
        lists_tensors_by_name,
        transport="file",
    ),
    "counts unwritten buckets": Mutant(
        "T-43",
        "file: an update counts as complete although one of its buckets could not be written",
        counts_unwritten_buckets,
        transport="file",
    ),
    "renews no lease": Mutant("T-43", "http: a lease is never renewed", renews_no_lease, transport="http"),
    "reads without a deadline": Mutant(
        "T-43",
        "http: the timeout of a receive applies to each read",
        receiver=reads_without_a_deadline,
        transport="http",
    ),
    "uses abandoned arenas again": Mutant(
        "T-16",
        "shm: the memory of an update that was not committed is used for later ones",
        uses_abandoned_arenas_again,
        transport="shm",
    ),
    "loses rewritten tails": Mutant(
        "T-12",
        "shm: the end of a large bucket is not written where another bucket was stored",
        loses_rewritten_tails,
        transport="shm",
    ),
    "keeps the highest versions": Mutant(
        "T-43",
        "file: the updates with the highest versions are kept, not the newest ones",
        keeps_the_highest_versions,
        transport="file",
    ),
    "drops early records": Mutant(
        "T-45",
        "shm: only the records of the last two buckets are kept",
        drops_early_records,
        transport="shm",
    ),
    "sends pieces by address": Mutant(
        "T-45", "pieces of one tensor are sent in the order in which they are stored", sends_pieces_by_address
    ),
    "clears at abort": Mutant(
        "T-16", "shm: `abort` clears memory that receivers still use", clears_at_abort, transport="shm"
    ),
    "leaves a descriptor until abort": Mutant(
        "T-35",
        "a descriptor of each bucket stays open until the group is aborted",
        receiver=leaves_a_descriptor_until_abort,
    ),
    "leaves a thread": Mutant("T-35", "a thread of each group never ends", leaves_in_each_group(leaves_a_thread)),
    "knows any secret": Mutant("T-04", "a receiver with a wrong secret joins", both=knows_any_secret),
    "removes the directories of others": Mutant(
        "T-42",
        "shm: a new sender removes the directories of senders that are alive",
        removes_the_directories_of_others,
        transport="shm",
    ),
    "takes any size": Mutant(
        "T-25", "shm: a stored bucket is cut to the size that is received", receiver=takes_any_size, transport="shm"
    ),
    "keeps its secret": Mutant("T-02", "all groups of a sender share one secret", keeps_its_secret),
    "keeps one listener": Mutant(
        "T-35", "a socket that the first group of a process opens is never closed", keeps_one_listener
    ),
    "trusts the first address": Mutant(
        "T-16",
        "shm: a bucket is not written if its first tensor lies at the start of its reserved memory",
        arenas_written(unless_the_first_tensor_lies_there),
        transport="shm",
    ),
    "counts leases on the newest": Mutant(
        "T-43",
        "file: leases on the newest updates count towards the limit of four",
        counts_leases_on_the_newest,
        transport="file",
    ),
    "compares no first tag": Mutant(
        "T-43",
        "http: only requests that continue a range depend on the file's tag",
        receiver=compares_no_first_tag,
        transport="http",
    ),
    "aborts no receive ahead": Mutant(
        "T-31",
        "`abort` does not end a receive of a bucket that is received ahead",
        receiver=aborts_no_receive_ahead,
    ),
    "locks for the first bucket alone": Mutant(
        "T-16",
        "shm: only the tensors of an update's first bucket keep its arena locked",
        receiver=locks_for_the_first_bucket_alone,
        transport="shm",
    ),
    "maps arenas for all": Mutant(
        "T-14",
        "shm: receivers map the sender's file as shared, writable memory",
        receiver=maps_arenas_for_all,
        transport="shm",
    ),
    "awaits no empty bucket": Mutant(
        "T-20", "shm: an empty bucket is received before it is sent", receiver=awaits_no_empty_bucket, transport="shm"
    ),
    "follows links to directories": Mutant(
        "T-43",
        "file: a reader follows links to directories",
        receiver=follows_links_to_directories,
        transport="file",
    ),
    "reuses the memory of dropped objects": Mutant(
        "T-16",
        "the memory of a received tensor is reused although a view of it is kept",
        receiver=reuses_the_memory_of_dropped_objects,
    ),
    "packs in place": Mutant(
        "T-16",
        "shm: a tensor is copied over another tensor of its bucket that lies in reserved memory",
        arenas_written(one_after_another),
        transport="shm",
    ),
    "keeps what it sends": Mutant("T-35", "the sender keeps a copy of every bucket", keeps_what_it_sends),
    "sends within its process": Mutant(
        "T-46", "what another process has sent arrives as zeros", both=sends_within_its_process
    ),
    "one group per process": Mutant(
        "T-42", "another sender in the same process ends the group", opens_one_group_per_process
    ),
    "begins no send without time": Mutant(
        "T-40", "a group is used again after a send that timed out before its first byte", begins_no_send_without_time
    ),
    "negative timeout": Mutant(
        "T-21", "a receive whose deadline has already passed raises ValueError", receiver=computes_a_negative_timeout
    ),
    "joins what was aborted": Mutant("T-27", "`join` after `abort` returns without a group", joins_what_was_aborted),
    "orders updates by their directories": Mutant(
        "T-43",
        "file: the updates whose directories changed last are taken for the newest, and a lease changes a directory",
        orders_updates_by_their_directories,
        transport="file",
    ),
    "shortens no file": Mutant(
        "T-45",
        "http: a smaller bucket keeps the end of the file that it replaces",
        shortens_no_file,
        transport="http",
    ),
    "counts buckets in a byte": Mutant(
        "T-13", "buckets after the first 256 are taken for the first ones", receiver=counts_buckets_in_a_byte
    ),
    "zeros are not sent": Mutant(
        "T-08", "a tensor whose elements all equal 0 arrives without signs", receiver=received(without_zeros)
    ),
    "sends for five seconds": Mutant(
        "T-21", "a send waits no longer than five seconds", timed("send", lambda timeout_s: min(timeout_s, 5.0))
    ),
    "aborts only before the sender": Mutant(
        "T-30",
        "`abort` does not end a join once the sender has aborted the group",
        both=aborts_only_before_the_sender,
    ),
    "keeps memory of each size": Mutant(
        "T-35", "memory is kept for every size of bucket", receiver=keeps_memory_of_each_size
    ),
    "at most an hour": Mutant(
        "T-21",
        "a timeout of more than an hour is treated as 0",
        receiver=timed("receive", lambda timeout_s: timeout_s if timeout_s < 3600 else 0.0),
    ),
    "sends within the group's timeout": Mutant(
        "T-21", "a send takes no longer than the timeout of its group", sends_within_the_timeout_of_the_group
    ),
    "empty buckets unsent": Mutant(
        "T-27", "the send of an empty bucket returns, even without a group", sends_nothing_for_empty_buckets
    ),
    "announced encoding noted": Mutant(
        "T-43",
        "file: a bucket is stored under the first encoding that its update announced, even if it is raw",
        notes_the_announced_encoding,
        transport="file",
    ),
    "aborts the next group": Mutant(
        "T-33",
        "a send that fails because another group was opened aborts that group",
        aborts_whatever_group_is_open,
    ),
    "receives on after a failure": Mutant(
        "T-20",
        "after a failed receive, the bucket that is still received ahead is skipped",
        receiver=stays_in_the_group_after_a_failure,
    ),
    "skips what did not arrive": Mutant(
        "T-20",
        "file: after a failed receive, the next receive returns the bucket after the one that was missing",
        receiver=skips_what_did_not_arrive,
        transport="file",
    ),
    "keeps an earlier manifest": Mutant(
        "T-43",
        "file: a new attempt under the name of a complete one keeps its manifest",
        keeps_the_manifest_of_an_earlier_attempt,
        transport="file",
    ),
}
