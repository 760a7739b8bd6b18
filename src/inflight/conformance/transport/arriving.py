"""Checks that every byte arrives, in order, and stays unchanged afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inflight.conformance.calls import SLACK_S, results
from inflight.conformance.checks import check, require
from inflight.conformance.transport.subject import FORM_S, RUN_ID, TransportSubject, bucket_of, bytes_of
from inflight.types import WeightBucket
from inflight.wire import UpdateRef

LEVEL = "bytes"
_PATTERNS = {
    torch.float64: (
        torch.int64,
        [0x7FF8000000000001, 0x7FF4000000000007, -1, -0x8000000000000000, 1, 0x3FB999999999999A],
    ),
    torch.float32: (torch.int32, [0x7FC00001, 0x7FA00007, -1, -0x80000000, 1, 0x3DCCCCCD]),
    torch.bfloat16: (torch.int16, [0x7FC1, 0x7FA7, -1, -0x8000, 1, 0x3DCD]),
    torch.float16: (torch.int16, [0x7E01, 0x7D07, -1, -0x8000, 1, 0x2E66]),
}
"""Bits by wire dtype: quiet and signalling NaN with a payload, NaN of all ones, -0.0, the smallest subnormal, 0.1."""


@check("T-08", look_at="any conversion or arithmetic between the tensor and the wire: move bytes, not numbers")
def every_wire_dtype_arrives_bit_for_bit(t: TransportSubject) -> None:
    """Tensors of every wire dtype arrive bit for bit, including NaN payloads, negative zero and subnormals."""
    tensors = [torch.tensor(bits, dtype=kind).view(dtype) for dtype, (kind, bits) in _PATTERNS.items()]
    _require_arrival(t, bucket_of(*tensors))


@check("T-09", look_at="receive: shapes () and (0,) when the bucket is split")
def scalars_and_empty_tensors_keep_their_shape(t: TransportSubject) -> None:
    """Scalars and tensors without elements arrive in their shapes."""
    shapes = [(), (0,), (3,), (2, 0, 4), (1, 1)]
    _require_arrival(t, bucket_of(*(torch.full(shape, 2.5) for shape in shapes)))


@check("T-10", look_at="receive: views of a buffer must be aligned to their dtype, but the bytes on the wire are not")
def tensors_at_odd_offsets_arrive(t: TransportSubject) -> None:
    """Tensors arrive whatever their offset within the bucket."""
    tensors = []
    for i, count in enumerate((1, 3, 7, 127)):
        tensors += [torch.randn(count).to(torch.bfloat16), torch.randn(count), torch.randn(i + 1, dtype=torch.float64)]
    _require_arrival(t, bucket_of(*tensors))


@check("T-11", look_at="send: call .contiguous() before reading the bytes")
def strided_tensors_arrive_row_major(t: TransportSubject) -> None:
    """Tensors that are not contiguous arrive row-major."""
    source = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    _require_arrival(t, bucket_of(source.t(), source[:, ::2], source[0].expand(3, 6)))


@check("T-12", look_at="short writes and reads, limits on the size of a message")
def a_bucket_of_64_mb_arrives_whole(t: TransportSubject) -> None:
    """A bucket of 64 MB arrives whole."""
    tensor = torch.arange(1 << 23, dtype=torch.int64).view(torch.float64)
    (receiver,) = t.form()
    receive, *_ = t.start_receives([receiver], bucket := bucket_of(tensor))
    t.start_send(bucket)
    (arrived,) = receive.result(FORM_S + SLACK_S)
    seconds = receive.ending(0.0).seconds
    wrong = 8 * int((arrived.cpu().view(torch.int64) != tensor.view(torch.int64)).sum())
    t.note(size_bytes=tensor.nbytes, seconds=seconds, wrong_bytes=wrong)
    require(wrong == 0, f"{wrong} of {tensor.nbytes} bytes arrived wrong")


@check("T-13", look_at="send and receive: one stream, one order; buffers that are refilled while they are being sent")
def buckets_arrive_in_the_order_sent(t: TransportSubject) -> None:
    """Buckets arrive in the order in which they were sent."""
    (receiver,) = t.form()
    buckets = [bucket_of(torch.full((1000,), float(index)), index=index) for index in range(100)]
    sending = t.start(lambda: [t.sender.send(bucket, FORM_S) for bucket in buckets], "the sends of 100 buckets")
    receiving = t.start(
        lambda: [float(receiver.receive(b.specs, FORM_S)[0][0]) for b in buckets], "the receives of 100 buckets"
    )
    found, _ = results([receiving, sending], FORM_S + SLACK_S)
    strange = [(i, value) for i, value in enumerate(found) if value != i]
    t.note(num_buckets=len(buckets), wrong_buckets=len(strange), seconds=receiving.ending(0.0).seconds)
    require(not strange, f"bucket {strange[0][0]} was sent and bucket {strange[0][1]:g} arrived" if strange else "")


@check("T-14", "3-receivers", look_at="send: it must reach all ranks, not only the first")
def every_receiver_gets_every_byte(t: TransportSubject) -> None:
    """Every rank of the group receives every byte."""
    receivers = t.form(3)
    wrong = [0, 0, 0]
    for index in range(3):
        tensor = torch.randn(10_007)
        for i, (arrived,) in enumerate(t.transfer(receivers, bucket_of(tensor, index=index))):
            wrong[i] += _num_wrong(arrived, tensor)
    t.note(wrong_bytes_per_receiver=wrong)
    require(not any(wrong), f"bytes that differ, per receiver: {wrong}")


@check("T-15", look_at="send: return only when the bytes have left; receive: use its own memory")
def a_sent_tensor_may_change(t: TransportSubject) -> None:
    """Once send has returned, its tensors may change without changing what is received."""
    (receiver,) = t.form()
    wrong = {}
    for size in (16, 1 << 20):
        tensor = torch.randn(size)
        before = tensor.clone()
        bucket = bucket_of(tensor)
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
    require(not any(wrong.values()), f"bytes that followed the sender's tensor, by size of the bucket: {wrong}")


@check("T-16", look_at="receive and begin: buffers that are reused while tensors still refer to them")
def received_tensors_stay(t: TransportSubject) -> None:
    """Received tensors do not change when later buckets or later updates arrive."""
    (receiver,) = t.form()
    sent = [torch.full((4096,), float(index)) for index in range(10)]
    arrived = []
    for index, tensor in enumerate(sent):
        if index % 5 == 0:
            receiver.begin(UpdateRef(run_id=RUN_ID, version=1 + index // 5))
        arrived.append(t.transfer([receiver], bucket_of(tensor, index=index))[0][0])
    wrong = [_num_wrong(*pair) for pair in zip(arrived, sent, strict=True)]
    t.note(wrong_bytes_per_bucket=wrong)
    require(not any(wrong), f"bytes that later buckets changed, per bucket: {wrong}")


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


def _require_arrival(t: TransportSubject, bucket: WeightBucket) -> None:
    before = [bytes_of(tensor) for tensor in bucket.tensors]
    (arrived,) = t.transfer(t.form(), bucket)
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
