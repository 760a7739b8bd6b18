"""Checks of what happens if the other end fails: it does not join, does not answer, stops or dies."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inflight.conformance.calls import SLACK_S, Ending, PendingCall, results
from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.transport.buckets import bucket_of, bytes_of
from inflight.conformance.transport.pair import update_of
from inflight.conformance.transport.subject import FORM_S, TransportSubject, failure_of
from inflight.contracts import ReceivesAhead, WeightReceiver
from inflight.errors import TransferError
from inflight.types import WeightBucket

LEVEL = "failures"
_TIMEOUT_S = 0.8
_WAIT_S = 2.9
"""Timeout of calls that must end when it expires, in no whole number of seconds. It exceeds `SLACK_S`, so that a call
that waits for twice the timeout is not mistaken for one that a busy machine delays."""
_GROUP_S, _LATE_S = 2.0, 2.6
"""Timeout of a group, and the time from the beginning of a receive in it until its bucket is sent."""
_SEND_S = 1.3
_ON_TIME = 0.95
"""The share of a timeout before which no call may end."""
_UNREAD_S, _READ_S, _READ_LAG_S = 0.5, 4.0, 0.3
"""Timeouts of a send that one rank does not read and of the other calls in its group, and how long a rank may still
read what was sent before the send failed."""
_NO_TIME_S = 1e-6
_PAUSE_S, _PULSE_S = 0.3, 0.001
"""How long a sender is stopped each time, and how long it may send between two stops."""
_NUM_TIMEOUTS = 3
"""How many timeouts, each twice as long as the previous one, are tried if the earlier ones are inconclusive."""
_WEEK_S = 7 * 86_400.0
"""The longest timeout that a message may specify."""
_BIG = 1 << 23  # elements of float64: no socket buffer takes 64 MB
_WORDS = {
    "join": ("join", "form", "reach", "connect", "rendezvous"),
    "receive": ("receiv",),
    "send": ("send", "sent", "stor"),
}
"""The message of a failed call contains one of these words."""


@check("T-18", "collective", look_at="join of the receiver: the timeout_s of its spec, in every one of its steps")
def a_join_without_a_sender_ends(t: TransportSubject) -> None:
    """If the sender does not join, a receiver's join raises TransferError when its timeout expires, and not before."""
    (member,) = t.members([1], _WAIT_S)
    _require_timely_failure(t, t.receiver(member).join, "the receiver's join, alone,")


@check("T-19", "collective", look_at="join of the sender: the timeout_s given to specs")
def a_join_without_receivers_ends(t: TransportSubject) -> None:
    """If a rank is missing, the joins of the sender and of the other ranks raise TransferError when their timeout
    expires."""
    member, _ = t.members([1, 1], _WAIT_S)
    other = t.start(t.receiver(member).join, "the join of the receiver that joined")
    _require_timely_failure(t, t.sender.join, "the sender's join with a rank missing")
    failure_of(other, SLACK_S)


@check(
    "T-37",
    "collective 6-receivers",
    deadline_s=30,
    look_at="join of the sender: a timeout that restarts with every rank",
)
def ranks_that_come_slowly_are_not_awaited(t: TransportSubject) -> None:
    """The timeout of a join applies to the whole group: ranks that join one after another do not extend it."""
    *members, _ = t.members([1] * 6, _TIMEOUT_S)
    joining = t.start(t.sender.join, "the sender's join, with a rank missing and the others joining slowly,")
    for member in members:
        if joining.has_ended(0.9 * _TIMEOUT_S):
            break
        t.start(t.receiver(member).join, "the join of a slow rank")
    error = failure_of(joining, _TIMEOUT_S + SLACK_S)
    seconds = joining.ending(0.0).seconds
    t.note(timeout_s=_TIMEOUT_S, seconds=seconds, message=str(error))
    words = f"the sender's join ended after {seconds:.2f} s, although its timeout is {_TIMEOUT_S} s"
    require(seconds <= _TIMEOUT_S + SLACK_S, words)


@check("T-38", "peer", deadline_s=30, look_at="receive: a timeout that restarts with every read")
def bytes_that_come_slowly_are_not_awaited(t: TransportSubject) -> None:
    """The timeout of a receive applies to the whole bucket: bytes that arrive slowly do not extend it."""
    bucket = bucket_of(torch.zeros(_BIG, dtype=torch.float64))
    peer, receiver = t.join_sending_peer(bucket)
    peer.stop()
    (receive,) = t.start_receives([receiver], bucket, _TIMEOUT_S)
    while not receive.has_ended(_PAUSE_S) and receive.seconds < _TIMEOUT_S + SLACK_S:
        peer.resume()
        time.sleep(_PULSE_S)
        peer.stop()
    ending = receive.ending(0.0)
    t.note(timeout_s=_TIMEOUT_S, ending=ending.words)
    legal = ending.error is None or isinstance(ending.error, TransferError)
    require(legal, f"a receive that ends before all bytes have arrived must raise TransferError, but: {ending.words}")
    if ending.value is not None:
        _require_whole(ending.value[0], bucket)


@check("T-39", "4-receivers", deadline_s=90, look_at="send: a timeout that restarts with every rank")
def receivers_that_do_not_read_share_a_timeout(t: TransportSubject) -> None:
    """The timeout of a send applies to all ranks together."""
    receivers, bucket = t.form(4), bucket_of(torch.ones(_BIG, dtype=torch.float64))
    t.begin(receivers, bucket)
    sending = t.start_send(bucket, _SEND_S)
    _note_legal_ending(t, sending.ending(_SEND_S + SLACK_S))
    t.sender.abort()
    timeout_s = _WAIT_S
    for _ in range(_NUM_TIMEOUTS):
        # On a busy machine, a rank may take longer to read than the timeout, so that even a faulty send ends in time.
        done = [_send_to_ranks_that_read_in_turn(t, is_reversed, timeout_s) for is_reversed in (False, True)]
        if any(has_read for _, has_read in done) and all(in_time for in_time, _ in done):
            return
        timeout_s *= 2


def _send_to_ranks_that_read_in_turn(t: TransportSubject, is_reversed: bool, timeout_s: float) -> tuple[bool, bool]:
    """Require that a send ends within its timeout plus `SLACK_S`, even if the ranks begin to read one by one, each half
    a timeout after the previous one.

    Return whether it ended without using most of that slack, and whether any rank had read the bucket by then.
    """
    receivers, bucket = t.form(4), bucket_of(torch.ones(_BIG, dtype=torch.float64))
    t.begin(receivers, bucket)
    sending = t.start_send(bucket, timeout_s)
    receives: list[PendingCall[list[torch.Tensor]]] = []
    for receiver in reversed(receivers) if is_reversed else receivers:
        if sending.has_ended(timeout_s / 2):
            break
        receives += t.start_receives([receiver], bucket)
    ending = sending.ending(timeout_s + SLACK_S)
    order = "last to first" if is_reversed else "first to last"
    t.note(**{f"ranks that read in turn, {order}, timeout {timeout_s:g} s": ending.words})
    _require_legal(ending)
    words = f"a send whose ranks read in turn ended after {ending.seconds:.2f} s; its timeout is {timeout_s:g} s"
    require(ending.seconds <= timeout_s + SLACK_S, words)
    has_read = any(receive.has_ended() and receive.ending(0.0).error is None for receive in receives)
    t.sender.abort()
    return ending.seconds <= 1.25 * timeout_s, has_read


@check("T-20", deadline_s=30, look_at="receive: its timeout_s, not the group's")
def a_receive_without_a_send_ends(t: TransportSubject) -> None:
    """A receive of a bucket that is not sent raises TransferError when its own timeout expires, and not before, even
    if receive_ahead() was called with a longer timeout, if the group has a shorter one, or if an earlier attempt at the
    same version has sent that bucket; a bucket that is sent late still arrives. A receive of an empty bucket that a
    store does not contain fails in the same way."""
    # The group has a shorter timeout than the receive of the bucket that is sent late, and the groups below have a
    # longer one than the receive of the bucket that is never sent.
    (receiver,) = [t.receiver(member) for member in t.members([1], _GROUP_S)]
    results(t.start_joins([receiver]), FORM_S + SLACK_S)
    late, never = bucket_of(torch.ones(10)), bucket_of(torch.zeros(10), index=1)
    t.begin([receiver], late, never)
    (receive,) = t.start_receives([receiver], late)
    if receive.has_ended(_LATE_S):
        words = f"a receive with a timeout of {FORM_S:g} s, in a group with a timeout of {_GROUP_S:g} s, ended before"
        fail(f"{words} its bucket was sent: {receive.ending(0.0).words}")
    results([receive, t.start_send(late)], FORM_S + SLACK_S)
    require(receive.result(0.0)[0].equal(late.tensors[0]), f"a bucket sent {_LATE_S} s late arrived changed")
    t.begin_session("first-attempt", [receiver], late)
    results([*t.start_receives([receiver], late), t.start_send(late)], FORM_S + SLACK_S)
    receiver.begin(t.ref("second-attempt"))
    _require_nothing_arrives(t, receiver, late, "what an earlier attempt sent")
    if not t.sender.is_collective:  # a collective transport may send nothing for an empty bucket
        (receiver,) = t.form()
        t.begin([receiver], empty := bucket_of(torch.zeros(0)))
        _require_nothing_arrives(t, receiver, empty, "an empty bucket that was never stored")
    (receiver,) = t.form()
    t.begin_session("third-attempt", [receiver], late)
    results([*t.start_receives([receiver], late), t.start_send(late)], FORM_S + SLACK_S)
    t.sender.end(is_done=True)
    t.begin_session("third-attempt", [receiver], late)
    _require_nothing_arrives(t, receiver, late, "what the previous update sent")
    (receiver,) = t.form()
    t.begin([receiver], late, never)
    results([*t.start_receives([receiver], late), t.start_send(late)], FORM_S + SLACK_S)
    if isinstance(receiver, ReceivesAhead):
        receiver.receive_ahead(never.specs, 2 * (_WAIT_S + SLACK_S))
    _require_timely_failure(t, lambda: receiver.receive(never.specs, _WAIT_S), "the receive of a bucket never sent")


def _require_nothing_arrives(t: TransportSubject, receiver: WeightReceiver, bucket: WeightBucket, what: str) -> None:
    receive = t.start(lambda: receiver.receive(bucket.specs, _TIMEOUT_S), f"the receive of {what}")
    failure_of(receive, _TIMEOUT_S + SLACK_S)


@check("T-21")
@look_at(
    "timeouts that are rounded down to 0, which many transports treat as no timeout, or that overflow a 32-bit number"
)
def a_timeout_of_nearly_nothing_is_one(t: TransportSubject) -> None:
    """A timeout shorter than a millisecond is honoured as a timeout, and a timeout of a week is not cut short."""
    # A publish that has almost used up its deadline leaves such a short timeout.
    bucket = bucket_of(torch.zeros(10))
    for timeout_s in (0.0004, _NO_TIME_S):
        receivers = t.form()
        t.begin(receivers, bucket)
        (call,) = t.start_receives(receivers, bucket, timeout_s)
        error = failure_of(call, SLACK_S)
        t.note(**{f"seconds of a receive with a timeout of {timeout_s:g} s": call.ending(0.0).seconds})
        t.note(message=str(error))
    receivers = [t.receiver(member) for member in t.members([1], _WEEK_S)]
    results(t.start_joins(receivers), FORM_S + SLACK_S)
    t.begin(receivers, bucket)
    (receive,) = t.start_receives(receivers, bucket, _WEEK_S)
    require(not receive.has_ended(0.1), "a receive with a timeout of a week ended before its bucket was sent")
    results([receive, t.start_send(bucket, _WEEK_S)], FORM_S + SLACK_S)


@check("T-22", "peer", deadline_s=30, look_at="send: connections that were reset")
def a_killed_receiver_does_not_hold_the_sender(t: TransportSubject) -> None:
    """A send to a receiver that was killed ends within its timeout."""
    peer, _ = t.form_with_peer()
    bucket = bucket_of(torch.ones(_BIG, dtype=torch.float64))
    t.begin([], bucket)
    sending = t.start_send(bucket, 2.0)
    time.sleep(0.2)
    peer.kill()
    _note_legal_ending(t, sending.ending(2.0 + SLACK_S))


@check("T-23", "peer", deadline_s=30, look_at="send: its timeout_s while the socket accepts no more bytes")
def a_stopped_receiver_does_not_hold_the_sender(t: TransportSubject) -> None:
    """A send to a receiver that is stopped ends within its timeout."""
    peer, _ = t.form_with_peer()
    peer.stop()  # its sockets stay open, but nothing reads from them
    bucket = bucket_of(torch.ones(_BIG, dtype=torch.float64))
    t.begin([], bucket)
    sending = t.start_send(bucket, _WAIT_S)
    _note_legal_ending(t, sending.ending(_WAIT_S + SLACK_S))


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
    bucket = bucket_of(torch.ones(_BIG, dtype=torch.float64))
    peer, receiver = t.join_sending_peer(bucket)
    time.sleep(0.4)
    peer.kill()
    (receive,) = t.start_receives([receiver], bucket, 2.0)
    ending = receive.ending(2.0 + SLACK_S)
    t.note(size_bytes=bucket.tensors[0].nbytes, ending=ending.words)
    if t.sender.is_collective or ending.value is None:
        failure_of(receive, 0.0)
    else:  # it was stored before its sender was killed
        _require_whole(ending.value[0], bucket)
    bucket = bucket_of(torch.ones(_BIG, dtype=torch.float64))
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
            _require_whole(ending.value[0], bucket)
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
    buckets = [bucket_of(torch.full((_BIG // 2,), 1.0 + i, dtype=torch.float64), index=i) for i in range(2)]
    for number in (1, 2):  # the first receiver always reads
        receivers = t.form(3)
        idle = receivers.pop(number)
        t.begin([*receivers, idle], *buckets)
        receives = t.start_receives(receivers, buckets[0], _READ_S)
        sent = t.start_send(buckets[0], _UNREAD_S).ending(_UNREAD_S + SLACK_S)
        _require_legal(sent)
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
    _require_legal(sent)
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
        _require_whole(receive.result(0.0)[0], bucket)


def _require_none_mixed(receives: Sequence[PendingCall[list[torch.Tensor]]], buckets: Sequence[WeightBucket]) -> None:
    """Require that every receive raises `TransferError` or returns one of these buckets whole."""
    for receive in receives:
        ending = receive.ending(_READ_S + SLACK_S)
        _require_legal(ending, "a receive in a group that is lost")
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
    buckets.append(bucket := bucket_of(torch.ones(_BIG, dtype=torch.float64), index=7))
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


def _require_timely_failure(t: TransportSubject, call: Callable[[], Any], what: str) -> None:
    """Require that a call with a timeout of `_WAIT_S` fails when its timeout expires."""
    error = failure_of(pending := t.start(call, what), 2 * _WAIT_S + SLACK_S)
    seconds = pending.ending(0.0).seconds
    t.note(timeout_s=_WAIT_S, seconds=seconds, message=str(error))
    require(seconds > _ON_TIME * _WAIT_S, f"{what} failed after {seconds:.2f} s, before its timeout of {_WAIT_S:g} s")
    words = f"{what} failed only after {seconds:.2f} s, although its timeout is {_WAIT_S:g} s"
    require(seconds <= _WAIT_S + SLACK_S, words)


def _require_whole(arrived: torch.Tensor, bucket: WeightBucket) -> None:
    is_whole = bytes_of(arrived).equal(bytes_of(bucket.tensors[0]))
    require(is_whole, "a bucket that did not arrive completely was received as if it had")


def _note_legal_ending(t: TransportSubject, ending: Ending[None]) -> None:
    """Record how a send ended. The send may return, which only means that the bytes were sent, or raise
    `TransferError`."""
    t.note(ending=ending.words, seconds=ending.seconds)
    _require_legal(ending)


def _require_legal(ending: Ending[Any], what: str = "a failed send") -> None:
    legal = ending.error is None or isinstance(ending.error, TransferError)
    require(legal, f"{what} must raise TransferError, but: {ending.words}")
