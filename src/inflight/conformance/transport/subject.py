"""The transport under check: a new pair for each check, concurrent calls, and processes to kill."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from inflight.conformance.calls import SLACK_S, Ending, PendingCall, results
from inflight.conformance.checks import fail, skip
from inflight.conformance.targets import TransportTarget
from inflight.conformance.transport.pair import RUN_ID, GroupMember, open_pair, update_of
from inflight.conformance.transport.peer import READY_S, Peer, PeerSetup
from inflight.conformance.transport.sockets import can_list_sockets, listening
from inflight.contracts import ReceivesAhead, WeightReceiver, WeightSender
from inflight.errors import ConfigError, TransferError
from inflight.types import WeightBucket
from inflight.wire import ProcessGroupSpec, TransportBody, UpdateRef, WeightUpdate

T = TypeVar("T")

_STORES = {"files": ("file", "http"), "shared-memory": ("shm",)}
"""By need, the transports whose stores have the format that the contract documents."""
FORM_S = 8.0
"""Timeout for groups that should form, and for buckets that should arrive."""


class TransportSubject:
    """Implements `inflight.conformance.judge.Subject` for a transport. Raises `ConfigError` if it cannot be opened."""

    def __init__(self, target: TransportTarget, directory: Path) -> None:
        self._target = target
        self.directory = directory
        """The directory for this process's temporary files and for all files of the transport."""
        tempfile.tempdir = str(self.directory)
        self._pair = open_pair(target, self.directory)
        self._receivers: list[WeightReceiver] = []
        self._other_senders: list[WeightSender] = []
        self._peers: list[Peer] = []
        self._needs_peer = False
        self._spare: Peer | None = None
        """The process of the next peer, already started."""
        self._run_id, self._version = RUN_ID, 0
        self.listening = listening() if can_list_sockets() else set()
        """The addresses and ports on which this process was listening before it opened any group."""
        self.evidence: dict[str, Any] = {}

    @property
    def facts(self) -> Mapping[str, Any]:
        flags = {key: str(value) for key, value in self._target.options.items()}
        who = {"implementation": self._pair.transport.name, "implementation_version": self._pair.version}
        return {**who, "capabilities": {}, "flags": flags}

    def note(self, **values: Any) -> None:
        self.evidence.update(values)

    def missing(self, needs: tuple[str, ...]) -> str | None:
        """Return why a check with these needs cannot be run; None if it can.

        The needs are ``N-receivers``, ``/proc``, ``peer`` (an end in a process of its own, which `prepare` starts),
        ``collective`` (joins wait for all ranks, and buckets are received while they are sent), ``process-group``
        (ranks meet in a torch process group), and ``files`` and ``shared-memory`` (the store has the format that the
        contract documents for `file` and `http`, or for `shm`).
        """
        self._needs_peer = "peer" in needs
        for need in needs:
            if need == "/proc" and not can_list_sockets():
                return "this system does not list in /proc the sockets of a process"
            if need == "collective" and not self.sender.is_collective:
                return f"{self._pair.transport.name} stores what it sends, so its ranks do not wait for one another"
            if need == "process-group" and not issubclass(self._pair.transport.spec_type, ProcessGroupSpec):
                return f"the ranks of {self._pair.transport.name} do not meet in a torch process group"
            if need in _STORES and self._pair.transport.name not in _STORES[need]:
                return f"{self._pair.transport.name} does not store buckets in {need.replace('-', ' ')}"
            most = self._pair.max_receivers
            if need.endswith("-receivers") and most is not None and most < int(need.partition("-")[0]):
                return f"{self._pair.transport.name} supports at most {most} receivers on this machine"
        return None

    def prepare(self) -> None:
        if self._needs_peer and self._spare is None:
            self._spare = _ready_peer()
        self._pair = open_pair(self._target, self.directory)

    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        """Call a check's function in a new thread, then abort all ends that it opened."""
        try:
            self.start(lambda: function(self), "the check").result(deadline_s)
        finally:
            self.end()

    def close(self) -> None:
        self.end()
        if self._spare is not None:
            self._spare.kill()

    def end(self) -> None:
        """Abort all ends that the check has opened."""
        for peer in self._peers:
            peer.kill()
        ends: list[WeightSender | WeightReceiver] = [self._pair.sender, *self._other_senders, *self._receivers]
        self._peers, self._other_senders, self._receivers = [], [], []
        for call in [self.start(end.abort, "abort after the check") for end in ends]:
            call.has_ended(2.0)  # the checks of abort report its failures

    def move_to(self, address: str) -> None:
        """Abort all ends, and open a new sender that is reached at this address."""
        self.end()
        self._pair = open_pair(self._target, self.directory, address=address)

    @property
    def max_receivers(self) -> int | None:
        """The maximum number of receivers in one group on this machine; None if there is no limit."""
        return self._pair.max_receivers

    @property
    def sender(self) -> WeightSender:
        return self._pair.sender

    def open_other_sender(self) -> WeightSender:
        """Return another sender in this process, with the same directory; it is aborted after the check."""
        sender = open_pair(self._target, self.directory).sender
        self._other_senders.append(sender)
        return sender

    def neighbour(self, run_id: str) -> TransportSubject:
        """Return a separate subject that has another sender in this process, for another run.

        The sender of a store creates its own directory if it can. The ends of the new subject are aborted after the
        check, together with those of this subject.
        """
        other = copy.copy(self)
        other._run_id, other._version = run_id, 0
        try:
            other._pair = open_pair(self._target, self.directory if self.sender.is_collective else None)
        except ConfigError:  # its endpoints cannot see a directory of its own
            other._pair = open_pair(self._target, self.directory)
        self._other_senders.append(other.sender)
        return other

    def receiver(self, member: GroupMember) -> WeightReceiver:
        """Return a new receiver in this process; it is aborted after the check."""
        receiver = self._pair.receiver(member)
        if not isinstance(receiver, WeightReceiver):
            fail(f"the receiver lacks methods of WeightReceiver: {type(receiver).__name__}")
        self._receivers.append(receiver)
        return receiver

    def abort_and_forget(self, receiver: WeightReceiver) -> None:
        """Abort a receiver, and drop this subject's reference to it."""
        receiver.abort()
        self._receivers.remove(receiver)

    def members(self, num_ranks: Sequence[int], timeout_s: float = FORM_S) -> list[GroupMember]:
        """Open a group in which endpoint i has ``num_ranks[i]`` ranks; return the `GroupMember` of each rank."""
        opened = self.sender.specs(self._run_id, num_ranks, timeout_s)
        ranks = [(spec, rank) for spec, count in zip(opened, num_ranks, strict=True) for rank in range(count)]
        return [GroupMember(spec, rank, group_rank) for group_rank, (spec, rank) in enumerate(ranks, 1)]

    def group_specs(self, num_ranks: Sequence[int], timeout_s: float) -> list[ProcessGroupSpec]:
        return [
            spec for spec in self.sender.specs(self._run_id, num_ranks, timeout_s) if isinstance(spec, ProcessGroupSpec)
        ]

    def start(self, call: Callable[[], T], what: str) -> PendingCall[T]:
        return PendingCall(call, what)

    def start_joins(self, receivers: Sequence[WeightReceiver]) -> list[PendingCall[None]]:
        """Start the joins of these receivers and then the sender's join; return the calls, with the sender's last."""
        joins = [self.start(r.join, f"the join of receiver {i + 1}") for i, r in enumerate(receivers)]
        return [*joins, self.start(self.sender.join, "the sender's join")]

    def form(self, num_receivers: int = 1, timeout_s: float = FORM_S) -> list[WeightReceiver]:
        """Form a group with receivers in this process, each the only rank of its endpoint, and return them."""
        return self.form_endpoints([1] * num_receivers, timeout_s)

    def form_endpoints(self, num_ranks: Sequence[int], timeout_s: float = FORM_S) -> list[WeightReceiver]:
        """Form a group in which endpoint i has ``num_ranks[i]`` ranks in this process, and return their receivers."""
        receivers = [self.receiver(member) for member in self.members(num_ranks, timeout_s)]
        results(self.start_joins(receivers), timeout_s + SLACK_S)
        return receivers

    def form_with_peer(
        self, others: int = 0, buckets: Sequence[WeightBucket] = ()
    ) -> tuple[Peer, list[WeightReceiver]]:
        """Form a group with a receiver in another process and ``others`` in this one; return the other process and the
        receivers in this one.

        If there are ``buckets``, the receiver in the other process receives them in the next update.
        """
        first, *rest = self.members([1] * (1 + others), 2 * FORM_S)
        update = self._update(buckets, self._version + 1) if buckets else None
        peer = self._peer(spec=TransportBody.model_validate(first.spec.model_dump()), receives=update)
        receivers = [self.receiver(member) for member in rest]
        results(self.start_joins(receivers), 2 * FORM_S + SLACK_S)
        peer.wait_until_joined()
        return peer, receivers

    def join_sending_peer(self, bucket: WeightBucket | None = None) -> tuple[Peer, WeightReceiver]:
        """Form a group of a receiver here and a sender in another process, which sends ``bucket`` immediately.

        The bucket must hold one tensor from `numbered`.
        """
        peer = self._peer(bucket=bucket and bucket.specs[0])
        receiver = self.receiver(peer.member(self._pair.transport.spec_type))
        self.start(receiver.join, "the receiver's join").result(2 * FORM_S)
        peer.wait_until_joined()
        if bucket is not None:
            receiver.begin(peer.sent(bucket))
        return peer, receiver

    def _peer(self, **role: Any) -> Peer:
        peer, self._spare = self._spare or _ready_peer(), None
        if peer is None:
            skip(f"the kit's own second process did not start within {READY_S:g} s")
        self._peers.append(peer)
        peer.set_up(PeerSetup(target=self._target, directory=self.directory, **role))
        return peer

    def ref(self, session_id: str = "") -> UpdateRef:
        """Return a reference to the update that was begun last, or to one of another session with the same version."""
        return UpdateRef(run_id=self._run_id, version=self._version, session_id=session_id)

    def skip_versions(self, count: int) -> None:
        """Increase the versions of later updates by ``count``."""
        self._version += count

    def begin(self, receivers: Sequence[WeightReceiver], *buckets: WeightBucket) -> None:
        """Begin an update of these buckets, with a new version, on both sides."""
        self.skip_versions(1)
        self.begin_session("", receivers, *buckets)

    def begin_session(self, session_id: str, receivers: Sequence[WeightReceiver], *buckets: WeightBucket) -> None:
        """Begin an update of these buckets, with the version of the previous update, on both sides."""
        update = self._update(buckets, self._version, session_id)
        self.sender.begin(update)
        for receiver in receivers:
            receiver.begin(update.ref)

    def _update(self, buckets: Sequence[WeightBucket], version: int, session_id: str = "") -> WeightUpdate:
        return update_of(buckets, version, session_id).model_copy(update={"run_id": self._run_id})

    def start_receives(
        self, receivers: Sequence[WeightReceiver], bucket: WeightBucket, timeout_s: float = FORM_S
    ) -> list[PendingCall[list[torch.Tensor]]]:
        """Start to receive a bucket with the specs of ``bucket`` on every receiver."""
        return [
            self.start(lambda r=r: r.receive(bucket.specs, timeout_s), f"receiver {i + 1}'s receive")  # type: ignore[misc]
            for i, r in enumerate(receivers)
        ]

    def start_send(self, bucket: WeightBucket, timeout_s: float = FORM_S) -> PendingCall[None]:
        return self.start(lambda: self.sender.send(bucket, timeout_s), f"the send of bucket {bucket.index}")

    def receive_ahead(self, receiver: WeightReceiver, bucket: WeightBucket) -> None:
        """Start to receive a bucket ahead, if the receiver supports that."""
        if isinstance(receiver, ReceivesAhead):
            receiver.receive_ahead(bucket.specs, FORM_S)

    def transfer(
        self, receivers: Sequence[WeightReceiver], bucket: WeightBucket, *, ahead: bool = False
    ) -> list[list[torch.Tensor]]:
        """Send one bucket as its own update, and return the tensors that each receiver received.

        If ``ahead`` is true, each receiver that supports it receives the bucket ahead.
        """
        self.begin(receivers, bucket)
        for receiver in receivers:
            if ahead:
                self.receive_ahead(receiver, bucket)
        receives = self.start_receives(receivers, bucket)
        sending = self.start_send(bucket)
        results([*receives, sending], FORM_S + SLACK_S)
        self.sender.end(is_done=True)
        return [receive.result(0.0) for receive in receives]


def _ready_peer() -> Peer | None:
    """Start another process; return None if it does not start in time."""
    peer = Peer()
    if peer.is_ready():
        return peer
    peer.kill()
    return None


def failure_of(call: PendingCall[Any], within_s: float) -> TransferError:
    """Return the `TransferError` with which a call ends; anything else fails the check. Raises `Hung`."""
    ending: Ending[Any] = call.ending(within_s)
    if not isinstance(ending.error, TransferError):
        fail(f"{call.what} must raise TransferError, but: {ending.words}")
    return ending.error
