"""Transports for weights. Each has a sender for trainer rank 0 and a receiver for each endpoint rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inflight.base.extensions import import_object
from inflight.base.transport_registry import find_transport
from inflight.contracts import Transport
from inflight.errors import ConfigError
from inflight.wire import TransportName, TransportSpec

if TYPE_CHECKING:
    import torch

    from inflight.contracts import WeightReceiver, WeightSender


def named_transport(text: str) -> Transport:
    """Return the transport that a user names: an installed transport or ``module:attribute``. Raises `ConfigError`."""
    if ":" not in text:
        return find_transport(text)
    transport = import_object(text)
    if not isinstance(transport, Transport):
        raise ConfigError(f"{text} is a {type(transport).__name__}, not a Transport")
    return transport


def make_sender(transport: TransportName, *, address: str = "127.0.0.1", directory: Path | None = None) -> WeightSender:
    """Return the trainer's end of a transport, which is given by its name or as ``module:attribute``.

    ``address`` is the address at which the endpoints reach this machine (gloo, nccl, http). ``directory`` is where
    buckets are stored: ``file`` needs a directory that the endpoints can read; ``http``, ``shm`` and ``ipc`` create
    their own by default. Raises `ConfigError`.
    """
    return named_transport(transport).sender(address=address, directory=directory)


def make_receiver(spec: TransportSpec, device: torch.device | None = None, rank: int = 0) -> WeightReceiver:
    """Return the receiving end of a transport, for one rank of an endpoint.

    ``rank`` and ``device`` have the same meaning as for `Transport.receiver`.
    """
    transport = find_transport(spec.transport)
    own = transport.receiver(spec, rank=rank, device=device)
    if not spec.others:
        return own
    from inflight.weights.transports.several import SeveralReceivers

    others = [transport.receiver(other, rank=rank, device=device) for other in spec.others]
    return SeveralReceivers([own, *others], device, on_device=transport.needs_gpu)
