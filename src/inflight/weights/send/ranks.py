"""Publishing by all ranks of a trainer: rank 0 decides, and each rank sends the parts of the weights that it holds.

Rank 0 sends orders through `ShardedWeightSource.exchange`, and the other ranks answer an order in the next exchange, so
that they encode the next bucket while rank 0 announces the current one. If servers read a part independently, it is
stored before the rank answers; if all servers receive it collectively, it is sent afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError

from inflight.base.threads import start_in_thread
from inflight.base.transport_registry import spec_type
from inflight.base.validation import describe_problems
from inflight.contracts import ReservesMemory, SendsFromDevice, ShardedWeightSource, WeightSender
from inflight.errors import InflightError, TransferError
from inflight.types import WeightBucket
from inflight.weights.encode.bucket_bytes import Rounding, sent_bytes
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES
from inflight.weights.encode.parts import part_of_update
from inflight.weights.send.encoder import BucketEncoder
from inflight.weights.send.gathering import gather_only, weight_update_of
from inflight.wire import (
    Encoding,
    Items,
    Manifest,
    Natural,
    SentBytes,
    TransportBody,
    TransportSpec,
    UpdateMessage,
    UpdateRef,
    WeightUpdate,
    WireModel,
)

T = TypeVar("T")
_SLACK_S = 30.0
"""How much longer than a deadline, in seconds, the other ranks wait for the next order, because rank 0 cleans up
first.
"""
_ANSWER_S = 2.0
"""How much longer than the deadline, in seconds, rank 0 waits for answers; the other ranks stop by themselves at the
deadline.
"""


class GatherOrder(WireModel):
    """Take part in gathering whole tensors. No further order follows."""

    do: Literal["gather"] = "gather"
    bucket_bytes: Natural


class OpenOrder(WireModel):
    """Open a weight group and answer with its specs."""

    do: Literal["open"] = "open"
    run_id: str
    num_ranks: Items[Natural]
    timeout_s: float


class JoinOrder(WireModel):
    """Join the group that was just opened."""

    do: Literal["join"] = "join"


class BeginOrder(UpdateMessage):
    """Begin an update of this rank's current weights.

    ``manifest`` is the digest of rank 0's manifest. A rank that divides tensors differently must not send anything.
    """

    do: Literal["begin"] = "begin"
    manifest: str
    incarnation: Natural
    bucket_bytes: Natural
    encodings: Items[Encoding]
    is_delta: bool
    base: UpdateRef | None
    deadline_s: float


class PartOrder(WireModel):
    """Encode this rank's part of the next bucket, and answer with a description of the bytes to be sent."""

    do: Literal["part"] = "part"
    timeout_s: float


class AnswerOrder(WireModel):
    """Answer the previous order, and begin nothing new."""

    do: Literal["answer"] = "answer"


class EndOrder(WireModel):
    """End the publish. ``leaves`` ends the group as well."""

    do: Literal["end"] = "end"
    is_applied: bool
    leaves: bool


Order = GatherOrder | OpenOrder | JoinOrder | BeginOrder | PartOrder | AnswerOrder | EndOrder
_ORDER: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="do")])


class Answer(WireModel):
    """The outcome of an order on one rank."""

    error: str | None = None
    specs: Items[TransportBody] = ()
    sent: SentBytes | None = None


class RankSenders(WeightSender, SendsFromDevice, ReservesMemory):
    """The senders of all ranks, combined into one sender on rank 0.

    ``own`` is the sender of rank 0; every other rank has a `PartSender`.

    Outside `sending`, buckets are gathered, and only ``own`` sends them.
    """

    def __init__(self, own: WeightSender, source: ShardedWeightSource, *, delta: bool) -> None:
        self.source = source
        self._own = own
        self._is_delta = delta
        self.has_others = False
        """Whether the current group includes the other ranks."""
        self._is_sending = self._is_lost = False
        self._bucket_bytes = DEFAULT_BUCKET_BYTES
        self._deadline_s = self._deadline = 0.0
        self._lock = threading.Lock()
        """Held while ranks exchange messages, because an abandoned call of an earlier publish may still be exchanging
        messages.
        """

    @property
    def is_collective(self) -> bool:
        return self._own.is_collective

    @property
    def sends_from_device(self) -> bool:
        return isinstance(self._own, SendsFromDevice) and self._own.sends_from_device

    def reserve(self, index: int, size_bytes: int) -> torch.Tensor | None:
        return self._own.reserve(index, size_bytes) if isinstance(self._own, ReservesMemory) else None

    def specs(self, run_id: str, num_ranks: Sequence[int], timeout_s: float) -> Sequence[TransportSpec]:
        self.has_others = False
        if not self._is_sending:
            return self._own.specs(run_id, num_ranks, timeout_s)
        self._order(OpenOrder(run_id=run_id, num_ranks=tuple(num_ranks), timeout_s=timeout_s))
        own = self._own.specs(run_id, num_ranks, timeout_s)
        by_rank = [
            [spec_type(spec.transport).model_validate_json(spec.model_dump_json()) for spec in answer.specs]
            for answer in self._order(AnswerOrder())
        ]
        self.has_others, self._is_lost = True, False
        return [spec.model_copy(update={"others": tuple(others)}) for spec, *others in zip(own, *by_rank, strict=True)]

    def join(self) -> None:
        if self._is_sending:
            self._order(JoinOrder())
        self._own.join()

    def begin(self, update: WeightUpdate) -> None:
        if self._is_sending:
            self._order(
                BeginOrder(
                    **update.ref.model_dump(),
                    manifest=_digest(update.manifest),
                    incarnation=update.incarnation,
                    bucket_bytes=self._bucket_bytes,
                    encodings=update.encodings,
                    is_delta=self._is_delta,
                    base=update.base,
                    deadline_s=self._deadline_s,
                )
            )
        self._own.begin(part_of_update(update, 0) if update.manifest.shardings else update)

    def send(self, bucket: WeightBucket, timeout_s: float) -> None:
        self._own.send(bucket, timeout_s)

    def end(self, *, is_done: bool) -> None:
        self._own.end(is_done=is_done)

    def abort(self) -> None:
        """Leave the group on rank 0. The other ranks leave it when the publish ends."""
        self.has_others, self._is_lost = False, True
        self._own.abort()

    def gather(self, bucket_bytes: int, deadline_s: float) -> None:
        """Make the other ranks take part in gathering whole tensors."""
        self._deadline = time.monotonic() + deadline_s
        self._order(GatherOrder(bucket_bytes=bucket_bytes))

    @contextlib.contextmanager
    def sending(self, bucket_bytes: int, deadline_s: float) -> Iterator[PartsInSending]:
        """Make every rank send its parts of the next update. Leaving the context ends the update on all ranks."""
        self._is_sending, self._is_lost = True, False
        self._bucket_bytes, self._deadline_s = bucket_bytes, deadline_s
        self._deadline = time.monotonic() + deadline_s
        sending = PartsInSending(self._parts)
        try:
            yield sending
        finally:
            sending.close()
            with contextlib.suppress(TransferError):  # a lost rank has already been reported
                self._order(EndOrder(is_applied=sending.is_applied, leaves=self._is_lost))

    def _parts(self, update: WeightUpdate) -> Generator[WeightBucket, None, None]:
        num_left = len(update.buckets)
        self._order(PartOrder(timeout_s=self._remaining_s()))
        with contextlib.closing(self.source.local_weights(update.buckets)) as local:
            for bucket in local:
                num_left -= 1
                answers = self._order(PartOrder(timeout_s=self._remaining_s()) if num_left else AnswerOrder())
                yield replace(bucket, others=tuple(answer.sent or SentBytes() for answer in answers))

    def _remaining_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _order(self, order: Order) -> list[Answer]:
        """Send an order, and return the other ranks' answers to the previous order.

        Raises `TransferError` if a rank failed.
        """
        with self._lock:
            if not self._is_sending and not isinstance(order, GatherOrder):
                raise TransferError("the publish has ended")
            self._is_sending = self._is_sending and not isinstance(order, EndOrder)
            texts = self.source.exchange(order.model_dump_json().encode(), self._remaining_s() + _ANSWER_S)
        answers = [_parse(Answer.model_validate_json, text) for text in texts[1:]]
        for rank, answer in enumerate(answers, start=1):
            if answer.error is not None:
                raise TransferError(f"rank {rank} of the trainer: {answer.error}")
        return answers


class PartsInSending:
    """One update to which every rank contributes parts. Set ``is_applied`` if every endpoint has applied the update."""

    def __init__(self, parts_of: Callable[[WeightUpdate], Generator[WeightBucket, None, None]]) -> None:
        self.is_applied = False
        self._parts_of = parts_of
        self._parts: Generator[WeightBucket, None, None] | None = None

    def buckets_of(self, update: WeightUpdate) -> Iterator[WeightBucket]:
        """Yield rank 0's parts of an update, each with descriptions of the other ranks' parts of the same bucket."""
        self._parts = self._parts_of(update)
        return self._parts

    def close(self) -> None:
        """Stop reading the weights."""
        if self._parts is not None:
            self._parts.close()


class PartSender:
    """The sender of a trainer rank other than 0, for publishers that were created with ``sharded``.

    Call `send` on every rank other than 0 for each `publish_weights` on rank 0. Use it as a context manager, or call
    `close`.
    """

    def __init__(self, source: ShardedWeightSource, sender: WeightSender) -> None:
        self._source = source
        self._sender = sender
        self._encoder: BucketEncoder | None = None

    def __enter__(self) -> PartSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._sender.abort()

    def send(self, deadline_s: float = 60.0) -> None:
        """Take part in one publish by rank 0 with this deadline, and return when it has ended.

        If sending fails, rank 0 reports the failure; this rank then leaves the group, and the next publish forms a new
        one. Raises `TransferError` if rank 0 does not answer, and the errors of gathering.
        """
        answer = Answer()
        parts: _Parts | None = None
        while True:
            (text,) = self._source.exchange(answer.model_dump_json().encode(), deadline_s + _SLACK_S)
            order: Order = _parse(_ORDER.validate_json, text)
            if isinstance(order, GatherOrder):
                return gather_only(self._source, order.bucket_bytes)
            if isinstance(order, EndOrder):
                return self._end(order, parts)
            if isinstance(order, BeginOrder):
                parts = None
            try:
                if isinstance(order, BeginOrder):
                    parts = self._begin(order)
                    answer = Answer()
                elif parts is not None:
                    answer = parts.carry_out(order)
                else:
                    answer = self._form(order)
            except Exception as error:  # rank 0 reports it
                answer = Answer(error=str(error) or type(error).__name__)

    def _form(self, order: Order) -> Answer:
        if isinstance(order, OpenOrder):
            specs = self._sender.specs(order.run_id, order.num_ranks, order.timeout_s)
            return Answer(specs=tuple(TransportBody.model_validate_json(it.model_dump_json()) for it in specs))
        if isinstance(order, JoinOrder):
            self._sender.join()
        return Answer()

    def _begin(self, order: BeginOrder) -> _Parts:
        encoder = self._encoder
        rounding: Rounding = next((it for it in order.encodings if it != "delta"), "raw")
        if encoder is None or (encoder.encoding, encoder.is_delta) != (rounding, order.is_delta):
            rank = self._source.rank
            encoder = BucketEncoder(self._sender, encoding=rounding, delta=order.is_delta, rank=rank)
            self._encoder = encoder
        update = weight_update_of(
            self._source,
            run_id=order.run_id,
            incarnation=order.incarnation,
            bucket_bytes=order.bucket_bytes,
            deadline_s=order.deadline_s,
            keep=order.is_delta,
            version=order.version,
            sharded=True,
        )
        if _digest(update.manifest) != order.manifest:
            raise TransferError("its tensors, or the boxes that each rank sends of them, differ from those of rank 0")
        if order.base is not None and encoder.base_of(update) != order.base:
            raise TransferError(f"it does not hold version {order.base.version}, the base of the delta")
        known = {"session_id": order.session_id, "encodings": order.encodings, "base": order.base}
        update = update.model_copy(update=known)
        encoder.begin(update)
        self._sender.begin(part_of_update(update, self._source.rank))
        return _Parts(self._source, self._sender, encoder, update)

    def _end(self, order: EndOrder, parts: _Parts | None) -> None:
        with contextlib.suppress(InflightError):  # rank 0 has reported the failure that led here
            if order.leaves:
                self._sender.abort()
            if parts is not None:
                parts.end(is_applied=order.is_applied)
        if self._encoder is not None and (order.leaves or not order.is_applied):
            self._encoder.forget()


class _Parts:
    """This rank's parts of one update."""

    def __init__(
        self, source: ShardedWeightSource, sender: WeightSender, encoder: BucketEncoder, update: WeightUpdate
    ) -> None:
        self._sender = sender
        self._encoder = encoder
        self._update = update
        self._local = source.local_weights(update.buckets)
        self._waiting: Callable[[], None] | None = None
        """Sends the part that was most recently described in an answer; None if its sending has begun."""
        self._leaving: Future[None] | None = None
        """The result of sending the previous part, which may be in progress."""

    def carry_out(self, order: Order) -> Answer:
        self._send_waiting()
        if not isinstance(order, PartOrder):
            return Answer()
        bucket = self._encoder.encode(next(self._local), self._update)
        if self._sender.is_collective:
            self._waiting = lambda: self._sender.send(bucket, order.timeout_s)
        else:
            self._sender.send(bucket, order.timeout_s)
        return Answer(sent=sent_bytes(bucket))

    def _send_waiting(self) -> None:
        """Start to send the part that rank 0 is announcing, once the previous part has been sent."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.result()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._leaving = start_in_thread(waiting, "inflight-send-part")

    def end(self, *, is_applied: bool) -> None:
        self._local.close()
        try:
            if self._leaving is not None:
                self._leaving.result()
        finally:
            self._sender.end(is_done=is_applied)
        if is_applied:
            self._encoder.note_applied(self._update.ref)


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def _parse(parse: Callable[[bytes], T], text: bytes) -> T:
    try:
        return parse(text)
    except ValidationError as error:
        raise TransferError(f"a message between trainer ranks cannot be read: {describe_problems(error)}") from error
