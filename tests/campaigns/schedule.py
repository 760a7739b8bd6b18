"""What is done to one run, drawn from a seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

CONTROLLER = "controller"
SERVERS = ("server-0", "server-1")
RANKS = ("trainer-0", "trainer-1")

# Deadlines of a disturbed run, in seconds.
GENERATE_TIMEOUT_S = 4.0
PUBLISH_DEADLINE_S = 6.0
REWARD_TIMEOUT_S = 5.0
STEP_TIMEOUT_S = 25.0
START_TIMEOUT_S = 60.0
STOP_S = 10.0
"""What `inflight.run.machines.processes` grants a child to end."""


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
        return "SIGSTOP past a deadline" if self.lasts_s > GENERATE_TIMEOUT_S else "SIGSTOP, then SIGCONT"

    @property
    def struck(self) -> str:
        """What kind of thing is struck."""
        return self.target.rstrip("01-").replace("trainer", "rank")

    @property
    def is_of_process(self) -> bool:
        """Whether a process is struck."""
        return self.target in (CONTROLLER, *SERVERS, *RANKS)

    @property
    def is_survivable(self) -> bool:
        """Whether a run has to continue, if nothing else strikes but what is survivable, and one server stays."""
        if self.kind == "SIGSTOP" and self.target in RANKS:
            return self.lasts_s is not None and self.lasts_s < PUBLISH_DEADLINE_S
        if self.kind == "SIGSTOP" and self.target == CONTROLLER:
            return self.lasts_s is not None
        return self.target in SERVERS or self.kind == "slow rewards"

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

    @property
    def needs_disk(self) -> bool:
        """Whether it needs file systems of its own, which can be filled."""
        return any(strike.kind.startswith("full") for strike in self.strikes)


def draw(seed: int, *, plain_share: float = 0.0, num_steps: int | None = None) -> Schedule:
    """Return the schedule of a seed; ``num_steps`` makes a long run of it, whose strikes end half-way."""
    rng = random.Random(f"campaign {seed}")
    is_long = num_steps is not None
    steps = num_steps if num_steps is not None else rng.randint(6, 12)
    transport = rng.choices(("gloo", "shm", "file", "http"), (5, 2, 2, 1))[0]
    overrides = {
        "updates.transport": transport,
        "updates.in_flight": rng.choice(("keep", "recompute", "abort")),
        "run.checkpoint_every_steps": str(10 if is_long else rng.randint(2, 4)),
        "run.background_saves": rng.choice(("true", "false")),
        "updates.staged": rng.choice(("true", "true", "false")),
    }
    if rng.random() < 0.2:
        overrides["run.mode"] = "conventional"
    long_every = rng.choice((0, 0, 0, 7, 13))
    last = steps // 2 if is_long else steps - 2
    strikes = [_strike(rng, last, transport) for _ in range(rng.choices((1, 2, 3), (4, 4, 2))[0])]
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


def _strike(rng: random.Random, last: int, transport: str) -> Strike:
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
        return Strike(kind, rng.choice((*SERVERS, *SERVERS, *RANKS)), step, delay_s)
    target = rng.choice((CONTROLLER, *SERVERS, *RANKS))
    if kind != "SIGSTOP":
        return Strike(kind, target, step, delay_s)
    lasts_s = rng.choices((rng.uniform(0.2, 1.5), rng.uniform(7.0, 9.0), None), (5, 2, 2))[0]
    return Strike(kind, target, step, delay_s, lasts_s)
