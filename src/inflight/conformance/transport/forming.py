"""Checks of opening and forming the group over which weights are sent, and of calls without a group."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed

from inflight.conformance.calls import SLACK_S, results
from inflight.conformance.checks import check, look_at, require
from inflight.conformance.transport.buckets import bucket_of, bytes_of
from inflight.conformance.transport.pair import ADDRESS, RUN_ID, GroupMember, update_of
from inflight.conformance.transport.sockets import is_loopback, is_wildcard, listening
from inflight.conformance.transport.subject import FORM_S, TransportSubject, failure_of
from inflight.contracts import WeightReceiver, WeightSender
from inflight.types import WeightBucket
from inflight.wire import ProcessGroupSpec

LEVEL = "group"
_ANOTHER = "127.0.0.2"
"""Another address of the machine itself; every Linux machine has it."""
_OTHER_RUN = "../team/run 7%: ü"
_LATE_S = 1.5
"""Timeout for joining a group that has ended."""


@check(
    "T-01",
    "process-group",
    look_at="specs of the sender: rank i starts at 1 + sum(num_ranks[:i]), world_size is 1 + sum(num_ranks)",
)
def specs_give_disjoint_consecutive_ranks(t: TransportSubject) -> None:
    """specs opens one group in which the sender is rank 0 and each endpoint has as many consecutive ranks as it needs,
    starting from 1."""
    counts = [1, 2, 3]
    specs = t.group_specs(counts, 2.0)
    t.note(num_ranks=counts, ranks=[spec.rank for spec in specs], world_sizes=[spec.world_size for spec in specs])
    require([spec.rank for spec in specs] == [1, 2, 4], "the endpoints' first ranks must be 1, 2 and 4")
    require(all(spec.world_size == 7 for spec in specs), "world_size must be 7 for every endpoint")
    members = {(spec.run_id, spec.group_name, spec.master_address, spec.master_port) for spec in specs}
    require(len(members) == 1, f"the endpoints were sent to {len(members)} groups, not to one")
    require(specs[0].run_id == RUN_ID, f"run_id is {specs[0].run_id!r}, not {RUN_ID!r}")
    require(all(spec.timeout_s == 2.0 for spec in specs), "the specs must carry the timeout of 2 s")


@check(
    "T-02", "collective", look_at="specs of the sender: what identifies a group, and what remains of the one before it"
)
def each_call_of_specs_opens_another_group(t: TransportSubject) -> None:
    """Each call of specs opens a new group, which no rank of an earlier group can join; torch groups get a new name
    and a new secret."""
    (first,), (second,) = t.members([1], _LATE_S), t.members([1])
    specs = [member.spec for member in (first, second) if isinstance(member.spec, ProcessGroupSpec)]
    names = [spec.group_name for spec in specs]
    if specs:
        words = f"both calls named the group {names[0]!r}: a late rank of the first would join the second"
        require(len(set(names)) == 2, words)
        require(len({spec.secret for spec in specs}) == 2, "both groups have the same secret")
    late = t.start(t.receiver(first).join, "the join of a rank of the earlier group")
    receiver, tensor = t.receiver(second), torch.randn(100)
    time.sleep(_LATE_S / 3)
    results(t.start_joins([receiver]), FORM_S + SLACK_S)
    error = failure_of(late, _LATE_S + SLACK_S)
    ((arrived,),) = t.transfer([receiver], bucket_of(tensor))
    t.note(names=names, message=str(error))
    require(bytes_of(arrived).equal(bytes_of(tensor)), "the first bucket of the new group arrived changed")


@check(
    "T-03",
    "/proc peer",
    deadline_s=30,
    look_at="the addresses to which the store and the group's own sockets are bound, on either end",
)
def an_open_group_listens_on_its_own_address(t: TransportSubject) -> None:
    """An open group listens on the address in its specs and on no broader one; loopback stays loopback."""
    before = listening()
    (member,) = t.members([1])
    receiver = t.receiver(member)
    results(t.start_joins([receiver]), FORM_S + SLACK_S)
    added = sorted(listening() - before)
    t.note(address=ADDRESS, listening=[f"{address} port {port}" for address, port in added])
    wide = [address for address, _ in added if is_wildcard(address)]
    require(not wide, f"it listens on every address of the machine: {wide}")
    outside = [address for address, _ in added if not is_loopback(address)]
    require(not outside, f"the group's address is loopback, but it listens on {outside}")
    t.move_to(_ANOTHER)
    before = listening()
    t.form_with_peer()  # a receiver in another process listens on an address of its own
    added = sorted(listening() - before)
    t.note(other_address=_ANOTHER, listening_there=[f"{address} port {port}" for address, port in added])
    others = [address for address, _ in added if address != _ANOTHER]
    require(not others, f"the group's address is {_ANOTHER}, but its sender listens on {others}")


@check("T-04", look_at="join of either end; where a secret or a token is compared")
def sender_and_one_receiver_form_a_group(t: TransportSubject) -> None:
    """A sender and one receiver that join at the same time form the group. If specs carry a secret or a token, a
    receiver with a different one cannot join."""
    (receiver,) = t.form()
    tensor = torch.arange(5, dtype=torch.float32)
    started = time.monotonic()
    ((arrived,),) = t.transfer([receiver], bucket_of(tensor))
    t.note(first_bucket_seconds=time.monotonic() - started)
    require(bytes_of(arrived).equal(bytes_of(tensor)), "the first bucket arrived changed")
    (member,) = t.members([1], _LATE_S)
    if hidden := next((name for name in ("secret", "token") if hasattr(member.spec, name)), None):
        wrong = member.spec.model_copy(update={hidden: getattr(member.spec, hidden)[::-1]})
        stranger = t.receiver(replace(member, spec=wrong))
        joining, _ = t.start_joins([stranger])
        error = failure_of(joining, _LATE_S + SLACK_S)
        t.note(**{f"join with another {hidden}": str(error)})


@check("T-42", deadline_s=30)
@look_at(
    "names of files and directories that do not depend on the run, what a new sender removes, and characters in run ids"
)
def senders_do_not_affect_one_another(t: TransportSubject) -> None:
    """Senders of different runs do not affect one another, even if they share a machine and a directory, and whatever
    the ids of their runs are."""
    (receiver,) = t.form()
    buckets = [bucket_of(torch.full((1000,), 1.0 + index), index=index) for index in range(2)]
    t.begin([receiver], *buckets)

    def require_arrival(sender: WeightSender, receiver: WeightReceiver, bucket: WeightBucket, whose: str) -> None:
        receives = t.start_receives([receiver], bucket)
        sending = t.start(lambda: sender.send(bucket, FORM_S), f"the send of bucket {bucket.index} of {whose}")
        results([*receives, sending], FORM_S + SLACK_S)
        ((arrived,),) = (receive.result(0.0) for receive in receives)
        require(bytes_of(arrived).equal(bytes_of(bucket.tensors[0])), f"a bucket of {whose} arrived changed")

    require_arrival(t.sender, receiver, buckets[0], "a run")
    other = t.open_other_sender()
    (spec,) = other.specs(_OTHER_RUN, [1], FORM_S)
    others = t.receiver(GroupMember(spec))
    results([t.start(end.join, "a join of another run") for end in (others, other)], FORM_S + SLACK_S)
    bucket = bucket_of(torch.full((1000,), -1.0))
    update = update_of([bucket], t.ref().version).model_copy(update={"run_id": _OTHER_RUN})
    other.begin(update)
    others.begin(update.ref)
    require_arrival(other, others, bucket, "another run of the same version")
    other.end(is_done=True)
    require_arrival(t.sender, receiver, buckets[1], "a run, while another run has a group,")
    t.sender.end(is_done=True)
    other.abort()
    ((arrived,),) = t.transfer([receiver], buckets[0])
    words = "after another run's sender has aborted its group, a bucket arrived changed"
    require(bytes_of(arrived).equal(bytes_of(buckets[0].tensors[0])), words)
    t.note(other_run=_OTHER_RUN)


@check("T-05", "3-receivers")
@look_at("join of either end: does one rank wait for another before it announces itself?")
def three_receivers_join_in_any_order(t: TransportSubject) -> None:
    """The ranks of several endpoints form the group in whatever order they join."""
    # Every pair of ranks joins first in turn; two of the receivers belong to one endpoint.
    slowest_s = 0.0
    for first, second in itertools.permutations(range(4), 2):
        receivers = [t.receiver(member) for member in t.members([1, 2])]
        ends: list[WeightSender | WeightReceiver] = [t.sender, *receivers]
        order = [first, second, *(rank for rank in range(4) if rank not in (first, second))]
        joins = []
        for rank in order:
            joins.append(t.start(ends[rank].join, f"the join of rank {rank}, in the order {order}"))
            time.sleep(0.005)
        results(joins, FORM_S + SLACK_S)
        slowest_s = max(slowest_s, *(join.ending(0.0).seconds for join in joins))
        for receiver in receivers:
            receiver.abort()
    t.note(num_orders=12, slowest_join_seconds=slowest_s)


@check(
    "T-06",
    "collective 3-receivers",
    look_at="join of either end: some transports connect only at their first operation",
)
def a_join_waits_for_every_rank(t: TransportSubject) -> None:
    """join blocks until every rank has joined."""
    receivers = [t.receiver(member) for member in t.members([1, 1, 1])]
    early = t.start_joins(receivers[:2])
    time.sleep(0.5)
    over = [join.what for join in early if join.has_ended()]
    t.note(ended_before_the_last_rank_came=over)
    require(not over, f"these joins ended although a rank was still missing: {', '.join(over)}")
    results([t.start(receivers[2].join, "the late receiver's join"), *early], FORM_S + SLACK_S)


@check("T-27", look_at="join, send and receive before the call they need, and after abort")
def calls_out_of_turn_raise_transfer_error(t: TransportSubject) -> None:
    """A call without a group raises TransferError."""
    bucket, empty = bucket_of(torch.zeros(3)), bucket_of(torch.zeros(0))
    messages = {}

    def refused(what: str, call: Callable[[], Any]) -> None:
        messages[what] = str(failure_of(t.start(call, what), SLACK_S))

    refused("join before specs", t.sender.join)
    refused("send before specs", lambda: t.sender.send(bucket, 0.5))
    refused("send of an empty bucket before specs", lambda: t.sender.send(empty, 0.5))
    (member,) = t.members([1])
    receiver = t.receiver(member)
    refused("send before join", lambda: t.sender.send(bucket, 0.5))
    refused("receive before join", lambda: receiver.receive(bucket.specs, 0.5))
    (receiver,) = t.form()
    for end in (receiver, t.sender):
        end.abort()
    refused("receive after abort", lambda: receiver.receive(bucket.specs, 0.5))
    refused("send after abort", lambda: t.sender.send(bucket, 0.5))
    refused("send of an empty bucket after abort", lambda: t.sender.send(empty, 0.5))
    refused("join after abort", t.sender.join)
    t.note(messages=messages)
    require(all(messages.values()), "the error of a call without a group has an empty message")


@check("T-07", look_at="calls of torch.distributed.init_process_group and destroy_process_group")
def torchs_default_group_is_left_alone(t: TransportSubject) -> None:
    """torch's default process group is neither created, used nor destroyed."""
    seen = {"before": _has_default_group()}
    (receiver,) = t.form()
    seen["formed"] = _has_default_group()
    t.transfer([receiver], bucket_of(torch.zeros(1)))
    seen["used"] = _has_default_group()
    receiver.abort()
    t.sender.abort()
    seen["abandoned"] = _has_default_group()
    t.note(default_group_exists=seen)
    are_same = len(set(seen.values())) == 1
    require(are_same, "torch's default process group was created or destroyed, but it belongs to the trainer")


def _has_default_group() -> bool:
    distributed: Any = torch.distributed
    return bool(distributed.is_initialized())
