"""Faulty variants of the embedded endpoint, each of which one check of the kit must catch.

The kit makes them by ``tests.conformance.mutants:make`` with the option ``mutant``, a key of `MUTANTS`; those that
need a server in a separate process by ``python -m tests.conformance.mutants.server``.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from inflight.conformance.targets import EndpointTarget
from inflight.contracts import InferenceEndpoint
from inflight.engines.embedded.loading import load_endpoint
from tests.conformance.mutants import (
    arrivals,
    bases,
    caches,
    clients,
    combined,
    control,
    discovery,
    drafts,
    edges,
    faults,
    http,
    images,
    kinds,
    moments,
    parity,
    partials,
    releasing,
    requests,
    routing,
    sampling,
    scoring,
    sessions,
    sharded,
    tokens,
    versions,
    weights,
)
from tests.conformance.mutants.mutant import Mutant
from tests.weights.stored import share_host_memory

LEVELS = (
    *(
        discovery,
        tokens,
        sampling,
        edges,
        requests,
        drafts,
        images,
        routing,
        scoring,
        control,
        sessions,
        releasing,
        moments,
    ),
    *(weights, arrivals, bases, sharded, versions, caches, kinds, partials, clients, combined, faults, http, parity),
)
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for level in LEVELS for mutant in level.MUTANTS}


def make(model: Path, mutant: str) -> InferenceEndpoint:
    """Return the embedded endpoint with one fault."""
    found = MUTANTS[mutant]
    if found.over_ipc:
        share_host_memory()
    return found.infect(load_endpoint(model, name="tiny", drafts="both"))


def make_over_ipc(model: Path) -> InferenceEndpoint:
    """Return the embedded endpoint without a fault; ``ipc`` shares the host's memory."""
    share_host_memory()
    return load_endpoint(model, name="tiny")


def target_of(mutant: Mutant) -> EndpointTarget:
    """Return the target through which the kit reaches a mutant."""
    if mutant.over_http:
        words = [sys.executable, "-m", "tests.conformance.mutants.server", mutant.name]
        return EndpointTarget(command=f"{shlex.join(words)} {{model}} {{port}} {{token_file}}")
    return EndpointTarget(factory="tests.conformance.mutants:make", options={"mutant": mutant.name})
