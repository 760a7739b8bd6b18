"""What is done to one run, drawn from a seed alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

CONTROLLER = "controller"
SERVERS = ("server-0", "server-1")
RANKS = ("trainer-0", "trainer-1")
ENGINE, ENGINE_CORE, ENGINE_SERVER = "engine", "engine core", "engine server"
"""The process of an engine that serves HTTP, the one that samples (vLLM's EngineCore, SGLang's scheduler), and the
``inflight serve`` in front of both, if the run has started the engine.
"""
ENGINE_PARTS = (ENGINE, ENGINE_CORE, ENGINE_SERVER)

_STOP_S = 10.0
"""What `inflight.run.machines.processes` grants a child to end."""
_BESIDE_S = 20.0
"""Time for a busy machine, in addition to deadlines."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines of a disturbed run, in seconds."""

    generate_s: float = 4.0
    publish_s: float = 6.0
    reward_s: float = 5.0
    step_s: float = 25.0
    start_s: float = 60.0
    gone_s: float = 2 * _STOP_S + 5.0
    """How long processes of a killed run may take to notice."""
    back_s: float = math.inf
    """Within this time, an engine that is healthy again has to sample again, if the run lasts that long."""
    outage_s: float = 0.0
    """How long a run may have no server that answers, without being at fault."""

    @property
    def quiet_s(self) -> float:
        """Longest time without a step, an end, or a strike: the longest deadlines in a row."""
        return max(self.step_s, self.outage_s) + self.publish_s + 2 * _STOP_S + _BESIDE_S

    @property
    def start_quiet_s(self) -> float:
        """The same until the first step."""
        return self.start_s + self.publish_s + 2 * _STOP_S + _BESIDE_S


EMBEDDED_DEADLINES = Deadlines()


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How a run uses a server of a real engine, in addition to one embedded server."""

    name: str
    is_attached: bool
    """Whether the run attaches to the campaign's own server by its URL. Otherwise the run starts ``server-1``."""
    model: str
    deadlines: Deadlines
    is_large: bool
    """Whether the model is a real one, whose steps take seconds and whose checkpoints fill a small disk."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One disturbance: ``delay_s`` after version ``step`` was reached, or after the start if it is -1."""

    kind: str
    """A signal's name, or ``connections cut``, ``full disk``, ``full store``, ``slow rewards``, ``reward raises``,
    ``reward hangs``.
    """
    target: str
    """Name of a process, or what is struck instead."""
    step: int
    delay_s: float
    lasts_s: float | None = None
    """How long; None: for good."""

    @property
    def label(self) -> str:
        """What the table calls it: strikes of one label are of one kind."""
        if self.kind != "SIGSTOP":
            return self.kind
        if self.lasts_s is None:
            return "SIGSTOP for good"
        return "SIGSTOP past a deadline" if self.lasts_s > EMBEDDED_DEADLINES.generate_s else "SIGSTOP, then SIGCONT"

    @property
    def struck(self) -> str:
        """What kind of thing is struck."""
        return self.target.rstrip("01-").replace("trainer", "rank")

    @property
    def is_of_process(self) -> bool:
        """Whether a process is struck."""
        return self.target in (CONTROLLER, *SERVERS, *RANKS, *ENGINE_PARTS)

    @property
    def is_survivable(self) -> bool:
        """Whether a run has to continue, if nothing else strikes but what is survivable, and one server stays."""
        if self.kind == "SIGSTOP" and self.target in RANKS:
            return self.lasts_s is not None and self.lasts_s < EMBEDDED_DEADLINES.publish_s
        if self.kind == "SIGSTOP" and self.target == CONTROLLER:
            return self.lasts_s is not None
        return self.target in (*SERVERS, *ENGINE_PARTS) or self.kind == "slow rewards"

    @property
    def is_outage(self) -> bool:
        """Whether what is struck does not answer for longer than a request may take."""
        return self.kind in ("SIGKILL", "SIGTERM") or self.label in ("SIGSTOP for good", "SIGSTOP past a deadline")

    def __str__(self) -> str:
        lasts = "" if self.lasts_s is None else f" for {self.lasts_s:.1f} s"
        when = "the start" if self.step < 0 else f"step {self.step}"
        return f"{self.kind} {self.target}{lasts}, {self.delay_s:.2f} s after {when}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run, and everything that strikes it, in order."""

    seed: int
    num_steps: int
    overrides: dict[str, str]
    """Settings of the run that differ from one schedule to another."""
    strikes: tuple[Strike, ...]
    long_every: int
    """One prompt among so many is refused as overlong; 0: none."""
    resumes_at_once: bool
    """Whether it is resumed although processes of a killed run may still be ending."""
    is_plain: bool
    """Whether processes are started plainly, not forked from the zygote."""
    engine: EngineUse | None = None
    """The real engine that takes part; None: both servers are embedded."""

    @property
    def needs_disk(self) -> bool:
        """Whether it needs file systems of its own, which can be filled."""
        return any(strike.kind.startswith("full") for strike in self.strikes)

    @property
    def deadlines(self) -> Deadlines:
        return EMBEDDED_DEADLINES if self.engine is None else self.engine.deadlines

    @property
    def engine_targets(self) -> tuple[str, ...]:
        """What of the run belongs to the engine."""
        if self.engine is None:
            return ()
        return ENGINE_PARTS[:2] if self.engine.is_attached else ENGINE_PARTS

    @property
    def is_leased(self) -> bool:
        """Whether the servers of a killed run keep running until it is resumed."""
        return "servers.lease_s" in self.overrides


def draw(seed: int, *, plain_share: float = 0.0, num_steps: int | None = None) -> Schedule:
    """Return the schedule of a seed; ``num_steps`` makes a long run of it, whose strikes end half-way."""
    rng = random.Random(f"campaign {seed}")
    is_long = num_steps is not None
    steps = num_steps if num_steps is not None else rng.randint(6, 12)
    transport, overrides = draw_overrides(rng, 10 if is_long else None)
    long_every = rng.choice((0, 0, 0, 7, 13))
    last = steps // 2 if is_long else steps - 2
    strikes = [draw_strike(rng, last, transport) for _ in range(rng.choices((1, 2, 3), (4, 4, 2))[0])]
    strikes.sort(key=lambda strike: strike.step)
    return Schedule(
        seed,
        steps,
        overrides,
        tuple(strikes),
        long_every,
        resumes_at_once=rng.random() < 0.3,
        is_plain=random.Random(f"plain {seed}").random() < plain_share,
    )


def draw_overrides(rng: random.Random, checkpoint_every: int | None) -> tuple[str, dict[str, str]]:
    """Return the transport of a run, and the settings in which it differs from others."""
    transport = rng.choices(("gloo", "shm", "file", "http"), (5, 2, 2, 1))[0]
    overrides = {
        "updates.transport": transport,
        "updates.in_flight": rng.choice(("keep", "recompute", "abort")),
        "run.checkpoint_every_steps": str(checkpoint_every or rng.randint(2, 4)),
        "run.background_saves": rng.choice(("true", "false")),
        "updates.staged": rng.choice(("true", "true", "false")),
    }
    if rng.random() < 0.2:
        overrides["run.mode"] = "conventional"
    return transport, overrides


def draw_strike(
    rng: random.Random,
    last: int,
    transport: str,
    *,
    servers: tuple[str, ...] = SERVERS,
    long_s: tuple[float, float] = (7.0, 9.0),
) -> Strike:
    """Return a strike at most after step ``last``; ``long_s`` is how long a SIGSTOP lasts that is past a deadline."""
    step = -1 if rng.random() < 0.15 else rng.randint(0, last)
    delay_s = rng.uniform(0.0, 1.5) if step < 0 else rng.uniform(0.0, 0.4)
    kinds = ["SIGTERM", "SIGKILL", "SIGSTOP", "connections cut", "full disk", "slow rewards", "reward raises"]
    kinds += ["reward hangs"]
    weights = [4, 6, 6, 4, 3, 1, 1, 1]
    if transport == "file":
        kinds, weights = [*kinds, "full store"], [*weights, 4]
    kind = rng.choices(kinds, weights)[0]
    if kind.startswith("full"):
        return Strike(kind, kind.split()[1], step, delay_s, rng.choice((1.0, 3.0, None)))
    if kind == "slow rewards":
        return Strike(kind, "reward", step, delay_s, rng.uniform(1.0, 4.0))
    if kind.startswith("reward"):
        return Strike(kind, "reward", step, delay_s)
    if kind == "connections cut":
        return Strike(kind, rng.choice((*servers, *servers, *RANKS)), step, delay_s)
    target = rng.choice((CONTROLLER, *servers, *RANKS))
    if kind != "SIGSTOP":
        return Strike(kind, target, step, delay_s)
    lasts_s = rng.choices((rng.uniform(0.2, 1.5), rng.uniform(*long_s), None), (5, 2, 2))[0]
    return Strike(kind, target, step, delay_s, lasts_s)
