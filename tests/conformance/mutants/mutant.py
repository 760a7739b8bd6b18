"""The definition of a mutant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.contracts import InferenceEndpoint
from inflight.engines.embedded.endpoint import EmbeddedEndpoint


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: how it is put into an endpoint, and the check that must detect it."""

    name: str
    caught_by: str
    fault: str
    """Description of the fault, as it appears in the table of docs/evidence-conformance.md."""
    infect: Callable[[EmbeddedEndpoint], InferenceEndpoint]
    """Puts the fault into a healthy endpoint and returns it, or returns a faulty endpoint that wraps it."""
    over_ipc: bool = False
    """Whether the endpoint supports ``ipc``, which then shares the host's memory."""
    over_http: bool = False
    """Whether the fault shows only in a server that runs in its own process."""
