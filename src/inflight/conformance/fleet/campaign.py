"""A campaign: many schedules, and statistics of their results."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from inflight.conformance.fleet.plan import TRANSPORTS, Kind, Transport, sites


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """The result of one schedule. ``problems`` is empty if every requirement held."""

    seed: int
    transport: Transport
    plan: str
    settings: str = ""
    problems: tuple[str, ...] = ()
    injected: tuple[tuple[str, str], ...] = ()
    """The injected faults, as pairs of a step and the kind of fault that was injected there."""
    outcomes: tuple[str, ...] = ()
    """For each publish, ``returned`` or the name of the exception, followed by the outcome of each endpoint."""
    slowest_publish_s: float = 0.0
    wall_s: float = 0.0
    num_tokens: int = 0


def summary(
    results: Sequence[ScheduleResult], kinds: Collection[Kind], wall_s: float, num_senders: int = 1
) -> dict[str, Any]:
    """Return the statistics of a campaign as JSON-compatible values.

    ``kinds`` and ``num_senders`` have the same meaning as for `sites`.
    """
    injected = Counter((one.transport, *where) for one in results for where in one.injected)
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for one in results:
        outcomes[one.transport].update(outcome.split(":")[0] for outcome in one.outcomes)
    schedules = Counter(one.transport for one in results)
    known = [(t, site) for t in TRANSPORTS if t in schedules for site in sites(t, kinds, num_senders)]
    every = [(t, step.value, kind.value) for t, (step, kind) in known]
    slowest = sorted(results, key=lambda one: -one.wall_s)[:5]
    return {
        "num_schedules": len(results),
        "num_senders": num_senders,
        "num_faults": sum(injected.values()),
        "num_publishes": sum(len(one.outcomes) for one in results),
        "num_tokens": sum(one.num_tokens for one in results),
        "schedules": dict(schedules),
        "injected": {" ".join(key): num for key, num in sorted(injected.items())},
        "never_injected": [" ".join(site) for site in every if site not in injected],
        "outcomes": {transport: dict(counts) for transport, counts in sorted(outcomes.items())},
        "failed": [_part(one, "seed", "transport", "plan", "settings", "problems") for one in results if one.problems],
        "slowest": [_part(one, "seed", "transport", "plan", "wall_s") for one in slowest],
        "slowest_publish_s": max((one.slowest_publish_s for one in results), default=0.0),
        "wall_s": round(wall_s, 1),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {package: version(package) for package in ("inflight", "torch", "transformers")},
    }


def text_of(figures: dict[str, Any], again: str) -> str:
    """Return a readable summary: the failed schedules, and the counts.

    ``again`` is the command that runs a campaign; the summary appends the options that repeat a failed schedule.
    """
    lines = []
    for row in figures["failed"]:
        lines += [f"FAILED {row['plan']}", f"  {row['settings']}"]
        lines += [f"  - {problem}" for problem in row["problems"][:5]]
        lines += [f"  again: {again} --schedules 1 --seed {row['seed']}"]
    lines.append(
        f"{figures['num_schedules']} schedules, {figures['num_faults']} faults, {figures['num_publishes']} publishes, "
        f"{figures['num_tokens']} tokens in {figures['wall_s']} s: {len(figures['failed'])} failed; "
        f"{len(figures['never_injected'])} sites had no fault"
    )
    return "\n".join(lines)


def _part(result: ScheduleResult, *names: str) -> dict[str, Any]:
    return {name: getattr(result, name) for name in names}
