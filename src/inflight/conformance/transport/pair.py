"""Both ends of a transport, opened by the kit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from inflight.base.extensions import find_entry_points, resolve
from inflight.base.transport_registry import GROUP
from inflight.conformance.targets import TransportTarget
from inflight.contracts import Transport, WeightReceiver, WeightSender
from inflight.errors import ConfigError
from inflight.types import WeightBucket
from inflight.weights.transports import named_transport
from inflight.wire import BucketSpec, InFlightPolicy, Manifest, TransportSpec, WeightUpdate

RUN_ID = "conformance"
ADDRESS = "127.0.0.1"
"""The address at which senders are reached, unless a check needs another one."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A receiver's position: the spec of its endpoint, its rank there, and its rank in the whole group."""

    spec: TransportSpec
    rank: int = 0
    group_rank: int = 1


@dataclass(frozen=True, slots=True)
class TransportPair:
    """A new sender, and a factory for its receivers.

    ``max_receivers`` is the maximum number of receivers in one group on this machine.
    """

    transport: Transport
    sender: WeightSender
    max_receivers: int | None = None

    @property
    def version(self) -> str:
        """The version of the package that installs the transport; empty if it is not installed."""
        entry = find_entry_points(GROUP).get(self.transport.name)
        return entry.dist.version if entry is not None and entry.dist is not None else ""

    def receiver(self, member: GroupMember) -> WeightReceiver:
        index = 0 if self.max_receivers is None else member.group_rank % (self.max_receivers + 1)
        device = torch.device("cuda", index) if self.transport.needs_gpu else torch.device("cpu")
        return self.transport.receiver(member.spec, rank=member.rank, device=device)


def open_pair(target: TransportTarget, directory: Path | None = None, *, address: str = ADDRESS) -> TransportPair:
    """Return a new pair for a target, whose sender is reached at ``address``.

    The pair's files are in ``directory``; if that is None, the sender creates a directory.

    Raises `ConfigError` if the target is not a transport that can be checked on this machine.
    """
    transport = resolve(target.factory)(**target.options) if target.options else named_transport(target.factory)
    if not isinstance(transport, Transport):
        raise ConfigError(f"{target.factory} returned a {type(transport).__name__}, not a Transport")
    sender = transport.sender(address=address, directory=directory)
    if not isinstance(sender, WeightSender):
        raise ConfigError(f"the sender of {target.factory} lacks methods of WeightSender: {type(sender).__name__}")
    if transport.needs_gpu and not sender.is_collective:
        raise ConfigError(
            f"the {transport.name} transport stores what it sends in GPU memory, which the checks do not read; "
            "use `inflight check endpoint`, which publishes over the stores that a server supports"
        )
    num_devices = torch.cuda.device_count()
    if transport.needs_gpu and num_devices < 2:
        raise ConfigError(
            f"{transport.name} needs a GPU for each end and torch sees {num_devices}; check gloo on this machine"
        )
    return TransportPair(transport, sender, num_devices - 1 if transport.needs_gpu else None)


def update_of(buckets: Sequence[WeightBucket], version: int, session_id: str = "") -> WeightUpdate:
    """Return the update that consists of these buckets."""
    specs, parts = [spec for bucket in buckets for spec in bucket.specs], list[BucketSpec]()
    for index, bucket in enumerate(buckets):
        start = parts[-1].stop if parts else 0
        size_bytes = sum(spec.size_bytes for spec in bucket.specs)
        parts.append(BucketSpec(index=index, start=start, stop=start + len(bucket.specs), size_bytes=size_bytes))
    return WeightUpdate(
        run_id=RUN_ID,
        version=version,
        session_id=session_id,
        manifest=Manifest(tensors=tuple(specs)),
        buckets=tuple(parts),
        in_flight=InFlightPolicy.KEEP,
        deadline_s=60.0,
        lease_s=60.0,
    )
