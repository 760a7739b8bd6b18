"""What a mutant is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.contracts import InferenceEndpoint
from inflight.engines.embedded.endpoint import EmbeddedEndpoint


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: how an endpoint gets it, and the check that must tell."""

    name: str
    caught_by: str
    fault: str
    """What is wrong with it, as the table in docs/conformance.md says it."""
    infect: Callable[[EmbeddedEndpoint], InferenceEndpoint]
    """Puts the fault into a healthy endpoint and returns it, or a faulty endpoint around it."""
    over_ipc: bool = False
    """Whether the endpoint supports ``ipc``, which shares the host's memory then."""
    over_http: bool = False
    """Whether it shows only in a server that runs in a process of its own."""
