"""The checks of a trainer worker, in the order of the contract."""

from __future__ import annotations

from inflight.conformance.checks import checks_in
from inflight.conformance.worker import (
    adam,
    background,
    checkpoint,
    crashing,
    discovery,
    forward,
    gather,
    gradients,
    images,
    lora,
    memory,
    mixed,
    packing,
    routing,
    settings,
    sharding,
    steps,
)

CHECKS = checks_in(
    *(discovery, forward, packing, images, routing, gradients, steps, adam, settings),
    *(gather, memory, sharding, checkpoint, crashing, background, lora, mixed),
)
