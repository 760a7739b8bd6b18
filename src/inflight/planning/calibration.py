"""Measures costs for simulated runs from the events of real runs.

Events record when a request began and ended, and the length of each completion. Completions are assumed to grow at a
constant rate in between.
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.planning.costs import Contention, PublishCost, TokenTime, TrainerCost
from inflight.planning.fitting import fit
from inflight.planning.groups import Prompted
from inflight.planning.loads import Loads, stretches_of
from inflight.planning.token_times import token_times
from inflight.planning.traces import Trace

_RARE = 0.03
"""A number of working processes that was observed for less than this share of the time is merged with the nearest
number that was observed for longer."""
_ONE_LOAD = 0.3
"""Loads whose spread is lower count as a single load. The spread is 0.1 to 0.3 for runs of one mode, and 0.35 or more
for runs of two modes."""
_WINDOW = 64
"""Number of measured groups from which an item is drawn: the groups that were sampled at the nearest versions."""


@dataclass(frozen=True, slots=True)
class MeasuredGroups:
    """Recorded groups from which simulated items are drawn, each with all of its completions and rewards."""

    groups: Sequence[tuple[int, tuple[int, ...], tuple[float, ...]]]
    """Each group's version, the lengths of its completions and their rewards, sorted by version."""
    num_prompt_tokens: int
    seed: int = 0

    def __call__(self, item: int, version: int) -> Prompted:
        middle = bisect.bisect_left(self.groups, (version,))
        first = max(0, min(middle - _WINDOW // 2, len(self.groups) - _WINDOW))
        near = min(_WINDOW, len(self.groups))
        _, lengths, rewards = self.groups[first + random.Random(f"{self.seed}:{item}").randrange(near)]
        return Prompted(lengths, str(item), self.num_prompt_tokens, rewards)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a simulated run, in seconds."""

    token_time: TokenTime
    request_time: float
    contention: Contention
    trainer: TrainerCost
    publish: PublishCost
    score_time: float
    prompted: Callable[[int], Callable[[int, int], Prompted]] | None = None
    """Returns `Setup.prompted` for a group size."""
    context_time: float = 0.0
    prompt_token_time: float = 0.0
    admission_time: float = 0.0
    admission_time_each: float = 0.0
    tokens_per_forward: float = 1.0
    mean_time_to_failure: float = math.inf
    restart_time: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)
    """Figures that show how well the fits agree with the measurements."""

    @property
    def is_of_one_load(self) -> bool:
        """Whether all endpoints were measured at about the same load, so that token times at other loads are
        extrapolated."""
        return self.notes.get("load_spread", 1.0) < _ONE_LOAD

    def as_json(self) -> dict[str, Any]:
        """Return the costs, without the measured groups, as JSON values."""
        return {
            "token_time": self.token_time.points,
            "context_time": self.context_time,
            "admission_time": [self.admission_time, self.admission_time_each],
            "request_time": self.request_time,
            "slower_by_working": {str(num): factor for num, factor in self.contention.shared.items()},
            "slower_publish_by_busy": {str(num): factor for num, factor in self.contention.publish.items()},
            "trainer": [self.trainer.per_step, self.trainer.per_token],
            "publish": [self.publish.total, self.publish.pause, self.publish.turnaround],
            "score_time": self.score_time,
            "notes": self.notes,
        }


def calibrate(directories: Sequence[Path], num_skipped: int = 3) -> Costs:
    """Return the costs of runs on one machine, measured after the first ``num_skipped`` steps of each.

    Raises `ConfigError` if a directory does not contain a run.
    """
    traces = [Trace.read(directory) for directory in directories]
    groups, num_prompt_tokens = _groups_of(traces)
    loads = [Loads.of(trace, num_prompt_tokens) for trace in traces]
    begins = [trace.steps[min(num_skipped, len(trace.steps) - 2)]["time_s"] for trace in traces]
    stretches = [
        stretch
        for trace, load, begin in zip(traces, loads, begins, strict=True)
        for stretch in stretches_of(trace, load, begin)
    ]
    cost, shared, step_error = _step_times(traces, loads, begins)
    publish, of_publish = _publish_cost(traces, loads, begins)
    contention = Contention(shared, of_publish)
    tokens = token_times(stretches, contention)
    return Costs(
        TokenTime(((1.0, tokens.token_time),)),
        tokens.request_time,
        contention,
        cost,
        publish,
        _score_time(traces),
        lambda _: MeasuredGroups(groups, num_prompt_tokens),
        context_time=tokens.context_time,
        admission_time=tokens.admission_time,
        admission_time_each=tokens.admission_time_each,
        notes={
            "stretches": len(stretches),
            "stretch_error": tokens.error,
            "step_error": step_error,
            "load_spread": tokens.spread,
        },
    )


def _step_times(
    traces: Sequence[Trace], loads: Sequence[Loads], begins: Sequence[float]
) -> tuple[TrainerCost, dict[int, float], float]:
    """Return the cost of an undisturbed step, the slowdown by the number of working processes, and the relative
    error."""
    rows: list[tuple[int, float, dict[int, float]]] = []
    for trace, load, begin in zip(traces, loads, begins, strict=True):
        tokens = {step["version"]: step["num_step_tokens"] for step in trace.steps}
        for train in trace.trained:
            if train["start_s"] >= begin and train["version"] in tokens:
                spent: dict[int, float] = {}
                for since, until, (num, _) in load.between(train["start_s"], train["end_s"]):
                    spent[1 + num] = spent.get(1 + num, 0.0) + until - since
                rows.append((tokens[train["version"]], train["end_s"] - train["start_s"], spent))
    _merge_rare([spent for _, _, spent in rows])
    fewest, *more = sorted({num for _, _, spent in rows for num in spent})
    # Time that was spent with more working processes counts as 1 over its factor.
    found = fit(
        [[1.0, float(tokens), *(-spent.get(num, 0.0) for num in more)] for tokens, _, spent in rows],
        [spent.get(fewest, 0.0) for _, _, spent in rows],
        [seconds for _, seconds, _ in rows],
    )
    cost = TrainerCost(*found[:2])
    factors = factors_of([fewest, *more], [1.0, *found[2:]])
    errors = [
        abs(cost(tokens) - sum(s / factors[n] for n, s in spent.items())) / seconds for tokens, seconds, spent in rows
    ]
    return cost, factors, statistics.fmean(errors)


def _merge_rare(spent: Sequence[dict[int, float]]) -> None:
    """Add the time that was spent with a rare number of working processes to the time of the nearest number that is
    not rare."""
    total: Counter[int] = Counter()
    for it in spent:
        total.update(it)
    common = [num for num, seconds in total.items() if seconds >= _RARE * total.total()]
    for it in spent:
        for num in [num for num in it if num not in common]:
            nearest = min(common, key=lambda other: abs(other - num))
            it[nearest] = it.get(nearest, 0.0) + it.pop(num)


def factors_of(numbers: Sequence[int], speeds: Sequence[float]) -> dict[int, float]:
    """Return the slowdown of a process by the number of working processes. It never decreases as that number grows.

    From one number to a larger one, processes that share cores evenly slow down at most by the ratio of the numbers.
    """
    factors: dict[int, float] = {}
    for num, speed in zip(numbers, speeds, strict=True):
        factors[num] = max([min(1.0 / max(speed, 1e-9), num / numbers[0]), 1.0, *factors.values()])
    return factors


def _publish_cost(
    traces: Sequence[Trace], loads: Sequence[Loads], begins: Sequence[float]
) -> tuple[PublishCost, dict[int, float]]:
    """Return the cost of an undisturbed publish, and the slowdown by the number of busy endpoints."""
    totals: dict[int, list[float]] = {}
    pauses, turnarounds = [], []
    for trace, load, begin in zip(traces, loads, begins, strict=True):
        published = {it["version"]: it for it in trace.publishes if it["version"] > 0}
        trained = {it["version"]: it for it in trace.trained}
        ended = {group["item"]: group["end_s"] for group in trace.groups}
        for version, train in trained.items():
            if train["start_s"] < begin:
                continue
            if (publish := published.get(version)) is not None and publish["end_s"] > train["end_s"]:
                num_busy = round(load.num_busy(train["end_s"], publish["end_s"]))
                totals.setdefault(num_busy, []).append(publish["end_s"] - train["end_s"])
                pauses.append(max(publish["paused_s"].values(), default=publish["pause_s"]))
            ready = max((ended[item] for item in train["items"] if item in ended), default=train["start_s"])
            before = published.get(version - 1) or trained.get(version - 1)
            turnarounds.append(train["start_s"] - max(ready, before["end_s"] if before else 0.0))
    means = {num: statistics.fmean(totals[num]) for num in sorted(totals)}
    total = next(iter(means.values()), 0.0)
    factors = {num: max(1.0, mean / total) for num, mean in means.items()}
    return PublishCost(total, _median(pauses), _median(turnarounds)), factors


def _score_time(traces: Sequence[Trace]) -> float:
    waits = []
    for trace in traces:
        ended: dict[int, float] = {}
        for request in trace.requests:
            ended[request["item"]] = max(ended.get(request["item"], 0.0), request["end_s"])
        waits += [group["end_s"] - ended[group["item"]] for group in trace.groups if group["item"] in ended]
    return _median(waits)


def _median(values: Sequence[float]) -> float:
    return max(0.0, statistics.median(values)) if values else 0.0


def _groups_of(traces: Sequence[Trace]) -> tuple[list[tuple[int, tuple[int, ...], tuple[float, ...]]], int]:
    """Return the groups of runs sorted by version, and the mean number of prompt tokens."""
    groups, prompts = [], []
    for trace in traces:
        lengths = {}
        for group in trace.groups:
            lengths[group["item"]] = sum(group["lengths"])
            if group["oldest"] is not None:
                groups.append((group["oldest"], tuple(group["lengths"]), tuple(group["rewards"])))
        items = {train["version"]: train["items"] for train in trace.trained}
        for step in trace.steps:
            num = sum(lengths.get(item, 0) for item in items.get(step["version"], ())) - step["num_stale_tokens"]
            if step["num_step_sequences"]:
                prompts.append((step["num_step_tokens"] - num) / step["num_step_sequences"])
    return sorted(groups), max(0, round(_median(prompts)))
