"""The transport under check: a new pair for each check, concurrent calls, processes to kill."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from inflight.conformance.calls import SLACK_S, Ending, PendingCall, results
from inflight.conformance.checks import fail
from inflight.conformance.targets import TransportTarget
from inflight.conformance.transport.pair import GroupMember, open_pair
from inflight.conformance.transport.peer import Peer, PeerSetup
from inflight.conformance.transport.sockets import can_list_sockets
from inflight.contracts import WeightReceiver, WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.weights.send.module import tensor_spec
from inflight.wire import ProcessGroupSpec, TensorSpec, TransportBody

T = TypeVar("T")

RUN_ID = "conformance"
FORM_S = 8.0
"""Timeout of groups that should form, and of buckets that should arrive."""


class TransportSubject:
    """One transport; satisfies `inflight.conformance.judge.Subject`. Raises `ConfigError`."""

    def __init__(self, target: TransportTarget) -> None:
        self._target = target
        self._pair = open_pair(target)
        self._receivers: list[WeightReceiver] = []
        self._peers: list[Peer] = []
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

        The needs are ``N-receivers``, ``/proc``, and ``process-group``: ranks meet in a torch process group.
        """
        for need in needs:
            if need == "/proc" and not can_list_sockets():
                return "this system does not list in /proc the sockets of a process"
            if need == "process-group" and not issubclass(self._pair.transport.spec_type, ProcessGroupSpec):
                return f"the ranks of {self._pair.transport.name} do not meet in a torch process group"
            most = self._pair.max_receivers
            if need.endswith("-receivers") and most is not None and most < int(need.partition("-")[0]):
                return f"{self._pair.transport.name} supports at most {most} receivers on this machine"
        return None

    def prepare(self) -> None:
        self._pair = open_pair(self._target)

    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        """Call a check's function in its own thread, then abort all ends that it opened."""
        try:
            self.start(lambda: function(self), "the check").result(deadline_s)
        finally:
            self.close()

    def close(self) -> None:
        for peer in self._peers:
            peer.kill()
        ends: list[WeightSender | WeightReceiver] = [self._pair.sender, *self._receivers]
        self._peers, self._receivers = [], []
        for call in [self.start(end.abort, "abort after the check") for end in ends]:
            call.has_ended(2.0)  # the checks of abort report its failures

    @property
    def sender(self) -> WeightSender:
        return self._pair.sender

    def receiver(self, member: GroupMember) -> WeightReceiver:
        """Return a new receiver in this process; it is aborted after the check."""
        receiver = self._pair.receiver(member)
        if not isinstance(receiver, WeightReceiver):
            fail(f"the receiver lacks methods of WeightReceiver: {type(receiver).__name__}")
        self._receivers.append(receiver)
        return receiver

    def members(self, num_ranks: Sequence[int], timeout_s: float = FORM_S) -> list[GroupMember]:
        """Open a group in which endpoint i takes ``num_ranks[i]`` ranks; return the member of each rank."""
        opened = self.sender.specs(RUN_ID, num_ranks, timeout_s)
        ranks = [(spec, rank) for spec, count in zip(opened, num_ranks, strict=True) for rank in range(count)]
        return [GroupMember(spec, rank, group_rank) for group_rank, (spec, rank) in enumerate(ranks, 1)]

    def group_specs(self, num_ranks: Sequence[int], timeout_s: float) -> list[ProcessGroupSpec]:
        return [spec for spec in self.sender.specs(RUN_ID, num_ranks, timeout_s) if isinstance(spec, ProcessGroupSpec)]

    def start(self, call: Callable[[], T], what: str) -> PendingCall[T]:
        return PendingCall(call, what)

    def start_joins(self, receivers: Sequence[WeightReceiver]) -> list[PendingCall[None]]:
        """Start the joins of these receivers and then the sender's; return the calls, the sender's last."""
        joins = [self.start(r.join, f"the join of receiver {i + 1}") for i, r in enumerate(receivers)]
        return [*joins, self.start(self.sender.join, "the sender's join")]

    def form(self, num_receivers: int = 1, timeout_s: float = FORM_S) -> list[WeightReceiver]:
        """Form a group with receivers in this process, one rank each, and return them."""
        receivers = [self.receiver(member) for member in self.members([1] * num_receivers, timeout_s)]
        results(self.start_joins(receivers), timeout_s + SLACK_S)
        return receivers

    def form_with_peer(self, others: int = 0) -> tuple[Peer, list[WeightReceiver]]:
        """Form a group of a receiver in another process and ``others`` in this one; return all of them."""
        first, *rest = self.members([1] * (1 + others), 2 * FORM_S)
        peer = self._peer(PeerSetup(target=self._target, spec=TransportBody.model_validate(first.spec.model_dump())))
        receivers = [self.receiver(member) for member in rest]
        results(self.start_joins(receivers), 2 * FORM_S + SLACK_S)
        peer.wait_until_joined()
        return peer, receivers

    def join_sending_peer(self, bucket: TensorSpec | None = None) -> tuple[Peer, WeightReceiver]:
        """Form a group of a sender in another process, which sends ``bucket`` at once, and a receiver in this one."""
        peer = self._peer(PeerSetup(target=self._target, bucket=bucket))
        receiver = self.receiver(peer.member(self._pair.transport.spec_type))
        self.start(receiver.join, "the receiver's join").result(2 * FORM_S)
        peer.wait_until_joined()
        return peer, receiver

    def _peer(self, setup: PeerSetup) -> Peer:
        self._peers.append(Peer(setup))
        return self._peers[-1]

    def start_receives(
        self, receivers: Sequence[WeightReceiver], bucket: WeightBucket, timeout_s: float = FORM_S
    ) -> list[PendingCall[list[torch.Tensor]]]:
        """Start receiving a bucket with these specs on every receiver."""
        return [
            self.start(lambda r=r: r.receive(bucket.specs, timeout_s), f"receiver {i + 1}'s receive")  # type: ignore[misc]
            for i, r in enumerate(receivers)
        ]

    def start_send(self, bucket: WeightBucket, timeout_s: float = FORM_S) -> PendingCall[None]:
        return self.start(lambda: self.sender.send(bucket, timeout_s), f"the send of bucket {bucket.index}")

    def transfer(self, receivers: Sequence[WeightReceiver], bucket: WeightBucket) -> list[list[torch.Tensor]]:
        """Send one bucket and return the tensors that each receiver received."""
        receives = self.start_receives(receivers, bucket)
        sending = self.start_send(bucket)
        results([*receives, sending], FORM_S + SLACK_S)
        return [receive.result(0.0) for receive in receives]


def failure_of(call: PendingCall[Any], within_s: float) -> TransferError:
    """Return the `TransferError` with which a call ends; anything else fails the check. Raises `Hung`."""
    ending: Ending[Any] = call.ending(within_s)
    if not isinstance(ending.error, TransferError):
        fail(f"{call.what} must raise TransferError, but: {ending.words}")
    return ending.error


def bucket_of(*tensors: torch.Tensor, index: int = 0) -> WeightBucket:
    """Return a bucket of these tensors, with specs derived from them."""
    specs = tuple(tensor_spec(f"tensor {i}", tensor, None) for i, tensor in enumerate(tensors))
    return WeightBucket(index, specs, tensors)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, row-major, as a new uint8 tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
