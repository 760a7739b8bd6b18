"""Checks of inference endpoints, level by level, in the order of the contract."""

from __future__ import annotations

from inflight.conformance.checks import Check
from inflight.conformance.endpoint import (
    arrivals,
    caches,
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
    processes,
    races,
    sampling,
    sessions,
    staging,
    tokens,
    versions,
    weights,
)

_MODULES = (
    *(discovery, tokens, sampling, endings, forms),
    *(holds, control, staging, sessions, weights, encodings, arrivals, versions, caches),
    *(faults, messages, processes, races, http, parity),
)
_LEVELS = list(dict.fromkeys(check.level for module in _MODULES for check in module.CHECKS))

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (check for module in _MODULES for check in module.CHECKS),
        key=lambda check: (_LEVELS.index(check.level), check.id),
    )
)
