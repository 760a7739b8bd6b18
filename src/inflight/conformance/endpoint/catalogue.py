"""Checks of inference endpoints, level by level, in the order of the contract."""

from __future__ import annotations

from inflight.conformance.checks import checks_in
from inflight.conformance.endpoint import (
    caches,
    control,
    discovery,
    drafts,
    encodings,
    endings,
    faults,
    forms,
    http,
    images,
    loras,
    messages,
    mixed,
    mixtures,
    parity,
    partials,
    pauses,
    processes,
    races,
    recomputing,
    releasing,
    routing,
    sampling,
    scoring,
    sessions,
    sharded,
    sharing,
    staging,
    stop_strings,
    stores,
    tokens,
    versions,
    weights,
    whole,
)

_CHECKS = checks_in(
    *(discovery, tokens, sampling, drafts, images, routing, scoring, whole, endings, stop_strings, forms),
    *(
        pauses,
        control,
        staging,
        sessions,
        releasing,
        weights,
        mixtures,
        encodings,
        loras,
        sharded,
        stores,
        versions,
        caches,
        sharing,
        recomputing,
        mixed,
    ),
    *(partials, faults, messages, processes, races, http, parity),
)
_LEVELS = list(dict.fromkeys(check.level for check in _CHECKS))

CHECKS = tuple(sorted(_CHECKS, key=lambda check: (_LEVELS.index(check.level), check.id)))
