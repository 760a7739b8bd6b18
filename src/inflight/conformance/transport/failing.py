"""Checks of what happens if the other end fails: it stops, dies, sends only a part, or does not read."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import torch

from inflight.conformance.calls import SLACK_S, PendingCall
from inflight.conformance.checks import check, require
from inflight.conformance.transport.buckets import bucket_of, bytes_of, numbered
from inflight.conformance.transport.endings import note_legal_ending, require_legal, require_whole
from inflight.conformance.transport.pair import update_of
from inflight.conformance.transport.subject import FORM_S, TransportSubject, failure_of
from inflight.contracts import WeightReceiver
from inflight.errors import TransferError
from inflight.types import WeightBucket

LEVEL = "failures"
_TIMEOUT_S = 0.8
_WAIT_S = 2.9
"""Timeout of calls that must end when it expires, in no whole number of seconds. It exceeds `SLACK_S`, so that a call
that waits for twice the timeout is not mistaken for one that a busy machine delays."""
_UNREAD_S, _READ_S, _READ_LAG_S = 0.5, 4.0, 0.3
"""Timeouts of a send that one rank does not read and of the other calls in its group, and how long a rank may still
read what was sent before the send failed."""
_NO_TIME_S = 1e-6
_BIG = 1 << 23  # elements of float64: no socket buffer takes 64 MB
_WORDS = {
    "join": ("join", "form", "reach", "connect", "rendezvous"),
    "receive": ("receiv",),
    "send": ("send", "sent", "stor"),
}
"""The message of a failed call contains one of these words."""


@check("T-22", "peer", deadline_s=30, look_at="send: connections that were reset")
def a_killed_receiver_does_not_hold_the_sender(t: TransportSubject) -> None:
    """A send to a receiver that was killed ends within its timeout."""
    peer, _ = t.form_with_peer()
    bucket = bucket_of(numbered(_BIG))
    t.begin([], bucket)
    sending = t.start_send(bucket, 2.0)
    time.sleep(0.2)
    peer.kill()
    note_legal_ending(t, sending.ending(2.0 + SLACK_S))


@check("T-23", "peer", deadline_s=30, look_at="send: its timeout_s while the socket accepts no more bytes")
def a_stopped_receiver_does_not_hold_the_sender(t: TransportSubject) -> None:
    """A send to a receiver that is stopped ends within its timeout."""
    peer, _ = t.form_with_peer()
    peer.stop()  # its sockets stay open, but nothing reads from them
    bucket = bucket_of(numbered(_BIG))
    t.begin([], bucket)
    sending = t.start_send(bucket, _WAIT_S)
    note_legal_ending(t, sending.ending(_WAIT_S + SLACK_S))


@check("T-24", "peer", deadline_s=30, look_at="receive: connections that were closed")
def a_killed_sender_fails_the_receive(t: TransportSubject) -> None:
    """A receive whose sender is killed raises TransferError within its timeout."""
    peer, receiver = t.join_sending_peer()
    bucket = bucket_of(torch.zeros(10))
    receiver.begin(update_of([bucket], 1).ref)
    (receive,) = t.start_receives([receiver], bucket, 2.0)
    time.sleep(0.2)
    peer.kill()
    error = failure_of(receive, 2.0 + SLACK_S)
    t.note(timeout_s=2.0, seconds=receive.ending(0.0).seconds, message=str(error))


@check("T-25", "peer", deadline_s=30, look_at="receive: reads that end early")
def a_bucket_cut_short_is_not_received(t: TransportSubject) -> None:
    """Receiving a bucket of which only a part arrives raises TransferError, whether its sender was killed, aborted the
    group, or timed out. So does receiving a stored bucket whose size is not the expected one."""
    bucket = bucket_of(numbered(_BIG))
    peer, receiver = t.join_sending_peer(bucket)
    time.sleep(0.4)
    peer.kill()
    (receive,) = t.start_receives([receiver], bucket, 2.0)
    ending = receive.ending(2.0 + SLACK_S)
    t.note(size_bytes=bucket.tensors[0].nbytes, ending=ending.words)
    if t.sender.is_collective or ending.value is None:
        failure_of(receive, 0.0)
    else:  # it was stored before its sender was killed
        require_whole(ending.value[0], bucket)
    bucket = bucket_of(numbered(_BIG))
    for how in ("aborted", "gave up"):
        (receiver,) = t.form()
        t.begin([receiver], bucket)
        sending = t.start_send(bucket, 0.3)
        if how == "aborted":
            sending.has_ended(0.1)
            t.sender.abort()
        sent = sending.ending(0.3 + SLACK_S)
        (receive,) = t.start_receives([receiver], bucket, 1.0)
        ending = receive.ending(1.0 + SLACK_S)
        t.note(**{f"ending of the receive of a sender that {how}": ending.words})
        legal = ending.error is None or isinstance(ending.error, TransferError)
        require(legal, f"where the sender {how}, a receive must raise TransferError, but: {ending.words}")
        is_lost = sent.error is None and ending.error is not None and how == "gave up"
        require(not is_lost, f"a send of {bucket.specs[0].size_bytes} bytes returned, but they did not arrive")
        if ending.value is not None:
            require_whole(ending.value[0], bucket)
        receiver.abort()
        t.sender.abort()
    if not t.sender.is_collective:
        _require_sizes_checked(t)


def _require_sizes_checked(t: TransportSubject) -> None:
    """Require that a stored bucket is not received as a smaller or a larger one."""
    stored = bucket_of(torch.ones(10))
    for count in (9, 11):
        (receiver,) = t.form()
        t.begin([receiver], stored)
        t.start_send(stored).result(FORM_S + SLACK_S)
        what = f"the receive of {count} elements where 10 are stored"
        (receive,) = t.start_receives([receiver], bucket_of(torch.ones(count)), _TIMEOUT_S)
        ending = receive.ending(_TIMEOUT_S + SLACK_S)
        t.note(**{what: ending.words})
        require(isinstance(ending.error, TransferError), f"{what} must raise TransferError, but: {ending.words}")
        receiver.abort()


@check("T-40", "3-receivers", deadline_s=60, look_at="send: the timeout of one rank, and what may follow a failed send")
def a_failed_send_loses_the_group(t: TransportSubject) -> None:
    """After a send has failed, the group is lost: further sends raise TransferError, and no rank ever receives a
    mixture of two buckets."""
    # Half of _BIG still exceeds any socket buffer.
    buckets = [bucket_of(numbered(_BIG // 2, i * _BIG), index=i) for i in range(2)]
    for number in (1, 2):  # the first receiver always reads
        receivers = t.form(3)
        idle = receivers.pop(number)
        t.begin([*receivers, idle], *buckets)
        receives = t.start_receives(receivers, buckets[0], _READ_S)
        sent = t.start_send(buckets[0], _UNREAD_S).ending(_UNREAD_S + SLACK_S)
        require_legal(sent)
        t.note(**{f"ending of the send while only receiver {number + 1} does not read": sent.words})
        if sent.error is None:
            receives += t.start_receives([idle], buckets[0], _READ_S)
            _require_all_arrive(receives, buckets[0])
            _end(t, [*receivers, idle], receives)
        else:
            done = [it for it, receive in zip(receivers, receives, strict=True) if _has_arrived(receive)]
            receives += t.start_receives([idle, *done], buckets[0], _READ_S)
            sending = t.start(lambda: t.sender.send(buckets[1], _READ_S), "a send after a failed one")
            failure_of(sending, _READ_S + SLACK_S)
            _end(t, [*receivers, idle], receives)
            _require_none_mixed(receives, buckets)
    if not t.sender.is_collective:  # a receiver of a store looks for one bucket and takes no other
        return
    receivers, small = t.form(3), [bucket_of(torch.full((10,), 1.0 + i), index=i) for i in range(2)]
    t.begin(receivers, *small)
    sent = t.start_send(small[0], _NO_TIME_S).ending(SLACK_S)
    require_legal(sent)
    t.note(**{f"ending of a send with a timeout of {_NO_TIME_S:g} s": sent.words})
    if sent.error is not None:  # before its first byte
        receives = t.start_receives(receivers, small[0], _TIMEOUT_S)
        failure_of(t.start(lambda: t.sender.send(small[1], _TIMEOUT_S), "a send after a failed one"), _READ_S)
        _end(t, receivers, receives)


def _has_arrived(receive: PendingCall[Any]) -> bool:
    return receive.has_ended(_READ_LAG_S) and receive.ending(0.0).error is None


def _end(t: TransportSubject, receivers: Sequence[WeightReceiver], receives: Sequence[PendingCall[Any]]) -> None:
    """Abort the sender, wait briefly for the receives to read what has been sent, and abort the receivers."""
    t.sender.abort()
    for receive in receives:
        receive.has_ended(_READ_LAG_S)
    for receiver in receivers:
        receiver.abort()


def _require_all_arrive(receives: Sequence[PendingCall[list[torch.Tensor]]], bucket: WeightBucket) -> None:
    """Require that a bucket whose send has returned arrives at every rank, even one that reads it late."""
    for receive in receives:
        ending = receive.ending(_READ_S + SLACK_S)
        words = f"a send returned before every rank had read, but its bytes did not arrive at one: {ending.words}"
        require(ending.value is not None, words)
        require_whole(receive.result(0.0)[0], bucket)


def _require_none_mixed(receives: Sequence[PendingCall[list[torch.Tensor]]], buckets: Sequence[WeightBucket]) -> None:
    """Require that every receive raises `TransferError` or returns one of these buckets whole."""
    for receive in receives:
        ending = receive.ending(_READ_S + SLACK_S)
        require_legal(ending, "a receive in a group that is lost")
        is_whole = ending.value is None or any(ending.value[0].equal(bucket.tensors[0]) for bucket in buckets)
        require(is_whole, "after a failed send, a rank received neither of the two buckets whole")


@check("T-26", "peer", deadline_s=40, look_at="specs of the sender: what remains of the old group")
def the_survivors_form_a_new_group(t: TransportSubject) -> None:
    """After a receiver has died, the same sender forms a new group with the survivors, and bytes arrive there."""
    peer, (survivor,) = t.form_with_peer(others=1)
    peer.kill()
    bucket = bucket_of(torch.randn(1000))
    t.begin([survivor], bucket)
    calls: list[PendingCall[Any]] = [
        *t.start_receives([survivor], bucket, _TIMEOUT_S),
        t.start_send(bucket, _TIMEOUT_S),
    ]
    endings = [call.ending(_TIMEOUT_S + SLACK_S) for call in calls]
    survivor.abort()
    started = time.monotonic()
    ((arrived,),) = t.transfer(t.form(timeout_s=2.0), bucket)
    t.note(in_the_old_group=[ending.words for ending in endings], new_group_seconds=time.monotonic() - started)
    require(bytes_of(arrived).equal(bytes_of(bucket.tensors[0])), "the first bucket of the new group arrived changed")


@check("T-28", look_at="where lower errors are translated")
def errors_name_the_operation(t: TransportSubject) -> None:
    """The message of a TransferError names the operation and, if that is a send, the index of the bucket."""
    messages = {}
    if t.sender.is_collective:
        (member,) = t.members([1], 0.3)
        messages["join"] = str(failure_of(t.start(t.receiver(member).join, "the join"), 0.3 + SLACK_S))
    (receiver,) = t.form()
    buckets = [bucket_of(torch.ones(1), index=index) for index in range(7)]
    buckets.append(bucket := bucket_of(numbered(_BIG), index=7))
    t.begin([receiver], *buckets)
    sending = t.start_send(bucket, 0.3).ending(0.3 + SLACK_S)
    receiver.abort()
    (receiver,) = t.form()
    t.begin([receiver], bucket := bucket_of(torch.zeros(3)))
    specs = bucket.specs
    receive = t.start(lambda: receiver.receive(specs, 0.3), "the receive")
    messages["receive"] = str(failure_of(receive, 0.3 + SLACK_S))
    if sending.error is not None:
        messages["send"] = str(sending.error)
    t.note(messages=messages)
    for call, message in messages.items():
        named = any(word in message.lower() for word in _WORDS[call])
        require(named, f"the error of a failed {call} names none of {', '.join(_WORDS[call])}: {message!r}")
    said = messages.get("send", "7")  # nothing else in this send has the number 7
    require(re.search(r"\b7\b", said), f"the error of a failed send of bucket 7 does not name it: {said!r}")
