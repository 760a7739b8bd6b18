"""Both ends of a transport as the kit gets them: built in, or from a factory. Knows nothing of checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inflight import __version__
from inflight.conformance.targets import TransportTarget
from inflight.contracts import WeightReceiver, WeightSender
from inflight.engines.factories import resolve
from inflight.errors import ConfigError
from inflight.weights.transports.process_group import ProcessGroupReceiver, ProcessGroupSender
from inflight.wire import ProcessGroupSpec


@dataclass(frozen=True, slots=True)
class TransportPair:
    """What a factory returns: one sender, and how a rank of an endpoint makes its receiver.

    The factory is called with the target's options, anew for each check and in each process that takes part.
    """

    sender: WeightSender
    receiver: Callable[[ProcessGroupSpec], WeightReceiver]
    name: str
    version: str = ""
    max_receivers: int | None = None
    """Most receivers that one group may have on this machine; None: any number."""


def open_pair(target: TransportTarget) -> TransportPair:
    """Return a new pair for a target. Raises `ConfigError`."""
    if target.factory == "gloo":
        return TransportPair(ProcessGroupSender("gloo"), ProcessGroupReceiver, name="gloo", version=__version__)
    if target.factory == "nccl":
        return _nccl_pair()
    pair = resolve(target.factory)(**target.options)
    if not isinstance(pair, TransportPair):
        raise ConfigError(f"{target.factory} returned a {type(pair).__name__}, not a TransportPair")
    if not isinstance(pair.sender, WeightSender):
        raise ConfigError(f"the sender of {target.factory} lacks methods of WeightSender: {type(pair.sender).__name__}")
    return pair


def _nccl_pair() -> TransportPair:
    num_devices = torch.cuda.device_count()
    if num_devices < 2:
        raise ConfigError(f"nccl needs a GPU for each end and torch sees {num_devices}; check gloo on this machine")

    def receiver(spec: ProcessGroupSpec) -> ProcessGroupReceiver:
        return ProcessGroupReceiver(spec, torch.device("cuda", spec.rank % num_devices))

    return TransportPair(
        ProcessGroupSender("nccl"), receiver, name="nccl", version=__version__, max_receivers=num_devices - 1
    )
