"""Checks of inference endpoints, level by level, in the order of the contract."""

from __future__ import annotations

from inflight.conformance.checks import Check
from inflight.conformance.endpoint import (
    arrivals,
    caches,
    clients,
    control,
    discovery,
    encodings,
    endings,
    faults,
    forms,
    holds,
    http,
    messages,
    parity,
    places,
    poisoned,
    processes,
    races,
    recomputing,
    sampling,
    sessions,
    staging,
    tokens,
    versions,
    weights,
    whole,
)

_MODULES = (
    *(discovery, tokens, sampling, whole, endings, forms, places),
    *(holds, control, staging, sessions, weights, encodings, arrivals, versions, caches, clients, recomputing),
    *(faults, poisoned, messages, processes, races, http, parity),
)
_LEVELS = list(dict.fromkeys(check.level for module in _MODULES for check in module.CHECKS))

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (check for module in _MODULES for check in module.CHECKS),
        key=lambda check: (_LEVELS.index(check.level), check.id),
    )
)
