"""The needs of checks, and whether the endpoint under test meets them."""

from __future__ import annotations

from urllib.parse import urlsplit

import torch

from inflight.base.transport_registry import find_transport
from inflight.conformance.endpoint.opening import OpenedEndpoint
from inflight.wire import Capabilities, Encoding, InFlightPolicy, TransportName

ENCODINGS: tuple[Encoding, ...] = ("bfloat16", "float8", "delta")
STORES: tuple[TransportName, ...] = ("shm", "file", "http", "ipc")
_SUPPORTED = {
    "streaming": "streaming is",
    "chat": "chat is",
    "seeds": "seeds are",
    "drafts": "drafts are",
    "draft_counts": "draft_counts are",
    "scoring": "scoring is",
    "staging": "staging is",
    "partial_rollouts": "partial rollouts are",
    "partial_updates": "partial updates are",
    "sharded": "parts of several senders are",
    "lora": "LoRAs are",
    "releases_memory": "releases_memory is",
}
"""Needs that a capability of the same name meets, each with the beginning of the message that it is not supported."""


def offers_of(
    capabilities: Capabilities, opened: OpenedEndpoint, *, knows_model: bool, can_fail: bool
) -> dict[str, tuple[bool, str]]:
    """Return whether each need is met, and the reason to report if it is not, by the name of the need."""
    host = urlsplit(opened.url or "").hostname
    is_near = host in (None, "localhost", "127.0.0.1", "::1")
    offers = {name: (bool(getattr(capabilities, name)), f"{it} not supported") for name, it in _SUPPORTED.items()}
    for name in ("model", "updates"):
        offers[name] = (knows_model, "the served checkpoint is not known; give it with --model")
    binding = capabilities.version_binding
    offers |= {
        "spans": (binding == "spans", f"version binding is {binding}"),
        "fresh": (opened.is_ours, "the kit cannot start another server of a URL; see --serve"),
        "url": (opened.url is not None, "not a server that speaks HTTP"),
        "process": (opened.process is not None, "not a server that the kit started; see --serve"),
        "failing": (
            can_fail,
            "it receives weights in another process or without UpdateReceiver: the kit cannot make an update fail",
        ),
    }
    for encoding in ENCODINGS:
        offers[encoding] = (encoding in capabilities.encodings, f"encoding {encoding} is not supported")
    for policy in InFlightPolicy:
        is_supported = policy in capabilities.in_flight_policies
        offers[policy.value] = (is_supported, f"in-flight policy {policy} is not supported")
    for store in STORES:
        offers[store] = (is_near, f"the endpoint at {host} may not see files that the kit stores on this host")
        if find_transport(store).needs_gpu and not torch.cuda.is_available():
            offers[store] = (False, f"{store} shares a GPU's memory, and torch sees no GPU in the kit's process")
        if store not in capabilities.transports:
            offers[store] = (False, f"transport {store} is not supported")
    return offers
