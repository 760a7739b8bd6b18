"""A check that mixes groups, updates, attempts, buckets and receivers at random, with a fixed seed."""

from __future__ import annotations

import gc
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inflight.conformance.calls import SLACK_S, PendingCall, results
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.transport.buckets import bucket_of, bytes_of
from inflight.conformance.transport.sockets import can_list_sockets, num_descriptors
from inflight.conformance.transport.subject import FORM_S, TransportSubject, failure_of
from inflight.contracts import WeightReceiver
from inflight.types import WeightBucket
from inflight.wire import UpdateRef

LEVEL = "bytes"
_SEED = 45
_NUM_GROUPS = 8
_MOST_UPDATES, _MOST_BUCKETS, _MOST_TENSORS = 5, 4, 6
_MANY_BUCKETS = 12
"""Number of buckets of some updates, whose tensors are small."""
_MOST_KEPT = 60
"""Beyond this number of kept tensors, only one received tensor in ten is kept."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.uint8)
_SHAPES = ((), (0,), (1,), (3,), (7, 5), (2, 0, 4), (64, 64), (1021,))
_LARGE = (100_003, 500_009, 1_300_021, 4_300_013)
"""Numbers of elements of large tensors."""
_GROUP_S = 60.0
"""Time limit for everything that happens in one group."""
_WAIT_S = 0.02
"""How long one end is ahead of the other."""
_SESSIONS = ("", "first", "second")
_SKIPPED = (0, 0, 9, 255, (1 << 16) + 1, (1 << 32) + 1)
"""Numbers of versions that may be skipped before an update."""
_PREFIXES = ("tensor", "layers.0.weight", "__metadata__", "sz/../\u00fc\u4e2d", "w" * 200)
"""Prefixes of tensor names."""
_OTHER_RUN = "another run"


@check("T-45", deadline_s=90)
@look_at("what is kept from one bucket, update, attempt or group to the next")
def mixed_groups_and_updates(t: TransportSubject) -> None:
    """However groups of any size, complete and abandoned updates, new attempts at a version, and buckets of any content
    follow one another, while another sender in the same process does the same for another run, every receiver gets
    exactly the bytes of each bucket, and received tensors do not change while they are kept. Buckets of earlier updates
    are refused, and abort ends pending receives. The numbers of open descriptors and threads do not grow."""
    mix, other = _Mix(t, _SEED), _Mix(t.neighbour(_OTHER_RUN), _SEED + 1)
    counts: list[tuple[int, int]] = []
    for number in range(1, _NUM_GROUPS + 1):
        alongside = t.start(other.use_a_group, f"the group that another run uses at the same time as group {number}")
        mix.use_a_group()
        alongside.result(_GROUP_S)
        if number % (_NUM_GROUPS // 2) == 0:
            other.drop()
            counts.append(mix.num_left(counts))
    for whose, it in {"": mix, "of_another_run_": other}.items():
        found = {"updates": it.num_updates, "buckets": it.num_buckets, "kept": it.num_compared}
        t.note(**{f"{whose}{what}": num for what, num in found.items()})
    t.note(descriptors_and_threads=counts)
    more = [after - before for before, after in zip(*counts, strict=True)]
    words = f"{more[0]} more descriptors and {more[1]} more threads than after the first {_NUM_GROUPS // 2}"
    require(max(more) <= 0, f"after {_NUM_GROUPS} groups, there are {words}")


class _Mix:
    """Draws what is done next, and remembers what was received."""

    def __init__(self, t: TransportSubject, seed: int) -> None:
        self._t, self._draw = t, random.Random(seed)
        self._bytes = torch.Generator().manual_seed(seed)
        self._kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """Received tensors: a description, the tensor, and its bytes."""
        self._earlier: UpdateRef | None = None
        """The update before the current one."""
        self.num_updates = self.num_buckets = self.num_compared = 0

    def use_a_group(self) -> None:
        """Form a group, send some updates, and abort every receiver and sometimes the sender, in any order."""
        t, draw = self._t, self._draw
        sizes = ([1], [1, 1], [2], [1, 2]) if t.max_receivers is None or t.max_receivers >= 3 else ([1],)
        receivers = t.form_endpoints(draw.choice(sizes))
        for _ in range(draw.randint(1, _MOST_UPDATES)):
            self._update(receivers)
        pending: list[PendingCall[Any]] = []
        if draw.random() < 0.5:
            never = self._bucket(0)
            t.begin(receivers, never)
            pending = t.start_receives(receivers, never)
            pending[0].has_ended(_WAIT_S)
        ends = [receiver.abort for receiver in receivers] + [t.sender.abort] * (draw.random() < 0.6)
        draw.shuffle(ends)
        for abort in ends:
            abort()
        for receive in pending:
            failure_of(receive, FORM_S + SLACK_S)
        self._require_unchanged("when the group ended")
        draw.shuffle(self._kept)
        del self._kept[_MOST_KEPT // 2 :]

    def drop(self) -> None:
        """Abort the sender, and drop all received tensors."""
        self._t.sender.abort()
        self._kept.clear()

    def num_left(self, earlier: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Abort the sender, drop all received tensors, and return the numbers of open descriptors and of threads: as
        soon as neither exceeds its value in one of ``earlier``, or after a time limit."""
        self.drop()
        started = time.monotonic()
        while True:
            gc.collect()
            found = (num_descriptors() if can_list_sockets() else 0), threading.active_count()
            is_low = any(found[0] <= before[0] and found[1] <= before[1] for before in earlier)
            if is_low or time.monotonic() - started > (SLACK_S if earlier else SLACK_S / 5):
                return found
            time.sleep(0.02)

    def _update(self, receivers: Sequence[WeightReceiver]) -> None:
        """Send an update, or the first buckets of one that is then abandoned."""
        t, draw = self._t, self._draw
        if draw.random() < 0.2:
            buckets = [self._small_bucket(index) for index in range(_MANY_BUCKETS)]
        else:
            buckets = [self._bucket(index) for index in range(draw.randint(1, _MOST_BUCKETS))]
        if self.num_updates and draw.random() < 0.3:  # another attempt at the version of the previous update
            session_id = draw.choice(_SESSIONS)
            t.begin_session(session_id, receivers, *buckets)
        else:
            session_id = ""
            t.skip_versions(draw.choice(_SKIPPED))
            t.begin(receivers, *buckets)
        is_done = draw.random() < 0.8
        sent = buckets if is_done else buckets[: draw.randrange(len(buckets))]
        due = [[bytes_of(tensor) for tensor in bucket.tensors] for bucket in sent]
        # Ranks of a collective transport receive while a bucket is sent; those of a store do so then or at any time
        # afterwards, in any order.
        together = [it for it in receivers if t.sender.is_collective or draw.random() < 0.5]
        later = [it for it in receivers if it not in together]
        draw.shuffle(later)
        earlier, self._earlier = self._earlier, t.ref(session_id)
        for bucket, expected in zip(sent, due, strict=True):
            for receiver in together:
                self._receive_ahead(receiver, bucket)
            if earlier not in (None, self._earlier) and draw.random() < 0.3:
                failure_of(t.start_send(replace(bucket, ref=earlier)), FORM_S + SLACK_S)
            if is_sent_first := draw.random() < 0.3:
                sending = t.start_send(bucket)
                sending.has_ended(_WAIT_S)
            is_slow = [draw.random() < 0.1 for _ in together]
            receives = []
            for receiver, is_late in zip(together, is_slow, strict=True):
                time.sleep(_WAIT_S * is_late)
                receives += t.start_receives([receiver], bucket)
            results([*receives, sending if is_sent_first else t.start_send(bucket)], FORM_S + SLACK_S)
            if draw.random() < 0.5:
                for tensor in bucket.tensors:
                    tensor.zero_()
            for receive in receives:
                self._compare(bucket, expected, receive.result(0.0))
        for receiver in later:
            for bucket, expected in zip(sent, due, strict=True):
                self._receive_ahead(receiver, bucket)
                self._compare(bucket, expected, receiver.receive(bucket.specs, FORM_S))
        t.sender.end(is_done=is_done)
        self.num_updates += 1
        self._require_unchanged("when the update ended")

    def _receive_ahead(self, receiver: WeightReceiver, bucket: WeightBucket) -> None:
        if self._draw.random() < 0.5:
            self._t.receive_ahead(receiver, bucket)

    def _compare(self, bucket: WeightBucket, expected: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor]) -> None:
        self.num_buckets += 1
        where = f"bucket {bucket.index} of update {self.num_updates + 1} of this check"
        shapes = [(it.dtype, tuple(it.shape)) for it in arrived]
        due = [(getattr(torch, spec.dtype), tuple(spec.shape)) for spec in bucket.specs]
        require(shapes == due, f"{where} arrived with the dtypes and shapes {shapes}, not {due}")
        for spec, tensor, data in zip(bucket.specs, arrived, expected, strict=True):
            num_wrong = int((bytes_of(tensor) != data).sum())
            require(not num_wrong, f"{num_wrong} of {len(data)} bytes of {spec.name!r} in {where} are wrong")
            if self._draw.random() < 0.2:
                tensor.zero_()  # an endpoint may write to it; this affects neither the others nor the sender
            elif len(self._kept) < _MOST_KEPT or self._draw.random() < 0.1:
                kept = tensor.detach() if self._draw.random() < 0.5 else tensor  # detach returns a view
                self._kept.append((f"{spec.name!r} in {where}", kept, data))

    def _require_unchanged(self, when: str) -> None:
        for what, tensor, data in self._kept:
            self.num_compared += 1
            num_wrong = int((bytes_of(tensor) != data).sum())
            require(not num_wrong, f"{num_wrong} of {len(data)} bytes of {what} had changed {when}")

    def _small_bucket(self, index: int) -> WeightBucket:
        return bucket_of(self._tensor((self._draw.randint(1, 40),)), index=index, prefix=self._draw.choice(_PREFIXES))

    def _bucket(self, index: int) -> WeightBucket:
        draw = self._draw
        if draw.random() < 0.2:  # pieces of one tensor, in any order
            sizes = [draw.randint(1, 300) for _ in range(draw.randint(2, _MOST_TENSORS))]
            pieces = list(torch.split(self._tensor((sum(sizes),)), sizes))
            draw.shuffle(pieces)
            return bucket_of(*pieces, index=index, prefix=draw.choice(_PREFIXES))
        tensors = [self._tensor(draw.choice(_SHAPES)) for _ in range(draw.randint(1, _MOST_TENSORS))]
        if draw.random() < 0.3:
            tensors.append(self._tensor((draw.choice(_LARGE),)))
        if draw.random() < 0.5:  # views that lie side by side in memory, like the parts of a fused weight
            whole = self._tensor((draw.randint(2, 5), 12, 10))
            tensors += [part.t() for part in whole] if draw.random() < 0.5 else list(whole)
        if draw.random() < 0.5:
            draw.shuffle(tensors)
        return bucket_of(*tensors, index=index, prefix=draw.choice(_PREFIXES))

    def _tensor(self, shape: Sequence[int]) -> torch.Tensor:
        dtype = self._draw.choice(_DTYPES)
        num_bytes = math.prod(shape) * dtype.itemsize
        data = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=self._bytes)
        return data.view(dtype).reshape(tuple(shape))
