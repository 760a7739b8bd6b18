"""The shape of the differences between trainer and behaviour logprobs, and the causes that it suggests.

All functions are pure. Parts of a run are compared by their levels (see `inflight.doctor.levels`); parts with fewer
than `MIN_TOKENS` tokens are not judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from inflight.doctor.levels import (
    CERTAIN,
    FAULT,
    MIN_TOKENS,
    WARNING,
    Bin,
    Figures,
    Limits,
    figures_of,
    informative,
    level_of,
    levels_apart,
    levels_by_version,
    merge_versions,
    pool_bins,
    rank_correlation,
)
from inflight.doctor.records import COLUMNS, Observations, RunSettings, StepRecords, TokenRecords
from inflight.wire import InFlightPolicy

_MAX_PERIOD = 8
_NEAR = 4
"""A wrong label affects at most this many tokens after a span boundary."""

_CONSTANT = (5, 6, 8, 9, 3)
"""Causes that can have an effect before any training. Loaders are included, because a run publishes its initial
weights."""
_ALL_FROM_ONE = 8
"""If at least this many completions all come from one endpoint, that is not a coincidence: 0.6 ** 8 is 2 %."""
_NO_LEARNING = 1e-12
"""Weights do not change at learning rates below this. A run requires a rate above 0."""
_MORE = "Lag 0 is rare while sampling and training overlap; with run.mode = 'conventional', every token has lag 0."
_LONGER = "Record more steps: increase run.num_steps."
"""The advice for runs that already have ``run.mode = 'conventional'``."""

EXPERIMENTS = {
    "X0": "compute in float32 on both sides, with the same weights: numerical differences vanish, faults do not",
    "X1": "publish unchanged weights 1, 2 and 50 times: logprobs must not change",
    "X2": "publish A, B and A again: the third must equal the first",
    "X3": "publish a final norm of zero: each token must have logprob -ln V",
    "X5": "change all tensors, then halves of them, to find the tensor that is not updated",
    "X7": "sample a prompt before and after an update, and one with another first token after it",
    "X8": "sample 1 and 64 requests at once, and prompts of 100 and 10,000 tokens",
    "X9": "sample greedily, then request each token again as a first token after the same context",
    "X10": "sample at temperature 1 and 0.7, and with top-k, and compare with known logits",
    "X11": "sample from two endpoints with the same seeds, then restart one of them",
    "X12": "publish weights whose samples identify the version, under load, and compare with the spans",
    "X13": "update during a long completion under keep, recompute and drain: compare the tokens after it",
    "X14": "repeat 30 steps with train.learning_rate = 1e-30: a difference due to the distance to the start vanishes",
    "X16": "abort a publish half-way, publish again, and compare with an undisturbed publish",
}
"""Experiments on a live pair that separate causes."""

Severity = Literal["fault", "warning", "note"]
Verdict = Literal["no drift", "warning", "drift", "too little data"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A shape of the differences."""

    shape: str
    severity: Severity
    evidence: str
    suspects: tuple[int, ...]
    """Numbers of causes, most likely first."""
    experiments: tuple[str, ...]
    """What to do next."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict on a run."""

    verdict: Verdict
    parts: Mapping[str, Figures]
    """The figures of parts of the run, by name; the first part contains all tokens. Empty if only per-step metrics
    exist."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """Notes on what was omitted or cannot be judged from these records."""


# ---------------------------------------------------------------------------------------------------------------
# The diagnosis


def diagnose(records: TokenRecords | StepRecords) -> Diagnosis:
    """Return the verdict on a run; the order of tokens within a step has no effect."""
    return _diagnose_steps(records) if isinstance(records, StepRecords) else _diagnose_tokens(records)


def _diagnose_tokens(records: TokenRecords) -> Diagnosis:
    seen, settings = records.observations, records.settings
    seen = seen.select(np.lexsort([getattr(seen, name) for name in COLUMNS]))  # the order in which sums are made
    limits, notes = Limits.of(settings.dtype), []
    more = _LONGER if settings.mode == "conventional" else _MORE
    if records.num_stale:
        notes.append(f"{records.num_stale:,} tokens at a lag above 0 are omitted.")
    parts, findings = _parts_of(seen), [*_unusable(records)]
    if (tail := _tail(seen.select(seen.since_boundary_N < 0), limits)) is not None:
        findings.append(tail)
        seen = seen.select(np.abs(seen.difference_N) < limits.huge)
    boundary = _after_boundaries(seen, settings, limits, notes)
    if boundary is not None:
        findings.append(boundary)
    if boundary is not None or settings.in_flight in (InFlightPolicy.KEEP, None):
        # Under ``keep``, older weights computed the keys and values before a boundary, so a difference is expected.
        seen = seen.select(seen.since_boundary_N < 0)
    if len(seen) < MIN_TOKENS:
        notes.append(
            f"{len(seen)} tokens at lag 0 without a preceding span boundary are too few: {MIN_TOKENS} are needed. "
            + more
        )
        return Diagnosis("too little data", parts, tuple(findings), tuple(notes))
    if (apart := _by_endpoint(seen, limits)) is not None:
        finding, culprits = apart
        findings.append(finding)
        seen = seen.select(~np.isin(seen.endpoint_N, culprits))
    if len(seen) >= MIN_TOKENS:
        compared = informative(seen)
        versions = levels_by_version(compared)
        differs = limits.exceeded_by(figures_of(seen.difference_N))
        if differs:
            shapes = (_by_temperature(seen, limits), _sign(seen, limits), _by_position(seen, limits))
            findings += [it for it in shapes if it is not None]
        findings += _over_time(versions, settings, limits, differs=differs)
        if (num_before := versions[0].num_tokens if versions[0].first == 0 else 0) < MIN_TOKENS:
            which = f" with a logprob below {CERTAIN}" if len(compared) < len(seen) else ""
            notes.append(
                f"{num_before} tokens{which} before the first update are too few to judge that period: {MIN_TOKENS} "
                "are needed."
            )
    num_later = int((seen.version_N > 0).sum())
    if _verdict_of(findings) == "no drift" and num_later < MIN_TOKENS:
        notes.append(f"Before the first update both sides agree, but {num_later} later tokens are too few. {more}")
        return Diagnosis("too little data", parts, tuple(findings), tuple(notes))
    return Diagnosis(_verdict_of(findings), parts, tuple(findings), tuple(notes))


def _diagnose_steps(records: StepRecords) -> Diagnosis:
    """Return a verdict if per-step metrics alone support one."""
    limits, total = Limits.of(records.settings.dtype), sum(step.num_tokens for step in records.steps)
    notes = [
        "The run has no record (run.record), so only the mean k3 of each step is known: endpoints, positions, span "
        "boundaries, signs and single tokens cannot be judged. A level is the square root of 2 k3."
    ]
    if records.num_mixed:
        notes.append(f"{records.num_mixed} steps that also trained on older tokens are omitted.")
    if total < MIN_TOKENS:
        notes.append(f"{total} tokens in steps without older tokens are too few: {MIN_TOKENS} are needed.")
        return Diagnosis("too little data", {}, (), tuple(notes))
    k3 = sum(step.k3 * step.num_tokens for step in records.steps) / total
    notes.append(f"Mean k3 of {total:,} tokens in {len(records.steps)} steps: {k3:.2g} (limit {limits.k3:g}).")
    levels = [Bin(it.version, it.version, it.num_tokens, float(np.sqrt(2 * max(it.k3, 0.0)))) for it in records.steps]
    findings = [*_over_time(levels, records.settings, limits, differs=not k3 <= limits.k3)]
    return Diagnosis(_verdict_of(findings), {}, tuple(findings), tuple(notes))


def _verdict_of(findings: Sequence[Finding]) -> Verdict:
    severities = {finding.severity for finding in findings}
    return "drift" if "fault" in severities else "warning" if "warning" in severities else "no drift"


def _parts_of(seen: Observations) -> dict[str, Figures]:
    has_boundary, is_first = seen.since_boundary_N >= 0, seen.version_N == 0
    masks = {
        "all tokens at lag 0": np.full(len(seen), True),
        "before any update": is_first & ~has_boundary,
        "after updates": ~is_first & ~has_boundary,
        "after a span boundary": has_boundary,
    }
    if len(seen.endpoints) > 1:
        masks |= {f"from {name}": seen.endpoint_N == i for i, name in enumerate(seen.endpoints)}
    return {name: figures_of(seen.difference_N[mask]) for name, mask in masks.items() if mask.any()}


# ---------------------------------------------------------------------------------------------------------------
# Shapes of tokens


def _unusable(records: TokenRecords) -> Iterator[Finding]:
    if records.num_unusable:
        yield Finding(
            "tokens without logprobs",
            "fault",
            f"{records.num_unusable:,} trained tokens at lag 0 have no finite logprob on one side, or a filler such as "
            "-9999",
            (10, 5),
            ("X9", "X10"),
        )


def _after_boundaries(seen: Observations, settings: RunSettings, limits: Limits, notes: list[str]) -> Finding | None:
    after = seen.since_boundary_N >= 0
    if not after.any():
        return None
    if after.sum() < MIN_TOKENS:
        notes.append(f"{after.sum()} tokens after a span boundary are too few to be judged.")
        return None
    is_as_late = seen.position_N >= np.quantile(seen.position_N[after], 0.1)
    label_N = np.where(after, 1, np.where(is_as_late, 0, -1))
    levels = levels_apart(seen, label_N) or levels_apart(seen, label_N, same_versions=False)
    if levels is None or limits.times(levels[1], levels[0]) < WARNING:
        return None
    evidence = (
        f"after a span boundary the level is {levels[1]:.2g} nats; at the same positions without a boundary it is "
        f"{levels[0]:.2g}"
    )
    parts = [
        seen.difference_N[after & mask] for mask in (seen.since_boundary_N < _NEAR, seen.since_boundary_N >= _NEAR)
    ]
    is_near = False
    if min(map(len, parts)) >= MIN_TOKENS:
        near, far = map(level_of, parts)
        is_near = near >= WARNING * far
        evidence += f"; in the first {_NEAR} tokens after it {near:.2g}, later {far:.2g}"
    if settings.in_flight is InFlightPolicy.KEEP:
        evidence += ". Under the policy keep this is expected, because older weights computed the keys and values"
    return Finding(
        "only after span boundaries",
        "note"
        if settings.in_flight is InFlightPolicy.KEEP and not is_near
        else _severity(levels[1], levels[0], limits),
        evidence,
        (10, 1) if is_near else (1, 10),
        ("X13", "X12"),
    )


def _by_endpoint(seen: Observations, limits: Limits) -> tuple[Finding, list[int]] | None:
    """Return a finding about the endpoints that differ from the best one, and their indices, or None if none differ."""
    levels = levels_apart(seen, seen.endpoint_N)
    if levels is None:
        return None
    best = min(levels.values())
    culprits = [i for i, level in levels.items() if limits.times(level, best) >= WARNING]
    if not culprits:
        return None
    named = ", ".join(f"{seen.endpoints[i]} {levels[i]:.2g}" for i in culprits)
    first = int(seen.version_N[np.isin(seen.endpoint_N, culprits)].min())
    evidence = f"levels in nats: {named}; the other endpoints at most {_largest_but(levels, culprits):.2g}"
    since = [_level_at_zero(seen.select(seen.endpoint_N == i)) for i in culprits]
    if first == 0 and None not in since:
        evidence += f"; before any update {', '.join(f'{level:.2g}' for level in since)}"
    severity = _severity(max(levels.values()), best, limits)
    return Finding("one endpoint", severity, evidence, (2, 10), ("X11", "X2")), culprits


def _tail(seen: Observations, limits: Limits) -> Finding | None:
    if len(seen) < MIN_TOKENS:
        return None
    is_huge = np.abs(seen.difference_N) >= limits.huge
    rest, count = seen.difference_N[~is_huge], int(is_huge.sum())
    if not 0 < count <= 0.02 * len(seen) or not limits.exceeded_by(figures_of(seen.difference_N)):
        return None
    if limits.exceeded_by(figures_of(rest)):
        return None
    sequences = len(np.unique(seen.sequence_N[is_huge]))
    evidence = (
        f"{count} of {len(seen):,} tokens, in {sequences} completions, differ by {limits.huge:g} nats or more; without "
        f"them the mean is {np.abs(rest).mean():.2g}"
    )
    of_endpoints = np.unique(seen.endpoint_N[is_huge])
    if len(of_endpoints) == 1 and (seen.endpoint_N == of_endpoints[0]).mean() < 0.6 and sequences >= _ALL_FROM_ONE:
        evidence += f"; all of them are from {seen.endpoints[of_endpoints[0]]}"
    severity: Severity = "fault" if sequences >= 3 else "warning"
    return Finding("few tokens huge", severity, evidence, (7, 10, 5), ("X10", "X9", "X12"))


def _by_temperature(seen: Observations, limits: Limits) -> Finding | None:
    temperatures, label_N = np.unique(seen.temperature_N, return_inverse=True)
    levels = levels_apart(seen, label_N)
    if levels is None or limits.times(max(levels.values()), min(levels.values())) < WARNING:
        return None
    severity = _severity(max(levels.values()), min(levels.values()), limits)
    named = ", ".join(f"{temperatures[i]:g}: {level:.2g}" for i, level in levels.items())
    return Finding("depends on the temperature", severity, f"levels in nats, {named}", (5,), ("X10",))


def _sign(seen: Observations, limits: Limits) -> Finding | None:
    """Find differences that have one sign or are proportional to the logprob, as a different temperature or filter
    would cause."""
    seen = informative(seen)
    large_N = seen.difference_N[np.abs(seen.difference_N) > limits.floor]
    if len(large_N) < MIN_TOKENS:
        return None
    share, median = float((large_N > 0).mean()), float(np.median(large_N))
    if max(share, 1 - share) >= 0.95:
        evidence = f"{max(share, 1 - share):.0%} of the differences are {'positive' if median > 0 else 'negative'}"
        evidence += f", with a median of {median:.2g} nats"
        if median < 0:
            evidence += (
                f": a filter that keeps {np.exp(median):.0%} of the mass, on the engine's side only, is a possible "
                "cause"
            )
        return Finding("one sign", "fault", evidence, (5,), ("X10", "X3"))
    correlation = rank_correlation(seen.behaviour_N, seen.difference_N)
    spread = float(np.std(seen.difference_N) / max(float(np.std(seen.behaviour_N)), 1e-9))
    if abs(correlation) < 0.7 or spread > 0.8:  # two unrelated distributions have a larger spread
        return None
    factor = 1 + np.sign(correlation) * spread
    evidence = (
        f"the rank correlation of differences and behaviour logprobs is {correlation:.2f}; the differences vary as if "
        f"the trainer's logits were {factor:.3g} times as large as the engine's, as under another temperature "
        "or a final norm of another scale"
    )
    return Finding("proportional to the logprob", "fault", evidence, (5, 3), ("X10", "X1"))


def _by_position(seen: Observations, limits: Limits) -> Finding | None:
    seen = informative(seen)
    edges = np.quantile(seen.position_N, (0.25, 0.5, 0.75))
    quarter_N = np.searchsorted(edges, seen.position_N, side="left")
    scale = {it.first: it.level for it in levels_by_version(seen)}
    relative_N = seen.difference_N / np.array([max(scale[it], limits.floor) for it in seen.version_N.tolist()])
    quarters = [relative_N[quarter_N == i] for i in range(4)]
    if min(map(len, quarters)) < MIN_TOKENS:
        return None
    levels = [level_of(it) for it in quarters]
    if levels[3] < WARNING * levels[0] or sorted(levels) != levels:
        return None
    raw = [level_of(seen.difference_N[quarter_N == i]) for i in range(4)]
    evidence = (
        f"the levels in the quarters of the positions are {', '.join(f'{it:.2g}' for it in raw)} nats (positions up to "
        f"{', '.join(f'{edge:.0f}' for edge in edges)} and later)"
    )
    return Finding("grows along the completion", "fault", evidence, (8, 6, 1), ("X8", "X9", "X0"))


# ---------------------------------------------------------------------------------------------------------------
# Shapes over versions


def _over_time(versions: Sequence[Bin], settings: RunSettings, limits: Limits, *, differs: bool) -> Iterator[Finding]:
    """Yield at most one shape of the level over versions. ``differs`` indicates that the figures of all tokens exceed
    the limits."""
    bins = merge_versions(versions)
    has_before, base = bins[0].last == 0, bins[0].level
    differs = differs or any(it.level > limits.mean for it in bins)
    if (period := _period(versions, limits)) is not None:
        yield period
        return
    ratios = [limits.times(it.level, base) for it in bins]
    peak, levels = max(ratios), [it.level for it in bins]
    shown = f"{bins[0]} has a level of {base:.2g} nats, " + (
        f"{bins[1]} {bins[1].level:.2g}, {bins[-1]} {bins[-1].level:.2g}" if len(bins) > 1 else "and nothing is later"
    )
    if peak < WARNING:
        if differs and has_before and limits.times(base, min(levels)) < WARNING:
            yield Finding("present before any update", "fault", shown, _CONSTANT, ("X0", "X10", "X8", "X1"))
        elif differs:
            yield Finding("present", "fault", shown, (*_CONSTANT, 2, 4), ("X0", "X1", "X2"))
        return
    severity: Severity = "fault" if differs else _severity(max(levels), base, limits)
    rises = [after - before for before, after in itertools.pairwise(levels)]
    at = int(np.argmax(rises)) + 1
    if (
        len(bins) > 3
        and rises[at - 1] <= 0.6 * (max(levels) - min(levels))
        and rank_correlation(np.arange(len(levels)), np.array(levels)) >= 0.7
    ):
        if settings.learning_rates and max(settings.learning_rates.values()) < _NO_LEARNING:
            yield Finding("grows with updates without learning", severity, shown, (1, 3), ("X1", "X7", "X16"))
        else:
            yield Finding("grows with training steps", severity, shown, (2, 4, 3, 1), ("X14", "X2", "X5", "X1"))
    elif min(levels[at:]) > max(levels[:at]) and max(levels[at:]) < WARNING * min(levels[at:]):
        shown += "" if len(bins) > 3 else "; more steps are needed to see whether it stays or grows"
        shape = "jumps at the first update and stays" if has_before and at == 1 else f"jumps at {bins[at]} and stays"
        yield Finding(shape, severity, shown, (2, 3, 4, 9), ("X1", "X2", "X5", "X16"))
    else:
        shown += f"; the largest is {max(levels):.2g}"
        yield Finding("varies from version to version", severity, shown, (2, 8, 10), ("X2", "X11", "X12"))


def _period(versions: Sequence[Bin], limits: Limits) -> Finding | None:
    """Find the smallest period with which the level repeats, after the first update."""
    after = [it for it in versions if it.first > 0]
    logs = np.log([max(it.level, limits.floor / FAULT) for it in after])
    for period in range(2, min(_MAX_PERIOD, len(after) // 3) + 1):
        phase = np.array([it.first % period for it in after])
        of_phases = [[it for it, at in zip(after, phase, strict=True) if at == i] for i in range(period)]
        if any(len(it) < 3 or sum(one.num_tokens for one in it) < MIN_TOKENS for it in of_phases):
            continue
        levels = [pool_bins(it).level for it in of_phases]
        between = np.array([logs[phase == i].mean() for i in range(period)])[phase]
        explained = ((between - logs.mean()) ** 2).sum() / max(((logs - logs.mean()) ** 2).sum(), 1e-12)
        if limits.times(max(levels), min(levels)) >= WARNING and explained >= 0.8:
            severity = _severity(max(levels), min(levels), limits)
            evidence = f"the levels at versions modulo {period} = 0, 1, ... are "
            evidence += ", ".join(f"{level:.2g}" for level in levels) + " nats"
            return Finding(f"saw-tooth of period {period}", severity, evidence, (2,), ("X2", "X11", "X1"))
    return None


# ---------------------------------------------------------------------------------------------------------------
# Parts of findings


def _level_at_zero(seen: Observations) -> float | None:
    part = seen.difference_N[seen.version_N == 0]
    return level_of(part) if len(part) >= MIN_TOKENS else None


def _largest_but(levels: Mapping[int, float], culprits: Sequence[int]) -> float:
    return max(level for i, level in levels.items() if i not in culprits)


def _severity(level: float, baseline: float, limits: Limits) -> Severity:
    return "fault" if level > limits.mean or limits.times(level, baseline) >= FAULT else "warning"
