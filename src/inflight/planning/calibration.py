"""Costs of a run in simulated time, measured from the events of runs that were made.

Only what the events say is used. Of a request they say when it began and came back, and the length of each completion;
its completions are taken to advance evenly in between.
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.planning.costs import Contention, PublishCost, TokenTime, TrainerCost
from inflight.planning.fitting import fit
from inflight.planning.groups import Prompted
from inflight.planning.loads import Loads, State, Stretch, stretches_of
from inflight.planning.traces import Trace

_ROUNDS = 8
"""Of fitting the curve and the factors of sharing in turns; both have settled by then."""
_RARE = 0.03
"""A state in which less than this share of the time was spent is taken for its nearest neighbour."""
_WINDOW = 64
"""Measured groups that an item is drawn from: those sampled at versions nearest to its own."""


@dataclass(frozen=True, slots=True)
class MeasuredGroups:
    """Groups of runs, drawn for items again: completions of a group stay together, with their rewards."""

    groups: Sequence[tuple[int, tuple[int, ...], tuple[float, ...]]]
    """Version that sampled them, lengths and rewards; by version."""
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
    """What a simulated run costs, in seconds."""

    token_time: TokenTime
    request_time: float
    contention: Contention
    trainer: TrainerCost
    publish: PublishCost
    score_time: float
    prompted: Callable[[int], Callable[[int, int], Prompted]] | None = None
    """By the size of groups, what `Setup.prompted` is."""
    prompt_token_time: float = 0.0
    tokens_per_forward: float = 1.0
    mean_time_to_failure: float = math.inf
    restart_time: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)
    """How well the fits agree with what they were made from."""

    def as_json(self) -> dict[str, Any]:
        """Return the costs as JSON values, without the measured groups."""
        sharing = {f"{num}{' + trainer' if trains else ''}": f for (num, trains), f in self.contention.endpoint.items()}
        return {
            "token_time": self.token_time.points,
            "request_time": self.request_time,
            "contention_of_endpoints": sharing,
            "contention_of_trainer": {str(num): factor for num, factor in self.contention.trainer.items()},
            "trainer": [self.trainer.per_step, self.trainer.per_token],
            "publish": [self.publish.total, self.publish.pause, self.publish.turnaround],
            "score_time": self.score_time,
            "notes": self.notes,
        }


def calibrate(directories: Sequence[Path], num_skipped: int = 3) -> Costs:
    """Return the costs of runs on one machine, measured after their first ``num_skipped`` steps.

    Raises `ConfigError` if a directory does not hold a run.
    """
    traces = [Trace.read(directory) for directory in directories]
    loads = [Loads.of(trace) for trace in traces]
    begins = [trace.steps[min(num_skipped, len(trace.steps) - 2)]["time_s"] for trace in traces]
    stretches = [
        stretch
        for trace, load, begin in zip(traces, loads, begins, strict=True)
        for stretch in stretches_of(trace, load, begin)
    ]
    points, request_time, factors, error = _token_times(stretches)
    cost, of_trainer, step_error = _step_times(traces, loads, begins)
    notes = {"stretches": len(stretches), "stretch_error": error, "step_error": step_error}
    groups, num_prompt_tokens = _groups_of(traces)
    return Costs(
        points,
        request_time,
        Contention(factors, of_trainer),
        cost,
        _publish_cost(traces, begins),
        _score_time(traces),
        lambda _: MeasuredGroups(groups, num_prompt_tokens),
        notes=notes,
    )


# ---------------------------------------------------------------------------------------------------------------
# The fits


def _token_times(rows: Sequence[Stretch]) -> tuple[TokenTime, float, dict[State, float], float]:
    """Return the curve of token times, the time of a request besides, and the factors by what else works.

    A stretch takes n (a + c b) f, with n tokens of its longest completion, b running completions and the factor f of
    what works, and the last one of a request o more. The factors are in turn the ones that make n of the time that was
    spent in each state.
    """
    stand_ins = _stand_ins((state, seconds) for row in rows for seconds, _, state in row.parts)
    for row in rows:
        row.parts = [(seconds, num, stand_ins[state]) for seconds, num, state in row.parts]
    states = sorted({*stand_ins.values()})
    factors = dict.fromkeys(states, 1.0)
    largest = max(num for row in rows for _, num, _ in row.parts)
    intercept = slope = request_time = 0.0
    for _ in range(_ROUNDS):
        matrix, target = [], []
        for row in rows:
            # Tokens are made in each part in proportion to its time over its factor.
            work = [(seconds / factors[state], num) for seconds, num, state in row.parts]
            total = sum(seconds for seconds, _ in work)
            factor = row.seconds / total
            running = sum(seconds * num for seconds, num in work) / total
            matrix.append([float(row.is_last), row.num_tokens * factor, row.num_tokens * factor * running])
            target.append(row.seconds)
        request_time, intercept, slope = fit(matrix, target)
        matrix = []
        for row in rows:
            spent = max(1e-9, row.seconds - request_time * row.is_last) / row.seconds
            by_state = dict.fromkeys(states, 0.0)
            for seconds, num, state in row.parts:
                by_state[state] += spent * seconds / max(1e-12, intercept + slope * num)
            matrix.append([by_state[state] for state in states])
        rates = fit(matrix, [float(row.num_tokens) for row in rows])
        factors = _factors(states, rates)
    error = _token_error(rows, request_time, intercept, slope, factors)
    curve = TokenTime(((1.0, intercept + slope), (max(2.0, largest), intercept + slope * max(2.0, largest))))
    return curve, request_time, factors, error


def _stand_ins(spent: Iterable[tuple[State, float]]) -> dict[State, State]:
    """Return for each state itself, or for a rare one the nearest that is not."""
    total: dict[State, float] = {}
    for state, seconds in spent:
        total[state] = total.get(state, 0.0) + seconds
    common = [state for state, seconds in total.items() if seconds >= _RARE * sum(total.values())]
    return {
        state: min(common, key=lambda other: (other != state, abs(other[0] - state[0]) + 2 * (other[1] != state[1])))
        for state in total
    }


def _factors(states: Sequence[State], rates: Sequence[float]) -> dict[State, float]:
    """Return how much slower each state is than the one in which least works; never faster than one with less work.

    Processes that share cores fairly are at most as many times slower as there are of them. Without that bound, curve
    and factors could grow against each other where a run was hardly ever in the first state.
    """
    factors: dict[State, float] = {}
    reference = rates[0] or max(rates)
    for state, rate in zip(states, rates, strict=True):
        less = [factors[other] for other in factors if other[0] <= state[0] and other[1] <= state[1]]
        num_sharing = (state[0] + state[1]) / (states[0][0] + states[0][1])
        factors[state] = max([min(reference / rate if rate else 1.0, num_sharing), 1.0, *less])
    return factors


def _token_error(
    rows: Sequence[Stretch], request_time: float, intercept: float, slope: float, factors: dict[State, float]
) -> float:
    """Return the mean relative difference between requests and their fit."""
    errors = []
    for row in rows:
        work = [(seconds / factors[state], num) for seconds, num, state in row.parts]
        total = sum(seconds for seconds, _ in work)
        running = sum(seconds * num for seconds, num in work) / total
        found = request_time * row.is_last + row.num_tokens * (intercept + slope * running) * row.seconds / total
        errors.append(abs(found - row.seconds) / row.seconds)
    return statistics.fmean(errors)


def _step_times(
    traces: Sequence[Trace], loads: Sequence[Loads], begins: Sequence[float]
) -> tuple[TrainerCost, dict[int, float], float]:
    """Return the cost of a step where nothing else works, and the factors by endpoints that do."""
    rows: list[tuple[int, float, dict[int, float]]] = []
    for trace, load, begin in zip(traces, loads, begins, strict=True):
        tokens = {step["version"]: step["num_step_tokens"] for step in trace.steps}
        for train in trace.trained:
            if train["start_s"] >= begin and train["version"] in tokens:
                spent: dict[int, float] = {}
                for since, until, (num, _) in load.between(train["start_s"], train["end_s"]):
                    spent[num] = spent.get(num, 0.0) + until - since
                rows.append((tokens[train["version"]], train["end_s"] - train["start_s"], spent))
    stand_ins = _stand_ins(((num, False), seconds) for _, _, spent in rows for num, seconds in spent.items())
    for _, _, spent in rows:
        for num in [*spent]:
            stand_in = stand_ins[num, False][0]
            if stand_in != num:
                spent[stand_in] = spent.get(stand_in, 0.0) + spent.pop(num)
    states = sorted({num for num, _ in stand_ins.values()})
    factors = dict.fromkeys(states, 1.0)
    cost = TrainerCost()
    for _ in range(_ROUNDS):
        slowed = [seconds / sum(s / factors[n] for n, s in spent.items()) for _, seconds, spent in rows]
        matrix = [[factor, factor * num] for (num, _, _), factor in zip(rows, slowed, strict=True)]
        cost = TrainerCost(*fit(matrix, [seconds for _, seconds, _ in rows]))
        rates = fit([[spent.get(n, 0.0) for n in states] for _, _, spent in rows], [cost(num) for num, _, _ in rows])
        by_state = _factors([(num, True) for num in states], rates)
        cost = TrainerCost(cost.per_step / rates[0], cost.per_token / rates[0]) if rates[0] else cost
        factors = {num: by_state[num, True] for num in states}
    errors = [abs(cost(num) - sum(s / factors[n] for n, s in spent.items())) / cost(num) for num, _, spent in rows]
    return cost, factors, statistics.fmean(errors)


def _publish_cost(traces: Sequence[Trace], begins: Sequence[float]) -> PublishCost:
    totals, pauses, turnarounds = [], [], []
    for trace, begin in zip(traces, begins, strict=True):
        published = {it["version"]: it for it in trace.publishes if it["version"] > 0}
        trained = {it["version"]: it for it in trace.trained}
        ended = {group["item"]: group["end_s"] for group in trace.groups}
        for version, train in trained.items():
            if train["start_s"] < begin:
                continue
            if (publish := published.get(version)) is not None:
                totals.append(publish["end_s"] - train["end_s"])
                pauses.append(max(publish["paused_s"].values(), default=publish["pause_s"]))
            ready = max((ended[item] for item in train["items"] if item in ended), default=train["start_s"])
            before = published.get(version - 1) or trained.get(version - 1)
            turnarounds.append(train["start_s"] - max(ready, before["end_s"] if before else 0.0))
    return PublishCost(*(_median(values) for values in (totals, pauses, turnarounds)))


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
    """Return the groups of runs by version, and the mean tokens of a prompt."""
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
