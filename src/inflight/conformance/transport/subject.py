"""A transport as the checks see it: a new pair for each, calls that run beside one another, processes to be killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from inflight.conformance.checks import fail
from inflight.conformance.targets import TransportTarget
from inflight.conformance.transport.calls import SLACK_S, Ending, PendingCall, results
from inflight.conformance.transport.pair import open_pair
from inflight.conformance.transport.peer import Peer, Setup
from inflight.conformance.transport.sockets import can_tell
from inflight.contracts import WeightReceiver, WeightSender
from inflight.errors import TransferError
from inflight.types import WeightBucket
from inflight.wire import ProcessGroupSpec, TensorSpec

T = TypeVar("T")

RUN_ID = "conformance"
FORM_S = 8.0
"""Timeout of groups that should form, and of buckets that should arrive."""


class TransportSubject:
    """One transport; satisfies `inflight.conformance.judge.Subject`."""

    def __init__(self, target: TransportTarget) -> None:
        self._target = target
        self._pair = open_pair(target)
        self._receivers: list[WeightReceiver] = []
        self._peers: list[Peer] = []
        self.evidence: dict[str, Any] = {}

    @classmethod
    def open(cls, target: TransportTarget) -> TransportSubject:
        """Return the subject for a target. Raises `ConfigError`."""
        return cls(target)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what the certificate says of the transport."""
        flags = {key: str(value) for key, value in self._target.options.items()}
        return {
            "implementation": self._pair.name,
            "implementation_version": self._pair.version,
            "capabilities": {},
            "flags": flags,
        }

    def note(self, **values: Any) -> None:
        """Keep what was measured."""
        self.evidence.update(values)

    def missing(self, needs: tuple[str, ...]) -> str | None:
        """Return why a check with these needs cannot be run; they are ``N receivers`` and ``/proc``."""
        for need in needs:
            if need == "/proc" and not can_tell():
                return "this system does not tell in /proc what a process listens on"
            most = self._pair.max_receivers
            if need.endswith(" receivers") and most is not None and most < int(need.split()[0]):
                return f"{self._pair.name} takes at most {most} receivers on this machine"
        return None

    def prepare(self) -> None:
        """Make a new pair."""
        self._pair = open_pair(self._target)

    def call(self, function: Callable[[Any], Any], deadline_s: float) -> None:
        """Call a check's function in a thread of its own; give up whatever it opened."""
        try:
            self.start(lambda: function(self), "the check").result(deadline_s)
        finally:
            self._clear()

    def close(self) -> None:
        """Give everything up."""
        self._clear()

    def _clear(self) -> None:
        for peer in self._peers:
            peer.kill()
        ends: list[WeightSender | WeightReceiver] = [self._pair.sender, *self._receivers]
        self._peers, self._receivers = [], []
        for call in [self.start(end.abort, "abort after the check") for end in ends]:
            call.has_ended(2.0)  # what abort does wrong is for the checks of it to tell

    @property
    def sender(self) -> WeightSender:
        """The sender of this check."""
        return self._pair.sender

    def receiver(self, spec: ProcessGroupSpec) -> WeightReceiver:
        """Return a new receiver in this process; it is given up after the check."""
        receiver = self._pair.receiver(spec)
        if not isinstance(receiver, WeightReceiver):
            fail(f"the receiver lacks methods of WeightReceiver: {type(receiver).__name__}")
        self._receivers.append(receiver)
        return receiver

    def specs(self, num_ranks: Sequence[int], timeout_s: float = FORM_S) -> list[ProcessGroupSpec]:
        """Open a group in which endpoint i takes ``num_ranks[i]`` ranks; return the spec for each rank."""
        opened = self.group_specs(num_ranks, timeout_s)
        return [
            spec.model_copy(update={"rank": spec.rank + i})
            for spec, count in zip(opened, num_ranks, strict=True)
            for i in range(count)
        ]

    def group_specs(self, num_ranks: Sequence[int], timeout_s: float) -> list[ProcessGroupSpec]:
        """Open a group and return the spec for each endpoint. Fails the check for a transport that has no group."""
        opened = self.sender.specs(RUN_ID, num_ranks, timeout_s)
        specs = [spec for spec in opened if isinstance(spec, ProcessGroupSpec)]
        if len(specs) != len(opened):
            fail("specs were to describe a process group: these checks are of transports whose ranks join one")
        return specs

    def start(self, call: Callable[[], T], what: str) -> PendingCall[T]:
        """Start a blocking call beside the check."""
        return PendingCall(call, what)

    def start_joins(self, receivers: Sequence[WeightReceiver]) -> list[PendingCall[None]]:
        """Start the joins of these receivers and then the sender's, which is the last in the list."""
        joins = [self.start(r.join, f"the join of receiver {i + 1}") for i, r in enumerate(receivers)]
        return [*joins, self.start(self.sender.join, "the sender's join")]

    def form(self, num_receivers: int = 1, timeout_s: float = FORM_S) -> list[WeightReceiver]:
        """Form a group with receivers in this process, one rank each, and return them."""
        receivers = [self.receiver(spec) for spec in self.specs([1] * num_receivers, timeout_s)]
        results(self.start_joins(receivers), timeout_s + SLACK_S)
        return receivers

    def form_with_peer(self, others: int = 0) -> tuple[Peer, list[WeightReceiver]]:
        """Form a group of a receiver in another process and ``others`` in this one; return them."""
        spec, *rest = self.specs([1] * (1 + others), 2 * FORM_S)
        peer = self._peer(Setup(target=self._target, spec=spec))
        receivers = [self.receiver(spec) for spec in rest]
        results(self.start_joins(receivers), 2 * FORM_S + SLACK_S)
        peer.wait_until_joined()
        return peer, receivers

    def join_sending_peer(self, bucket: TensorSpec | None = None) -> tuple[Peer, WeightReceiver]:
        """Form a group of a sender in another process, which sends ``bucket`` at once, and a receiver in this one."""
        peer = self._peer(Setup(target=self._target, bucket=bucket))
        receiver = self.receiver(peer.spec())
        self.start(receiver.join, "the receiver's join").result(2 * FORM_S)
        peer.wait_until_joined()
        return peer, receiver

    def _peer(self, setup: Setup) -> Peer:
        self._peers.append(Peer(setup))
        return self._peers[-1]

    def start_receives(
        self, receivers: Sequence[WeightReceiver], bucket: WeightBucket, timeout_s: float = FORM_S
    ) -> list[PendingCall[list[torch.Tensor]]]:
        """Start receiving a bucket like this one on every receiver."""
        return [
            self.start(lambda r=r: r.receive(bucket.specs, timeout_s), f"receiver {i + 1}'s receive")  # type: ignore[misc]
            for i, r in enumerate(receivers)
        ]

    def start_send(self, bucket: WeightBucket, timeout_s: float = FORM_S) -> PendingCall[None]:
        """Start sending a bucket."""
        return self.start(lambda: self.sender.send(bucket, timeout_s), f"the send of bucket {bucket.index}")

    def transfer(self, receivers: Sequence[WeightReceiver], bucket: WeightBucket) -> list[list[torch.Tensor]]:
        """Send one bucket and return what each receiver got."""
        receives = self.start_receives(receivers, bucket)
        sending = self.start_send(bucket)
        results([*receives, sending], FORM_S + SLACK_S)
        return [receive.result(0.0) for receive in receives]


def failure_of(call: PendingCall[Any], within_s: float) -> TransferError:
    """Return the `TransferError` with which a call ends; anything else fails the check. Raises `Hung`."""
    ending: Ending[Any] = call.ending(within_s)
    if not isinstance(ending.error, TransferError):
        fail(f"{call.what} was to raise TransferError: {ending.words}")
    return ending.error


def bucket_of(*tensors: torch.Tensor, index: int = 0) -> WeightBucket:
    """Return a bucket of these tensors, whose specs are read off them."""
    specs = tuple(
        TensorSpec.model_validate(
            {"name": f"tensor {i}", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
        )
        for i, tensor in enumerate(tensors)
    )
    return WeightBucket(index, specs, tensors)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, row-major, as a new uint8 tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
