"""The load of a recorded run over time: the running completions of each endpoint, and whether the trainer is
working."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from inflight.planning.traces import Trace

State = tuple[int, bool]
"""The number of working endpoints, and whether the trainer is training or publishing."""


class EndpointActivity(NamedTuple):
    """The load of an endpoint from the time ``since`` on."""

    since: float
    num: int
    first: float
    """The time at which the longest completion, including its prompt, would have had zero tokens."""
    rate: float
    """Tokens per second of the longest completion."""

    def context(self, start: float, end: float) -> float:
        """Return the integral over time of the number of running completions times the length of the longest."""
        return self.num * self.rate * (end - start) * ((start + end) / 2 - self.first)


@dataclass(frozen=True, slots=True)
class Loads:
    """The running completions of each endpoint, as step functions of time, and when the trainer is working."""

    running: dict[str, list[EndpointActivity]]
    states: tuple[list[float], list[State]]

    @classmethod
    def of(cls, trace: Trace, num_prompt_tokens: int) -> Loads:
        """Return the loads, assuming that completions grow at a constant rate after ``num_prompt_tokens`` prompt
        tokens."""
        sampled: dict[str, list[tuple[float, float, float, float]]] = {}
        for request in trace.requests:
            start, rate = request["start_s"], rate_of(request)
            for part in request["parts"] if rate else ():
                num = part["num_tokens"] - part["num_before"]
                first = start - (num_prompt_tokens + part["num_before"]) / rate
                sampled.setdefault(request["endpoint"], []).append((start, start + num / rate, first, rate))
        running = {name: _steps(of_endpoint) for name, of_endpoint in sampled.items()}
        busy: list[tuple[float, tuple[int, int]]] = []
        for steps in running.values():
            was = 0
            for step in steps:
                if (step.num > 0) != (was > 0):
                    busy.append((step.since, (1 if step.num > 0 else -1, 0)))
                was = step.num
        served = {it["version"]: it["end_s"] for it in trace.publishes}
        for it in trace.trained:
            end = max(it["end_s"], served.get(it["version"], 0.0))
            busy += [(it["start_s"], (0, 1)), (end, (0, -1))]
        busy.sort()
        times, states, now = [0.0], [(0, False)], [0, 0]
        for time, (endpoints, trainers) in busy:
            now = [now[0] + endpoints, now[1] + trainers]
            times.append(time)
            states.append((now[0], now[1] > 0))
        return cls(running, (times, states))

    def between(self, start: float, end: float) -> Iterator[tuple[float, float, State]]:
        """Yield the start, end and state of each part of a time window."""
        times, states = self.states
        i = max(0, bisect.bisect_right(times, start) - 1)
        while i < len(times) and times[i] < end:
            until = times[i + 1] if i + 1 < len(times) else end
            if min(until, end) > max(times[i], start):
                yield max(times[i], start), min(until, end), states[i]
            i += 1

    def num_busy(self, start: float, end: float) -> float:
        """Return the mean number of working endpoints in a time window."""
        return sum((until - since) * state[0] for since, until, state in self.between(start, end)) / (end - start)


def rate_of(request: Mapping[str, Any]) -> float:
    """Return the tokens per second of the completion that gained the most tokens in a request."""
    most = max(part["num_tokens"] - part["num_before"] for part in request["parts"])
    return float(most / max(1e-9, request["end_s"] - request["start_s"]))


def _steps(sampled: list[tuple[float, float, float, float]]) -> list[EndpointActivity]:
    """Return an endpoint's load over time from each completion's start, end, ``EndpointActivity.first`` and rate."""
    changes = sorted([(it[0], 1, it) for it in sampled] + [(it[1], -1, it) for it in sampled], key=lambda it: it[:2])
    steps, number, longest = [EndpointActivity(0.0, 0, 0.0, 0.0)], 0, list[tuple[float, float, float]]()
    for time, change, (_, end, first, rate) in changes:
        number += change
        if change > 0:
            heapq.heappush(longest, (first, end, rate))
        while longest and longest[0][1] <= time:
            heapq.heappop(longest)
        step = (
            EndpointActivity(time, number, longest[0][0], longest[0][2])
            if longest
            else EndpointActivity(time, 0, 0.0, 0.0)
        )
        if time == steps[-1].since:
            steps[-1] = step
        else:
            steps.append(step)
    return steps


class LoadPart(NamedTuple):
    """Averages over a part of a stretch during which the `State` did not change."""

    seconds: float
    context: float
    """The mean of the number of running completions times the length of the longest."""
    num_working: int
    """The number of working endpoints and trainers."""


@dataclass(slots=True)
class Stretch:
    """A part of a request: the tokens that its longest completion gained, and the load during that time."""

    num_tokens: int
    seconds: float
    parts: list[LoadPart]
    size: int
    """The number of completions of the request."""
    num_admitted: int
    """Number of requests that began at the endpoint during the stretch, including this one."""
    is_last: bool
    """Whether this is the end of the request, which includes the time until the run receives the answer."""


def stretches_of(trace: Trace, load: Loads, begin: float) -> Iterator[Stretch]:
    """Yield the requests of a run, split where a new version began to be served.

    Version spans record the token at which that happened, so stretches in the middle of a request consist of decoding
    only.
    """
    served = {publish["version"]: publish["end_s"] for publish in trace.publishes}
    begins: dict[str, list[float]] = {}
    for request in trace.requests:
        begins.setdefault(request["endpoint"], []).append(request["start_s"])
    for times in begins.values():
        times.sort()
    for request in trace.requests:
        if request["start_s"] < begin or not rate_of(request):
            continue
        longest = max(request["parts"], key=lambda part: part["num_tokens"] - part["num_before"])
        start, token = request["start_s"], longest["num_before"]
        cuts = [(first, served.get(version), False) for first, _, version in longest["spans"] if first > token]
        times, running = begins[request["endpoint"]], load.running[request["endpoint"]]
        for at, end, is_last in [*cuts, (longest["num_tokens"], request["end_s"], True)]:
            if end is None or end <= start or at <= token:
                continue  # for example, another endpoint received this publish first
            parts = [
                LoadPart(until - since, _mean_context(running, since, until), max(1, sum(state)))
                for since, until, state in load.between(start, end)
            ]
            if parts:
                num_admitted = bisect.bisect_left(times, end) - bisect.bisect_left(times, start)
                yield Stretch(at - token, end - start, parts, len(request["parts"]), num_admitted, is_last)
            start, token = end, at


def _mean_context(steps: Sequence[EndpointActivity], start: float, end: float) -> float:
    """Return the mean over time of the number of running completions times the length of the longest."""
    i = max(0, bisect.bisect_right(steps, start, key=lambda step: step.since) - 1)
    context = 0.0
    while i < len(steps) and steps[i].since < end:
        until = min(end, steps[i + 1].since) if i + 1 < len(steps) else end
        context += steps[i].context(max(start, steps[i].since), until)
        i += 1
    return context / (end - start)
