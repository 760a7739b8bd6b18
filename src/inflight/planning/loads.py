"""What worked at each moment of a run, by its events: completions of each endpoint, and the trainer."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inflight.planning.traces import Trace

State = tuple[int, bool]
"""Endpoints that work, and whether the trainer trains."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Running completions of each endpoint, as steps over time, and when the trainer trains."""

    running: dict[str, tuple[list[float], list[int]]]
    """By endpoint: times, and the completions from each on."""
    training: list[tuple[float, float]]
    states: tuple[list[float], list[State]]

    @classmethod
    def of(cls, trace: Trace) -> Loads:
        changes: dict[str, list[tuple[float, int]]] = {}
        for request in trace.requests:
            start, end = request["start_s"], request["end_s"]
            longest = max(part["num_tokens"] for part in request["parts"])
            of_endpoint = changes.setdefault(request["endpoint"], [])
            for part in request["parts"]:
                of_endpoint.append((start, 1))
                of_endpoint.append((start + (end - start) * part["num_tokens"] / max(1, longest), -1))
        running = {name: _summed(of_endpoint) for name, of_endpoint in changes.items()}
        training = [(it["start_s"], it["end_s"]) for it in trace.trained]
        busy: list[tuple[float, tuple[int, int]]] = []
        for times, numbers in running.values():
            was = 0
            for time, number in zip(times, numbers, strict=True):
                if (number > 0) != (was > 0):
                    busy.append((time, (1 if number > 0 else -1, 0)))
                was = number
        busy += [(time, (0, sign)) for start, end in training for time, sign in ((start, 1), (end, -1))]
        busy.sort()
        times, states, now = [0.0], [(0, False)], [0, 0]
        for time, (endpoints, trainers) in busy:
            now = [now[0] + endpoints, now[1] + trainers]
            times.append(time)
            states.append((now[0], now[1] > 0))
        return cls(running, training, (times, states))

    def between(self, start: float, end: float) -> Iterator[tuple[float, float, State]]:
        """Yield the parts of a stretch of time with what worked in each."""
        times, states = self.states
        i = max(0, bisect.bisect_right(times, start) - 1)
        while i < len(times) and times[i] < end:
            until = times[i + 1] if i + 1 < len(times) else end
            if min(until, end) > max(times[i], start):
                yield max(times[i], start), min(until, end), states[i]
            i += 1


def _summed(changes: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    changes.sort()
    times, numbers, number = [0.0], [0], 0
    for time, change in changes:
        number += change
        if time == times[-1]:
            numbers[-1] = number
        else:
            times.append(time)
            numbers.append(number)
    return times, numbers


@dataclass(slots=True)
class Stretch:
    """A part of a request: how many tokens its longest completion got in it, and what ran meanwhile."""

    num_tokens: int
    seconds: float
    parts: list[tuple[float, float, State]]
    """Duration, mean number of running completions, and what else worked."""
    is_last: bool
    """Whether the request ends with it: it then has the time until the run has the answer."""


def stretches_of(trace: Trace, load: Loads, begin: float) -> Iterator[Stretch]:
    """Yield the requests of a run, cut where a version began to be served.

    Spans say at which token that was, so a stretch in the middle has nothing but tokens.
    """
    served = {publish["version"]: publish["end_s"] for publish in trace.publishes}
    for request in trace.requests:
        if request["start_s"] < begin:
            continue
        longest = max(request["parts"], key=lambda part: part["num_tokens"])
        start, token = request["start_s"], 0
        cuts = [(first, served.get(version), False) for first, _, version in longest["spans"][1:]]
        for at, end, is_last in [*cuts, (longest["num_tokens"], request["end_s"], True)]:
            if end is None or end <= start or at <= token:
                continue  # a publish that other endpoints had first, say
            times, numbers = load.running[request["endpoint"]]
            parts = [
                (until - since, _mean(times, numbers, since, until), (max(1, state[0]), state[1]))
                for since, until, state in load.between(start, end)
            ]
            if parts:
                yield Stretch(at - token, end - start, parts, is_last)
            start, token = end, at


def _mean(times: Sequence[float], numbers: Sequence[int], start: float, end: float) -> float:
    """Return the mean of a step function."""
    i = max(0, bisect.bisect_right(times, start) - 1)
    total = 0.0
    while i < len(times) and times[i] < end:
        until = times[i + 1] if i + 1 < len(times) else end
        total += numbers[i] * max(0.0, min(until, end) - max(times[i], start))
        i += 1
    return total / (end - start)
