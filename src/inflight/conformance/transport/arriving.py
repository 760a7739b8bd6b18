"""Checks that all bytes arrive in order and stay unchanged afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from inflight.conformance.calls import SLACK_S, results
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.transport.buckets import bucket_of, bytes_of, digest_of, numbered
from inflight.conformance.transport.subject import FORM_S, TransportSubject
from inflight.contracts import ReceivesAhead, ReservesMemory, WeightReceiver
from inflight.types import WeightBucket

LEVEL = "bytes"
_SIZES = (1, 2, 6, 254, 4097, 65_538, (1 << 20) + 1, (1 << 20) + 2, (1 << 22) + 6, (1 << 24) - 2, (1 << 26) + 14)
"""Sizes of buckets in bytes, close to multiples of word, page and chunk sizes.

Buckets of odd sizes hold encoded bytes.
"""
_LARGE_AGAIN = ((40 << 20) + 6,) * 4
"""Sizes of buckets that are sent afterwards: a store writes them where it has written others."""
_PATTERNS = {
    torch.float64: (
        torch.int64,
        [0x7FF8000000000001, 0x7FF4000000000007, -1, -0x8000000000000000, 1, 0x3FB999999999999A],
    ),
    torch.float32: (torch.int32, [0x7FC00001, 0x7FA00007, -1, -0x80000000, 1, 0x3DCCCCCD]),
    torch.bfloat16: (torch.int16, [0x7FC1, 0x7FA7, -1, -0x8000, 1, 0x3DCD]),
    torch.float16: (torch.int16, [0x7E01, 0x7D07, -1, -0x8000, 1, 0x2E66]),
}
"""Bit patterns by wire dtype: quiet and signalling NaN with a payload, NaN of all ones, -0.0, the smallest subnormal,
0.1."""
_NUM_LARGE = 1_300_021
"""Number of float32 elements of a bucket that is sent to another process and received from it."""
_CLEAN_S = 0.5
"""How long the check waits after it kills a process, so that others can clean up that process's resources."""
_NUM_BUCKETS = 300
"""Number of buckets of one update: more than a byte can count."""
_NUM_UPDATES = 6
"""Number of updates during which received tensors must not change. Some pools reuse memory after a few updates."""
_NUM_ELEMENTS = (4096, 4096, 10, 70_000, 4096, 1, 4096)
"""Number of elements of each bucket of these updates."""


@check("T-08", look_at="any conversion or arithmetic between the tensor and the wire: move bytes, not numbers")
def every_wire_dtype_arrives_bit_for_bit(t: TransportSubject) -> None:
    """Tensors of every wire dtype arrive bit for bit, including NaN payloads, negative zero and subnormals."""
    tensors = [torch.tensor(bits, dtype=kind).view(dtype) for dtype, (kind, bits) in _PATTERNS.items()]
    # All of these are equal to zero as numbers.
    tensors += [torch.tensor(zeros, dtype=dtype) for dtype in _PATTERNS for zeros in ([0.0, -0.0, 0.0], [-0.0] * 70)]
    _require_arrival(t, t.form(), bucket_of(*tensors))


@check("T-09", look_at="receive: shapes () and (0,) when the bucket is split")
def scalars_and_empty_tensors_keep_their_shape(t: TransportSubject) -> None:
    """Scalars and tensors without elements arrive with their shapes, even in a bucket that has no elements at all."""
    receivers = t.form()
    nothing, something = [(0,), (2, 0, 4)], [(), (0,), (3,), (2, 0, 4), (1, 1)]
    for number, shapes in enumerate((something, nothing, something)):
        _require_arrival(t, receivers, bucket_of(*(torch.full(shape, 2.5 + number) for shape in shapes)))


@check("T-10", look_at="receive: views of a buffer must be aligned, but the bytes on the wire are not; storage offsets")
def tensors_at_odd_offsets_arrive(t: TransportSubject) -> None:
    """Tensors arrive in order, whatever their offsets within the bucket and within the memory that they are views of,
    and tensors of equal shape are not swapped."""
    tensors = []
    for i, count in enumerate((1, 3, 7, 127)):
        tensors += [torch.randn(count).to(torch.bfloat16), torch.randn(count), torch.randn(i + 1, dtype=torch.float64)]
        tensors += [torch.randn(count), torch.randn(2, 3), torch.randn(2, 3)]
    tensors += [torch.tensor([float(i)]) for i in range(2000)]  # more than one system call can write
    packed = torch.randn(1000)  # a trainer's tensors are often views of one buffer
    tensors += [packed[1:8], packed[100:220].reshape(10, 12), packed[400:900].view(torch.bfloat16), packed[999:]]
    receivers = t.form()
    _require_arrival(t, receivers, bucket_of(*tensors))
    # Parts that together fill one buffer, but are not sent in its order.
    parts = torch.split(torch.randn(600), [50, 100, 150, 300])
    _require_arrival(t, receivers, bucket_of(parts[0], parts[2], parts[1], parts[3]))
    _require_arrival(t, receivers, bucket_of(*reversed(torch.split(torch.randn(600), 100))))


@check("T-11", look_at="send: call .contiguous() before reading the bytes")
def strided_tensors_arrive_row_major(t: TransportSubject) -> None:
    """Tensors that are not contiguous arrive row-major, even if they are adjacent in memory."""
    source = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    receivers = t.form()
    _require_arrival(t, receivers, bucket_of(source.t(), source[:, ::2], source[0].expand(3, 6)))
    stacked = torch.arange(72, dtype=torch.float32).reshape(3, 4, 6)  # like the weights of experts
    _require_arrival(t, receivers, bucket_of(*(part.t() for part in stacked)))


@check("T-12", deadline_s=30, look_at="short writes and reads, limits on the size of a message, remainders of chunks")
def buckets_of_any_size_arrive_whole(t: TransportSubject) -> None:
    """A bucket of any size from one byte to 64 MB arrives complete, even if its bytes are encoded, it follows others of
    the same size, or it is received ahead."""
    (receiver,) = t.form()
    wrong, seconds = {}, 0.0
    sizes = (*_SIZES, *_LARGE_AGAIN, *(_SIZES if isinstance(receiver, ReceivesAhead) else ()))
    for number, size_bytes in enumerate(sizes):
        data = torch.arange(number, number + size_bytes // 8 + 1).mul_(0x9E3779B97F4A7C15 - (1 << 64))
        tensor = data.view(torch.uint8)[:size_bytes]
        bucket = bucket_of(tensor if size_bytes % 2 else tensor.view(torch.bfloat16))
        started = time.monotonic()
        ((arrived,),) = t.transfer([receiver], bucket, ahead=number >= len(_SIZES))
        seconds = time.monotonic() - started
        if count := _num_wrong(arrived, tensor):
            wrong[size_bytes] = count
        del arrived
    t.note(sizes=_SIZES, seconds_of_the_largest=seconds, wrong_bytes_by_size=wrong)
    require(not wrong, f"bytes that arrived wrong, by size of the bucket: {wrong}")


@check("T-13", look_at="send and receive: one stream, one order; buffers that are refilled while they are being sent")
def buckets_arrive_in_the_order_sent(t: TransportSubject) -> None:
    """Buckets arrive in the order in which they were sent."""
    (receiver,) = t.form()
    buckets = [bucket_of(torch.full((1000,), float(index)), index=index) for index in range(_NUM_BUCKETS)]
    t.begin([receiver], *buckets)

    def receive(bucket: WeightBucket) -> float:
        if bucket.index % 3 == 0:
            t.receive_ahead(receiver, bucket)
        return float(receiver.receive(bucket.specs, FORM_S)[0][0])

    sending = t.start(lambda: [t.sender.send(bucket, FORM_S) for bucket in buckets], "the sends of all buckets")
    receiving = t.start(lambda: [receive(bucket) for bucket in buckets], "the receives of all buckets")
    found, _ = results([receiving, sending], FORM_S + SLACK_S)
    strange = [(i, value) for i, value in enumerate(found) if value != i]
    t.note(num_buckets=len(buckets), wrong_buckets=len(strange), seconds=receiving.ending(0.0).seconds)
    require(not strange, f"bucket {strange[0][0]} was sent and bucket {strange[0][1]:g} arrived" if strange else "")


@check("T-14", "3-receivers", look_at="send: it must reach all ranks, not only the first")
def every_receiver_gets_every_byte(t: TransportSubject) -> None:
    """Every rank of every endpoint receives every byte, in memory of its own: what one rank writes there changes
    neither what the others receive in the same update nor what was sent."""
    for num_ranks in ([1, 1, 1], [1, 2]):
        receivers = t.form_endpoints(num_ranks)
        wrong = [0, 0, 0]
        for is_last in (False, False, True):
            bucket = bucket_of((tensor := torch.randn(10_007)).clone())
            for i, (arrived,) in enumerate(t.transfer(receivers, bucket)):
                wrong[i] += _num_wrong(arrived, tensor)
                if is_last:
                    arrived.zero_()
        require(bucket.tensors[0].equal(tensor), "a receiver's write changed the tensor that was sent")
        t.note(**{f"wrong_bytes_per_receiver_with_{len(num_ranks)}_endpoints": wrong})
        require(not any(wrong), f"bytes that differ, per receiver, of endpoints with {num_ranks} ranks: {wrong}")
        for receiver in receivers:
            receiver.abort()


@check("T-46", "peer 2-receivers", deadline_s=40)
@look_at("state that only ends in the same process share: objects, descriptors, /proc/self paths, cleanup objects")
def ends_in_different_processes_exchange_bytes(t: TransportSubject) -> None:
    """A receiver in another process and one in the sender's process both receive every byte of an update. The death of
    the other process changes nothing that the remaining receiver has received or, from a store, has yet to receive. A
    bucket that another process sends also arrives."""
    # A mixture of dtypes and shapes, then one tensor that is larger than any buffer of a socket.
    mixed = [
        torch.randn(7, 5),
        torch.randn(3).to(torch.bfloat16),
        torch.empty(0),
        torch.randn(1021, dtype=torch.float64),
    ]
    buckets = [bucket_of(*mixed), bucket_of(torch.randn(_NUM_LARGE), index=1), bucket_of(torch.randn(9), index=2)]
    peer, (receiver,) = t.form_with_peer(others=1, buckets=buckets)
    t.begin([receiver], *buckets)
    arrived = []
    for bucket in buckets:
        receives = t.start_receives([receiver], bucket) if t.sender.is_collective or bucket.index == 0 else []
        results([*receives, t.start_send(bucket)], FORM_S + SLACK_S)
        arrived += [receive.result(0.0) for receive in receives]
    digests, due = [peer.digest() for _ in buckets], [digest_of(bucket.tensors) for bucket in buckets]
    peer.kill()
    time.sleep(_CLEAN_S)
    arrived += [receiver.receive(bucket.specs, FORM_S) for bucket in buckets[len(arrived) :]]
    t.note(digests=due)
    wrong = [i for i, (found, expected) in enumerate(zip(digests, due, strict=True)) if found != expected]
    require(not wrong, f"these buckets arrived with wrong contents in the other process: {wrong}")
    wrong = [i for i, tensors in enumerate(arrived) if digest_of(tensors) != due[i]]
    require(not wrong, f"these buckets arrived with wrong contents, or changed when the other process died: {wrong}")
    sent = bucket_of(numbered(_NUM_LARGE))
    _, receiver = t.join_sending_peer(sent)
    is_same = digest_of(receiver.receive(sent.specs, FORM_S)) == digest_of(sent.tensors)
    require(is_same, "the bucket that the other process sent arrived with wrong contents")


@check("T-15", look_at="send: return only when the bytes have left; receive: use its own memory")
def a_sent_tensor_may_change(t: TransportSubject) -> None:
    """Once send has returned, changes to the sent tensors do not affect what is received."""
    (receiver,) = t.form()
    wrong = {}
    for size in (16, 1 << 20):
        tensor = torch.randn(size)
        before = tensor.clone()
        bucket = bucket_of(tensor)
        t.begin([receiver], bucket)
        sending = t.start_send(bucket)
        if returned_early := sending.has_ended(0.3):
            tensor.zero_()
        (receive,) = t.start_receives([receiver], bucket)
        sending.result(FORM_S + SLACK_S)
        tensor.zero_()
        (arrived,) = receive.result(FORM_S + SLACK_S)
        tensor.fill_(-1.0)
        wrong[f"{before.nbytes} bytes"] = _num_wrong(arrived, before)
        t.note(**{f"returned_before_the_receive_{before.nbytes}": returned_early})
    t.note(wrong_bytes=wrong)
    require(not any(wrong.values()), f"bytes that changed with the sender's tensor, by size of the bucket: {wrong}")


@check("T-16", deadline_s=30)
@look_at(
    "receive, receive_ahead and begin: buffers that are reused while tensors still refer to them; where buckets of "
    "different sizes are stored; memory that abort or reserve reuses"
)
def received_tensors_stay(t: TransportSubject) -> None:
    """Received tensors do not change when later buckets or later updates arrive (whatever their sizes, and whether or
    not they are received ahead), when other tensors of the same update are dropped, when only views of the received
    tensors are kept, or when one or both ends abort the group. If a sender reserves memory, buckets that were written
    there, entirely or in part and in any layout, also arrive."""
    (receiver,) = t.form()
    sent: list[torch.Tensor] = []
    arrived: list[torch.Tensor] = []
    for number in range(_NUM_UPDATES):
        counts = _NUM_ELEMENTS[: 5 + number // 2]  # later updates are larger
        buckets = [bucket_of(torch.full((n,), 10.0 * number + index), index=index) for index, n in enumerate(counts)]
        t.begin([receiver], *buckets)
        for bucket in buckets:
            if number % 2:
                t.receive_ahead(receiver, bucket)
            receives = t.start_receives([receiver], bucket)
            results([*receives, t.start_send(bucket)], FORM_S + SLACK_S)
            # A view of a tensor keeps its memory in use.
            arrived += [it.detach() if bucket.index % 2 else it for it in receives[0].result(0.0)]
            sent += bucket.tensors
        del receives
        if number % 2 == 0:  # the next update has the same sizes, and may reuse the memory
            first = len(arrived) - len(buckets)
            del arrived[first], sent[first]
        t.sender.end(is_done=True)
    receiver.abort()
    t.sender.abort()
    (receiver,) = t.form()
    for number in range(_NUM_UPDATES // 2):
        sent.append(torch.full((4096,), -1.0 - number))
        arrived += t.transfer([receiver], bucket_of(sent[-1]))[0]
    receiver.abort()
    (receiver,) = t.form()
    for _ in range(_NUM_UPDATES):
        t.transfer([receiver], bucket_of(torch.full((4096,), -10.0)))
    _require_reserved_buckets_arrive(t)
    wrong = [_num_wrong(*pair) for pair in zip(arrived, sent, strict=True)]
    t.note(wrong_bytes_per_bucket=wrong)
    require(not any(wrong), f"bytes that later buckets or the end of the group changed, per bucket: {wrong}")


def _require_reserved_buckets_arrive(t: TransportSubject) -> None:
    """Require that buckets that were written to the sender's reserved memory arrive, if it reserves any."""
    if not isinstance(t.sender, ReservesMemory):
        return
    (receiver,) = t.form()
    num_reserved = 0
    for number in range(_NUM_UPDATES):  # memory may become available only after earlier updates
        buckets = []
        for index, n in enumerate(_NUM_ELEMENTS):
            tensor = (torch.arange(n) / 3 + number + index).view(2 if n % 2 == 0 else 1, -1)
            # The first tensor is written to the memory unchanged or transposed; a second tensor may lie elsewhere.
            others = [torch.full((n,), float(number))] if (number + index) % 3 == 2 else []
            buckets.append(bucket_of(tensor.t() if (number + index) % 3 else tensor, *others, index=index))
        t.begin([receiver], *buckets)
        arrived = []
        for bucket in buckets:
            (tensor, *others), in_place = bucket.tensors, bucket
            if (memory := t.sender.reserve(bucket.index, sum(it.nbytes for it in bucket.tensors))) is not None:
                stored = memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
                stored.copy_(tensor)
                in_place = WeightBucket(bucket.index, bucket.specs, (stored, *others))
                num_reserved += 1
            (receive,) = t.start_receives([receiver], bucket)
            results([receive, t.start_send(in_place)], FORM_S + SLACK_S)
            arrived.append(receive.result(0.0))
        wrong = [sum(map(_num_wrong, *pair)) for pair in zip(arrived, (it.tensors for it in buckets), strict=True)]
        require(not any(wrong), f"wrong bytes in buckets that were sent from reserved memory, per bucket: {wrong}")
        t.sender.end(is_done=True)
    t.note(num_reserved=num_reserved)
    _require_ended_memory_is_unused(t, receiver)
    _require_any_order_arrives(t)


def _require_any_order_arrives(t: TransportSubject) -> None:
    """Require that tensors arrive even if their order in reserved memory is not their order in the bucket."""
    assert isinstance(t.sender, ReservesMemory)
    (receiver,) = t.form()
    for number in range(_NUM_UPDATES):
        sizes = (4096, 1024, 9000)
        bucket = bucket_of(*(torch.arange(n, dtype=torch.float32) + number for n in sizes))
        t.begin([receiver], bucket)
        tensors = list(bucket.tensors)
        if (memory := t.sender.reserve(0, sum(it.nbytes for it in tensors))) is not None:
            end = 0
            for i in (2, 1, 0) if number % 2 else (1, 2, 0):
                begin, end = end, end + tensors[i].nbytes
                tensors[i] = memory[begin:end].view(torch.float32).copy_(tensors[i])
        (receive,) = t.start_receives([receiver], bucket)
        in_place = WeightBucket(0, bucket.specs, tuple(tensors))
        results([receive, t.start_send(in_place)], FORM_S + SLACK_S)
        wrong = list(map(_num_wrong, receive.result(0.0), bucket.tensors))
        require(not any(wrong), f"wrong bytes in tensors whose order in reserved memory is not the bucket's: {wrong}")
        t.sender.end(is_done=True)


def _require_ended_memory_is_unused(t: TransportSubject, receiver: WeightReceiver) -> None:
    """Require that memory that was reserved for an update that has ended holds nothing of later updates."""
    assert isinstance(t.sender, ReservesMemory)
    bucket = bucket_of(torch.arange(4096.0))
    for _ in range(_NUM_UPDATES):
        t.transfer([receiver], bucket)
    t.begin([receiver], bucket)
    if (memory := t.sender.reserve(0, bucket.tensors[0].nbytes)) is None:
        return
    t.sender.end(is_done=False)
    for _ in range(_NUM_UPDATES):
        t.begin([receiver], bucket)
        receives = t.start_receives([receiver], bucket) if t.sender.is_collective else []
        t.start_send(bucket).result(FORM_S + SLACK_S)
        memory.fill_(0xFF)
        (receive,) = receives or t.start_receives([receiver], bucket)
        num_wrong = _num_wrong(receive.result(FORM_S + SLACK_S)[0], bucket.tensors[0])
        require(not num_wrong, f"memory that was reserved for an ended update holds {num_wrong} bytes of a later one")
        t.sender.end(is_done=True)


@check("T-17", look_at="send: in-place operations on the trainer's tensors")
def sending_leaves_the_tensors_unchanged(t: TransportSubject) -> None:
    """Sending leaves the sender's tensors unchanged."""
    (receiver,) = t.form()
    tensors = [torch.randn(1000), torch.randn(30, 20).t(), torch.randn(7).to(torch.bfloat16)]
    before = [bytes_of(tensor) for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    t.transfer([receiver], bucket_of(*tensors))
    changed = [int((bytes_of(tensor) != old).sum()) for tensor, old in zip(tensors, before, strict=True)]
    t.note(changed_bytes_per_tensor=changed)
    require(not any(changed), f"bytes of the sender's tensors that changed: {changed}")
    require([tensor.stride() for tensor in tensors] == strides, "the strides of the sender's tensors changed")


def _require_arrival(t: TransportSubject, receivers: Sequence[WeightReceiver], bucket: WeightBucket) -> None:
    """Send a bucket to the only receiver, and require that it arrives with the bytes that it had before it was sent."""
    before = [bytes_of(tensor) for tensor in bucket.tensors]
    (arrived,) = t.transfer(receivers, bucket)
    _require_shapes(arrived, bucket)
    wrong = {
        f"{spec.name} {spec.dtype} {list(spec.shape)}": int((bytes_of(tensor) != expected).sum())
        for spec, tensor, expected in zip(bucket.specs, arrived, before, strict=True)
    }
    t.note(wrong_bytes=wrong)
    require(not any(wrong.values()), f"bytes that arrived wrong, by tensor: { {k: n for k, n in wrong.items() if n} }")


def _require_shapes(arrived: Sequence[torch.Tensor], bucket: WeightBucket) -> None:
    found = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in arrived]
    expected = [(spec.dtype, tuple(spec.shape)) for spec in bucket.specs]
    require(found == expected, f"dtypes and shapes are {found}, not {expected}")


def _num_wrong(arrived: torch.Tensor, sent: torch.Tensor) -> int:
    return int((bytes_of(arrived) != bytes_of(sent)).sum())
