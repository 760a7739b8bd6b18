"""Checks of the timeouts of joins, sends and receives."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from inflight.conformance.calls import SLACK_S, PendingCall, results
from inflight.conformance.checks import check, fail, look_at, require
from inflight.conformance.transport.buckets import bucket_of, numbered
from inflight.conformance.transport.endings import note_legal_ending, require_legal, require_whole
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
_NO_TIME_S = 1e-6
_PAUSE_S, _PULSE_S = 0.3, 0.001
"""How long a sender is stopped each time, and how long it may send between two stops."""
_NUM_TIMEOUTS = 3
"""How many timeouts, each twice as long as the previous one, are tried if the earlier ones are inconclusive."""
_LONG_S = 6.5
"""How long a receiver does not read what is being sent."""
_WEEK_S = 7 * 86_400.0
"""The longest timeout that a message may specify."""
_BIG = 1 << 23  # elements of float64: no socket buffer takes 64 MB


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
    bucket = bucket_of(numbered(_BIG))
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
        require_whole(ending.value[0], bucket)


@check("T-39", "4-receivers", deadline_s=90, look_at="send: a timeout that restarts with every rank")
def receivers_that_do_not_read_share_a_timeout(t: TransportSubject) -> None:
    """The timeout of a send applies to all ranks together."""
    receivers, bucket = t.form(4), bucket_of(numbered(_BIG))
    t.begin(receivers, bucket)
    sending = t.start_send(bucket, _SEND_S)
    note_legal_ending(t, sending.ending(_SEND_S + SLACK_S))
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
    receivers, bucket = t.form(4), bucket_of(numbered(_BIG))
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
    require_legal(ending)
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
    store does not contain fails in the same way. No receive after a failed one returns a bucket other than the one that
    it requests."""
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
    t.begin([receiver], late, never, after := bucket_of(torch.full((10,), 2.0), index=2))
    results([*t.start_receives([receiver], late), t.start_send(late)], FORM_S + SLACK_S)
    if isinstance(receiver, ReceivesAhead):
        receiver.receive_ahead(never.specs, 2 * (_WAIT_S + SLACK_S))
    _require_timely_failure(t, lambda: receiver.receive(never.specs, _WAIT_S), "the receive of a bucket never sent")
    _require_no_other_bucket(t, receiver, never, after)


def _require_no_other_bucket(
    t: TransportSubject, receiver: WeightReceiver, wanted: WeightBucket, after: WeightBucket
) -> None:
    """Require that, after a failed receive, a receive of ``wanted`` returns it or fails when both buckets are sent."""

    def send() -> None:
        with suppress(TransferError):
            t.sender.send(wanted, _TIMEOUT_S)
            t.sender.send(after, _TIMEOUT_S)

    sending = t.start(send, "the sends after a failed receive")
    what = "a receive after a failed one"
    receive = t.start(lambda: receiver.receive(wanted.specs, _TIMEOUT_S), what)
    receive.has_ended(_TIMEOUT_S + SLACK_S)
    results([sending], 2 * _TIMEOUT_S + SLACK_S)
    if isinstance(receive.ending(0.0).error, TransferError):
        return
    words = f"{what} returned a bucket other than the one requested"
    require(receive.result(0.0)[0].equal(wanted.tensors[0]), words)


def _require_nothing_arrives(t: TransportSubject, receiver: WeightReceiver, bucket: WeightBucket, what: str) -> None:
    receive = t.start(lambda: receiver.receive(bucket.specs, _TIMEOUT_S), f"the receive of {what}")
    failure_of(receive, _TIMEOUT_S + SLACK_S)


@check("T-21", deadline_s=40)
@look_at(
    "timeouts that are rounded down to 0, which many transports treat as no timeout, or that overflow a 32-bit number"
)
def a_timeout_of_nearly_nothing_is_one(t: TransportSubject) -> None:
    """A timeout shorter than a millisecond is honoured as a timeout, and a timeout of a week is not cut short, even if
    a receiver begins to read a bucket only after several seconds, in a group with a shorter timeout."""
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
    receivers = t.form(timeout_s=_GROUP_S)
    t.begin(receivers, large := bucket_of(numbered(_BIG)))
    sending = t.start_send(large, _WEEK_S)
    sending.has_ended(_LONG_S)  # sockets have timeouts of their own
    (receive,) = t.start_receives(receivers, large, _WEEK_S)
    results([receive, sending], FORM_S + SLACK_S)
    require_whole(receive.result(0.0)[0], large)


def _require_timely_failure(t: TransportSubject, call: Callable[[], Any], what: str) -> None:
    """Require that a call with a timeout of `_WAIT_S` fails when its timeout expires."""
    error = failure_of(pending := t.start(call, what), 2 * _WAIT_S + SLACK_S)
    seconds = pending.ending(0.0).seconds
    t.note(timeout_s=_WAIT_S, seconds=seconds, message=str(error))
    require(seconds > _ON_TIME * _WAIT_S, f"{what} failed after {seconds:.2f} s, before its timeout of {_WAIT_S:g} s")
    words = f"{what} failed only after {seconds:.2f} s, although its timeout is {_WAIT_S:g} s"
    require(seconds <= _WAIT_S + SLACK_S, words)
