"""Checks of abort, called from another thread at any time, and of what remains afterwards."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from inflight.base.shortened import shortened
from inflight.conformance.calls import SLACK_S, PendingCall, results
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.transport.buckets import bucket_of, bytes_of
from inflight.conformance.transport.sockets import listening, num_descriptors, resident_bytes
from inflight.conformance.transport.subject import FORM_S, TransportSubject, failure_of
from inflight.contracts import WeightReceiver, WeightSender
from inflight.errors import TransferError

LEVEL = "abort"
_BIG = 1 << 22
"""Number of float32 elements whose bytes exceed any socket buffer."""
_NUM_GROUPS = 6
_TOO_LATE_S = 0.5
"""Timeout of a group whose sender joins once its receiver has been aborted."""
_NUM_UPDATES = 10
"""The descriptors of an open group are counted after this many updates, and after twice as many."""
_MOST_ROUNDS = 5
"""Maximum number of rounds of updates or groups; the memory in use is measured after each round."""
_KEPT = 1 << 21
"""Number of float32 elements of tensors whose memory is counted, and of one that is kept until its group has ended."""
_LONG_S = 8.0
"""Timeout of calls that are ended by abort; much longer than abort may take."""


@check("T-29", "collective", look_at="join of the sender: the operation that it waits for must be closed or abandoned")
def abort_ends_a_pending_join_of_the_sender(t: TransportSubject) -> None:
    """Calling abort on the sender from another thread ends its pending join with TransferError."""
    t.members([1], _LONG_S)
    _require_ended_by_abort(t, t.start(t.sender.join, "the sender's join"), t.sender)


@check(
    "T-30", "collective", look_at="join of the receiver: the operation that it waits for must be closed or abandoned"
)
def abort_ends_a_pending_join_of_a_receiver(t: TransportSubject) -> None:
    """Calling abort on a receiver from another thread ends its pending join with TransferError, even if the sender has
    aborted the group."""
    for is_aborted in (False, True):
        (member,) = t.members([1], _LONG_S)
        receiver = t.receiver(member)
        if is_aborted:
            t.sender.abort()
        joining = t.start(receiver.join, "the receiver's join")
        if is_aborted and joining.has_ended(0.2):
            failure_of(joining, 0.0)
        else:
            _require_ended_by_abort(t, joining, receiver)


@check("T-31", look_at="receive: an operation that cannot be interrupted must be abandoned in its own thread")
def abort_ends_a_pending_receive(t: TransportSubject) -> None:
    """Calling abort on a receiver from another thread ends its pending receive with TransferError, even if the
    bucket is received ahead."""
    bucket = bucket_of(torch.zeros(10))
    for is_ahead in (False, True):
        (receiver,) = t.form()
        t.begin([receiver], bucket)
        if is_ahead:
            t.receive_ahead(receiver, bucket)
        (receive,) = t.start_receives([receiver], bucket, _LONG_S)
        _require_ended_by_abort(t, receive, receiver)


@check("T-41", "collective /proc", deadline_s=30)
@look_at("specs of the sender: connections of the group that was open before")
def another_group_ends_a_pending_receive(t: TransportSubject) -> None:
    """Once the sender opens another group, a receive that is pending in the old one raises TransferError, and the
    sender's connections to the old group are closed."""
    seconds, num_before = [], 0
    for number in range(2 + _NUM_GROUPS):
        (receiver,) = t.form()
        if number == 2:  # a transport may create sockets and threads once per process
            num_before = _num_open()
        bucket = bucket_of(torch.zeros(10))
        t.begin([receiver], bucket)
        (receive,) = t.start_receives([receiver], bucket, _LONG_S)
        require(
            not receive.has_ended(0.03), "a receive ended although nothing had been sent and its group was still open"
        )
        started = time.monotonic()
        t.members([1])
        error = failure_of(receive, SLACK_S)
        seconds.append(time.monotonic() - started)
        receiver.abort()
    (receiver,) = t.form()
    started = time.monotonic()
    while (num_left := _num_open() - num_before) >= _NUM_GROUPS // 2 and time.monotonic() - started < SLACK_S:
        time.sleep(0.02)
    t.note(timeout_s=_LONG_S, slowest_seconds=max(seconds), message=str(error), descriptors=num_left)
    words = f"{num_left} more descriptors are open than before {_NUM_GROUPS} groups were replaced during a receive"
    require(num_left < _NUM_GROUPS // 2, words)


def _num_open() -> int:
    gc.collect()  # the tracebacks of earlier errors may refer to groups
    return num_descriptors()


@check("T-32", look_at="send: an operation that cannot be interrupted must be abandoned in its own thread")
def abort_ends_a_pending_send(t: TransportSubject) -> None:
    """Calling abort on the sender from another thread ends its pending send with TransferError."""
    bucket = bucket_of(torch.ones(1 << 23, dtype=torch.float64))
    t.begin(t.form(), bucket)
    sending = t.start_send(bucket, _LONG_S)
    if sending.has_ended(0.3):
        t.note(send=sending.ending(0.0).words)
    elif t.sender.is_collective:
        _require_ended_by_abort(t, sending, t.sender)
    else:  # it may have stored the bucket by then
        t.start(t.sender.abort, "abort").result(SLACK_S)
        ending = sending.ending(SLACK_S)
        t.note(send=ending.words)
        require(ending.error is None or isinstance(ending.error, TransferError), f"after abort, a send {ending.words}")


@check("T-33", deadline_s=50, look_at="abort of the sender: state and bytes that outlive the group")
def an_aborted_sender_forms_the_next_group(t: TransportSubject) -> None:
    """After abort, or while an update is open or a send is pending, the same sender forms the next group, and only the
    bytes of that group's buckets arrive. Sending a bucket of another update raises TransferError."""
    bucket, stale = bucket_of(torch.randn(_BIG)), bucket_of(torch.zeros(_BIG))
    seconds = []
    for when, is_aborted in (("join", True), *itertools.product(("send", "group"), (True, False))):
        pending: list[PendingCall[Any]] = []
        if when == "join":
            t.members([1], _LONG_S)
            pending = [t.start(t.sender.join, "the sender's join")]
        else:
            t.begin(t.form(), stale)
            pending = [t.start_send(stale, _LONG_S)] if when == "send" else []
        time.sleep(0.1)
        if is_aborted:
            t.sender.abort()
            for call in pending:
                call.ending(_LONG_S + SLACK_S)
        started = time.monotonic()
        receivers = t.form()
        for call in pending:  # those of a group that has not been aborted may end only now
            call.ending(_LONG_S + SLACK_S)
        ((arrived,),) = t.transfer(receivers, bucket)
        seconds.append(time.monotonic() - started)
        is_same = bytes_of(arrived).equal(bytes_of(bucket.tensors[0]))
        what = "an abort of a" if is_aborted else "a new group ended a"
        require(is_same, f"after {what} {when}, the first bucket of the next group arrived changed")
    t.note(seconds_after_join_send_and_group=seconds)
    t.begin(t.form(), stale, bucket_of(torch.zeros(1), index=1))  # a store may keep an update that is complete
    sending = t.start_send(stale, _LONG_S)
    sending.has_ended(0.3)
    ref = t.ref()
    (receiver,) = t.form()
    receiver.begin(ref)
    receive = t.start(lambda: receiver.receive(stale.specs, 0.5), "the receive of a bucket of the previous group")
    failure_of(receive, 0.5 + SLACK_S)
    sending.ending(_LONG_S + SLACK_S)
    (receiver,) = t.form()
    failure_of(t.start_send(replace(stale, ref=ref)), FORM_S + SLACK_S)  # before the first update of the group begins
    t.begin([receiver], bucket)
    (waiting,) = t.start_receives([receiver], bucket)
    for stray in (bucket, bucket_of(torch.zeros(0))):
        failure_of(t.start_send(replace(stray, ref=ref)), FORM_S + SLACK_S)
    require(not waiting.has_ended(0.3), "a receive ended although only a bucket of another update had been sent")


@check("T-34", look_at="abort of either end: before a group is formed, and after it has ended")
def abort_may_come_at_any_time_and_again(t: TransportSubject) -> None:
    """abort may be called at any time and any number of times, and it neither raises nor blocks."""
    seconds = []

    def abort(end: WeightSender | WeightReceiver, when: str) -> None:
        call = t.start(end.abort, f"abort {when}")
        call.result(SLACK_S)
        seconds.append(call.ending(0.0).seconds)

    abort(t.sender, "before specs")
    (member,) = t.members([1])
    receiver = t.receiver(member)
    abort(receiver, "before join")
    abort(t.sender, "before join")
    (receiver,) = t.form()
    bucket = bucket_of(torch.zeros(1))
    t.begin([receiver], bucket)
    failure_of(t.start(lambda: receiver.receive(bucket.specs, 0.2), "the receive"), 0.2 + SLACK_S)
    ends: tuple[WeightSender | WeightReceiver, ...] = (receiver, t.sender)
    for end in ends:
        abort(end, "after a failure")
        abort(end, "again")
        results([t.start(end.abort, "abort from two threads") for _ in range(2)], SLACK_S)
    t.note(num_aborts=len(seconds) + 4, slowest_seconds=max(seconds))


@check("T-35", "/proc", deadline_s=60)
@look_at("references to the store, the group and its memory that abort or the next call of specs does not drop")
def nothing_is_left_of_a_group(t: TransportSubject) -> None:
    """Nothing remains of a group, whether it was formed or not, once both ends have aborted, or once the sender has
    opened another group: no listening socket, no descriptor, no file, no thread, no memory. Received tensors may
    outlive the group; what they hold is then released when they are dropped. In an open group, neither the number of
    descriptors nor the memory in use grows with every update."""
    _use_groups(t, 2)  # a transport may create threads and files once per process
    num_before, files, num_threads = _num_open(), _files(t), threading.active_count()
    _use_groups(t, _NUM_GROUPS)
    started = time.monotonic()
    while time.monotonic() - started < SLACK_S:
        left, num_left, more = listening() - t.listening, _num_open() - num_before, sorted(_files(t) - files)
        num_more = len(_files(t)) - len(files)  # a store may keep its newest updates in place of older ones
        num_running = threading.active_count() - num_threads
        if not (left or max(num_left, num_more, num_running) >= _NUM_GROUPS):
            break
        time.sleep(0.02)
    t.note(num_groups=_NUM_GROUPS, listening=len(left), descriptors=num_left, files=more, threads=num_running)
    require(not left, f"it still listens on {', '.join(f'{address} port {port}' for address, port in sorted(left))}")
    after = f"after {_NUM_GROUPS} groups and {2 * _NUM_GROUPS} that no rank joined"
    require(num_left < _NUM_GROUPS, f"{after}, {num_left} more descriptors are open than before")
    require(num_more < _NUM_GROUPS, f"{after}, {num_more} more files exist: {shortened(more)}")
    require(num_running < _NUM_GROUPS, f"{after}, {num_running} more threads are running than before")
    _require_constant_descriptors(t)
    _require_memory_released(t)
    _require_no_more_is_left(t)


def _require_no_more_is_left(t: TransportSubject) -> None:
    """Fail if a group whose received tensors outlive it, or a group that is aborted during a receive ahead, leaves more
    descriptors open than another group. The count is taken after the tensors are dropped, while the receiver exists."""
    cases = {
        "": (False, False),
        "received tensors are dropped only after both ends have aborted": (True, False),
        "both ends abort while a bucket is being received ahead": (False, True),
    }
    left: dict[str, int] = {}
    for what, (is_kept, is_ahead) in cases.items():
        (receiver,) = t.form()
        bucket = bucket_of(torch.zeros(_KEPT))
        arrived: list[Any] = [t.transfer([receiver], bucket)]
        if is_ahead:
            t.receive_ahead(receiver, bucket)
        if not is_kept:
            arrived.clear()
        receiver.abort()
        t.sender.abort()
        arrived.clear()
        started = time.monotonic()
        while (num := _num_open()) > min(left.values(), default=num) and time.monotonic() - started < SLACK_S:
            time.sleep(0.02)
        left[what] = num
    t.note(**{"open descriptors after a group, and after a group in which": left})
    for what, num in left.items():
        require(num <= left[""], f"if {what}, {num - left['']} more descriptors stay open than otherwise")


def _require_constant_descriptors(t: TransportSubject) -> None:
    """Fail if the updates of an open group leave descriptors open."""
    (receiver,) = t.form()
    counts = []
    for _ in range(2):
        for _ in range(_NUM_UPDATES):
            t.transfer([receiver], bucket_of(torch.zeros(10)))
        counts.append(_num_open())
    t.note(**{f"descriptors after {_NUM_UPDATES} updates, and after twice as many": counts})
    words = f"{_NUM_UPDATES} updates in one group leave {counts[1] - counts[0]} more descriptors open"
    require(counts[1] - counts[0] < _NUM_UPDATES // 2, words)


def _require_memory_released(t: TransportSubject) -> None:
    """Fail if the updates of an open group, or groups that have ended, keep the memory of what was sent.

    Allocators keep some memory for each of many threads, so growth is an error only if it continues in every round.
    """
    sizes_of_buckets = itertools.count(_KEPT, 1024)

    def update(receiver: WeightReceiver) -> None:
        t.transfer([receiver], bucket_of(torch.zeros(next(sizes_of_buckets))))

    def use_a_group() -> None:
        (receiver,) = t.form()
        update(receiver)
        t.abort_and_forget(receiver)
        t.sender.abort()

    (receiver,) = t.form()
    rounds: dict[str, Callable[[], None]] = {"updates of one group": partial(update, receiver), "groups": use_a_group}
    for what, use in rounds.items():
        sizes = [resident_bytes()]
        while len(sizes) <= _MOST_ROUNDS:
            for _ in range(_NUM_UPDATES):
                use()
            sizes.append(resident_bytes())
            if (num_kept := (sizes[-1] - sizes[-2]) / (4 * _KEPT)) < _NUM_UPDATES / 2:
                break
        t.note(**{f"resident bytes before and after rounds of {_NUM_UPDATES} {what}": sizes})
        words = f"memory in use grew in each of {_MOST_ROUNDS} rounds of {_NUM_UPDATES} {what}, in the last one by "
        require(num_kept < _NUM_UPDATES / 2, f"{words}the size of {num_kept:.1f} updates")


def _use_groups(t: TransportSubject, num_groups: int) -> None:
    """Form groups one after another, and after each, open two groups that no rank joins. Of the formed groups and of
    the others, every second one is ended by `abort` on the sender, and the rest by opening the next group."""
    for number in range(num_groups):
        (receiver,) = t.form()
        t.transfer([receiver], bucket_of(torch.zeros(10)))
        receiver.abort()
        if number % 2 == 0:
            t.sender.abort()
        t.members([1])
        t.sender.abort()
        t.members([1])
        if t.sender.is_collective:
            _join_after_an_abort(t)
    t.sender.abort()


def _join_after_an_abort(t: TransportSubject) -> None:
    """Let the sender join a group whose only receiver was aborted while it joined."""
    (member,) = t.members([1], _TOO_LATE_S)
    receiver = t.receiver(member)
    joining = t.start(receiver.join, "the join of a receiver that is then aborted")
    joining.has_ended(_TOO_LATE_S / 4)
    receiver.abort()
    t.start(t.sender.join, "a join after the receiver's abort").ending(_TOO_LATE_S + SLACK_S)
    joining.ending(SLACK_S)


def _files(t: TransportSubject) -> set[str]:
    return {str(file.relative_to(t.directory)) for file in t.directory.rglob("*")}


@check("T-36", "collective", look_at="join of the receiver: connections that are refused and retried")
def a_join_of_an_aborted_group_ends(t: TransportSubject) -> None:
    """The join of a receiver in an aborted group raises TransferError within its timeout."""
    (member,) = t.members([1], 1.0)
    t.sender.abort()
    joining = t.start(t.receiver(member).join, "the join of an aborted group")
    error = failure_of(joining, 1.0 + SLACK_S)
    t.note(timeout_s=1.0, seconds=joining.ending(0.0).seconds, message=str(error))


def _require_ended_by_abort(t: TransportSubject, call: PendingCall[Any], end: WeightSender | WeightReceiver) -> None:
    time.sleep(0.2)
    require(not call.has_ended(), f"{call.what} ended before abort was called, although it had nothing to end it")
    started = time.monotonic()
    t.start(end.abort, "abort").result(SLACK_S)
    error = failure_of(call, SLACK_S)
    t.note(timeout_s=_LONG_S, seconds_after_abort=time.monotonic() - started, message=str(error))
