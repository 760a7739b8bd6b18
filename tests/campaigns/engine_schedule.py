"""What is done to one run with a server of a real engine, drawn from a seed and the name of the engine alone."""

from __future__ import annotations

import random

from tests.campaigns.schedule import (
    ENGINE_PARTS,
    SERVERS,
    Deadlines,
    EngineUse,
    Schedule,
    Strike,
    draw_overrides,
    draw_strike,
)

_STOP_ENGINE_S = 30.0
"""What `inflight.run.machines.processes` grants a server that has to end its engine."""
TINY_DEADLINES = Deadlines(
    generate_s=12.0,
    publish_s=15.0,
    reward_s=75.0,
    step_s=150.0,
    start_s=300.0,
    gone_s=2 * _STOP_ENGINE_S + 5.0,
    back_s=60.0,
    outage_s=300.0,
)
LARGE_DEADLINES = Deadlines(
    generate_s=60.0,
    publish_s=60.0,
    reward_s=75.0,
    step_s=240.0,
    start_s=420.0,
    gone_s=2 * _STOP_ENGINE_S + 5.0,
    back_s=120.0,
    outage_s=420.0,
)
_ATTACHED_SHARE = 0.8
_ENGINE_SHARE = 0.5
"""Share of strikes that hit the engine."""
_LEASE_S = 90


def draw_with_engine(
    seed: int, engine: str, *, model: str = "tiny", is_large: bool = False, plain_share: float = 0.0
) -> Schedule:
    """Return the schedule of a seed for a run with one embedded server and one of ``engine``."""
    rng = random.Random(f"campaign {engine} {'large' if is_large else 'tiny'} {seed}")
    deadlines = LARGE_DEADLINES if is_large else TINY_DEADLINES
    steps = rng.randint(3, 5) if is_large else rng.randint(6, 10)
    is_attached = rng.random() < _ATTACHED_SHARE
    transport, overrides = draw_overrides(rng, 2 if is_large else None)
    if not is_attached and rng.random() < 0.5:
        overrides["servers.lease_s"] = str(_LEASE_S)
    long_every = 0 if is_large else rng.choice((0, 0, 0, 7, 13))
    strikes = []
    for _ in range(rng.choices((1, 2, 3), (5, 4, 1))[0]):
        if rng.random() < _ENGINE_SHARE:
            strikes.append(_engine_strike(rng, steps - 2, is_attached, deadlines))
        else:
            strikes.append(_other_strike(rng, steps - 2, transport, is_large, deadlines))
    strikes.sort(key=lambda strike: strike.step)
    return Schedule(
        seed,
        steps,
        overrides,
        tuple(strikes),
        long_every,
        resumes_at_once=rng.random() < 0.3,
        is_plain=rng.random() < plain_share,
        engine=EngineUse(engine, is_attached, model, deadlines, is_large),
    )


def _engine_strike(rng: random.Random, last: int, is_attached: bool, deadlines: Deadlines) -> Strike:
    """Return a strike on the engine. One that the campaign owns is never stopped for good: an operator would see it."""
    step = -1 if rng.random() < 0.1 else rng.randint(0, last)
    delay_s = rng.uniform(0.0, 1.5) if step < 0 else rng.uniform(0.0, 0.4)
    target = rng.choice(ENGINE_PARTS[:2] if is_attached else ENGINE_PARTS)
    kinds = {"SIGKILL": 4, "SIGSTOP": 5, "connections cut": 3} | ({} if is_attached else {"SIGTERM": 1})
    kind = rng.choices([*kinds], [*kinds.values()])[0]
    if kind != "SIGSTOP":
        return Strike(kind, target, step, delay_s)
    choices = (rng.uniform(0.3, 1.5), _past(rng, deadlines), None)
    lasts_s = rng.choices(choices, (5, 4, 0 if is_attached else 1))[0]
    return Strike(kind, target, step, delay_s, lasts_s)


def _other_strike(rng: random.Random, last: int, transport: str, is_large: bool, deadlines: Deadlines) -> Strike:
    """Return a strike on anything but the engine."""
    while True:
        long_s = (deadlines.publish_s + 2.0, deadlines.publish_s + 5.0)
        strike = draw_strike(rng, last, transport, servers=SERVERS[:1], long_s=long_s)
        if is_large and strike.kind.startswith("full"):  # a small disk holds no checkpoint of a real model
            continue
        return strike


def _past(rng: random.Random, deadlines: Deadlines) -> float:
    return rng.uniform(deadlines.publish_s + 2.0, deadlines.publish_s + 5.0)
