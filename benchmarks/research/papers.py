"""What papers claim about speed, in simulated time, by the planner's simulation and the live policies.

    python -m benchmarks.research.papers

or ``--only`` some of them, which keeps the others. Inputs are those of the papers where they give them, else those of
their supplements' simulations or ours, as docs/evidence-planner.md lists them. Writes ``results/papers.json``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.results import DIRECTORY, read_results, write_results

from inflight.planning import Endpoint, Prompted, Setup, SimulationResult, TokenTime, TrainerCost, simulate
from inflight.rollouts import HistoryStore, MaxLag
from inflight.rollouts.schedulers import SCHEDULERS, HistoPipe
from inflight.rollouts.schedulers.histopipe import whole_endpoints
from inflight.rollouts.staleness import EtaGate

PHASE = 8
"""Steps of a conventional phase, in which tokens come to be ``PHASE - 1`` steps old."""


def log_normal(seed: int, number: int, *, median: float = 1500, largest: int = 8192) -> list[int]:
    """Return lengths as in PipelineRL's simulation: mean of the logarithm ln 1500, sigma 0.9, at most 8,192."""
    rng = random.Random(seed)
    return [min(largest, max(1, round(rng.lognormvariate(math.log(median), 0.9)))) for _ in range(number)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, smallest and largest."""
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values), "num": len(values)}


# ------------------------------------------------------------------------------------------------------- PipelineRL

DEVICES, BATCH, KNEE = 32, 1024, 128.0


def run(
    lengths: Sequence[int],
    endpoints: int,
    capacity: int,
    step_time: float,
    *,
    steps: int,
    conventional: int = 0,
    staleness: Any = None,
    batch: int = BATCH,
) -> SimulationResult:
    """Simulate PipelineRL's setting: single completions, endpoints flat up to 128 running."""
    history = HistoryStore()
    return simulate(
        Setup(
            SCHEDULERS["least_loaded"](group_size=1, history=history),
            history,
            [Endpoint(f"device-{i}", capacity, TokenTime.roofline(1.0, KNEE)) for i in range(endpoints)],
            lambda item, _: Prompted((lengths[item % len(lengths)],), str(item)),
            batch,
            steps,
            unit="groups",
            staleness=staleness or MaxLag(PHASE - 1),
            conventional_steps=conventional,
            trainer=TrainerCost(step_time),
        )
    )  # fmt: skip


def pipelinerl(
    costs: Sequence[float] = (0.004, 0.008), seeds: int = 5, batch: int = BATCH, devices: int = DEVICES
) -> list[dict[str, Any]]:
    """The pipeline over phases of 8 steps, both without a token older than 7.

    The split of devices and the number of completions in flight are the fastest for the lengths of the first seed.
    """
    rows = []
    for cost in costs:

        def speed(seed: int, training: int, capacity: int, cost: float = cost) -> tuple[float, SimulationResult]:
            lengths = log_normal(seed, 20 * batch)
            time = batch * statistics.fmean(lengths) * cost / training
            found = run(lengths, devices - training, capacity, time, steps=16, batch=batch)
            return found.steady(5).tokens_per_time, found

        def phases(seed: int, cost: float = cost) -> float:
            lengths = log_normal(seed, 20 * batch)
            time = batch * statistics.fmean(lengths) * cost / devices
            options: dict[str, Any] = {"steps": 2 * PHASE, "conventional": PHASE, "batch": batch}
            return run(lengths, devices, 4096, time, **options).tokens_per_time

        share = cost / (cost + 1 / KNEE)
        splits = sorted({min(devices - 1, round(devices * share * factor)) for factor in (0.9, 1.0, 1.1)})
        _, training, capacity = max((speed(0, *it)[0], *it) for it in itertools.product(splits, (96, 128)))
        found = [speed(seed, training, capacity) for seed in range(seeds)]
        ratios = [tokens / phases(seed) for seed, (tokens, _) in enumerate(found)]
        rows.append(
            {
                "cost": cost, "phase": PHASE, "ratio": spread(ratios), "training": training, "capacity": capacity,
                "token_age": statistics.fmean(outcome.steady(5).lag for _, outcome in found),
                "lag_max": max(max(outcome.lags) for _, outcome in found),
            }
        )  # fmt: skip
        report("pipelinerl", rows[-1])
    return rows


# --------------------------------------------------------------------------------------------------------- RhymeRL


RANK_GROUPS, PER_GROUP = 16, 60


def exponential(item: int, version: int) -> Prompted:
    """Sixteen rank groups, with lengths in proportion to e^0 to e^4."""
    prompt = item % (RANK_GROUPS * PER_GROUP)
    return Prompted((round(10 * math.exp(4 * (prompt // PER_GROUP) / (RANK_GROUPS - 1))),), str(prompt))


def rank_groups(num_endpoints: int, num_paired: int, **params: Any) -> SimulationResult:
    """Simulate endpoints that run one completion at a time: one step, or ``num_paired`` in pairs of opposite order."""
    history, size = HistoryStore(), RANK_GROUPS * PER_GROUP
    for item in range(size):
        history.record(str(item), exponential(item, 0).lengths, (0.0,))
    scheduler = HistoPipe(1, history, groups_per_round=size, alternate=num_paired > 0, outlier=math.inf, **params)
    endpoints = [Endpoint(f"endpoint-{i:02}", 1) for i in range(num_endpoints)]
    steps, conventional = (num_paired, 0) if num_paired else (1, 1)
    options: dict[str, Any] = {"unit": "groups", "staleness": MaxLag(1), "conventional_steps": conventional}
    return simulate(Setup(scheduler, history, endpoints, exponential, size, steps, **options))


def pair_sums(num_endpoints: int) -> list[float]:
    """Return the times of each rank group and of its opposite, in a step in which each has whole endpoints."""
    busy = sorted(rank_groups(num_endpoints, 0, rank_groups=RANK_GROUPS).busy.items())
    numbers = whole_endpoints(
        [PER_GROUP * exponential(PER_GROUP * i, 0).lengths[0] for i in range(RANK_GROUPS)], num_endpoints
    )
    ends = [*itertools.accumulate(numbers)]
    times = [max(time for _, time in busy[end - num : end]) for num, end in zip(numbers, ends, strict=True)]
    return [time + other for time, other in zip(times, reversed(times), strict=True)]


def histopipe(num_paired: int = 24) -> list[dict[str, Any]]:
    """Utilisation, by how a round is divided among endpoints."""
    rows: list[dict[str, Any]] = []
    for name, endpoints, params in (
        ("sorted", 16, {"linear": False}),
        ("whole workers", 35, {"rank_groups": RANK_GROUPS}),
        ("cuts", 35, {}),
    ):
        single, pairs = (rank_groups(endpoints, num, **params) for num in (0, num_paired))  # type: ignore[arg-type]
        rows.append(
            {
                "name": name, "endpoints": endpoints, "single": single.utilisation,
                "pairs": pairs.steady(num_paired // 2).busy_share, "lag_max": max(pairs.group_lags),
            }
        )  # fmt: skip
        if name == "whole workers":
            sums = pair_sums(endpoints)
            rows[-1] |= {"pair_sums": statistics.fmean(sums) / max(sums), "spread": max(sums) / min(sums)}
        report("histopipe", rows[-1])
    return rows


# -------------------------------------------------------------------------------------------------------- StreamRL

PER_INSTANCE, SMALL_KNEE, RECALL = 512, 64.0, 0.87


def time_of(
    lengths: Sequence[int], guesses: Sequence[float], capacity: int, instances: int, scheduler: str, **params: Any
) -> float:
    """Return how long a round takes of which a scheduler knows guesses."""
    history = HistoryStore()
    for item, guess in enumerate(guesses):
        history.record(str(item), (round(guess),), (0.0,))
    return simulate(
        Setup(
            SCHEDULERS[scheduler](group_size=1, history=history, **params),
            history,
            [Endpoint(f"instance-{i:02}", capacity, TokenTime.roofline(1.0, SMALL_KNEE)) for i in range(instances)],
            lambda item, _: Prompted((lengths[item],), str(item)),
            len(lengths),
            1,
            unit="groups",
            conventional_steps=1,
        )
    ).time


def streamrl(
    instance_counts: Sequence[int] = (8, 16), capacities: Sequence[int] = (256, 128), seeds: int = 5
) -> list[dict[str, Any]]:
    """Dispatch with guesses over a fixed division in random order, in which nothing moves between instances."""
    rows = []
    for capacity, instances in itertools.product(capacities, instance_counts):
        ratios: dict[str, list[float]] = {}
        recalls: dict[str, list[float]] = {}
        for seed in range(seeds):
            lengths = log_normal(seed, PER_INSTANCE * instances)
            fixed = time_of(lengths, [1.0] * len(lengths), capacity, instances, "skew_aware", tail=0.0)
            for name, guesses, duration in dispatched(lengths, capacity, instances, random.Random(1000 + seed)):
                ratios.setdefault(name, []).append(fixed / duration)
                recalls.setdefault(name, []).append(recall(lengths, guesses))
        for name, values in ratios.items():
            row = {"capacity": capacity, "instances": instances, "name": name, "ratio": spread(values)}
            rows.append(row | {"recall": statistics.fmean(recalls[name])})
            report("streamrl", rows[-1])
    return rows


def dispatched(
    lengths: Sequence[int], capacity: int, instances: int, rng: random.Random
) -> Iterator[tuple[str, Sequence[float], float]]:
    """Yield ways to dispatch: name, guesses and time."""

    def time(guesses: Sequence[float], scheduler: str = "skew_aware", **params: float) -> float:
        return time_of(lengths, guesses, capacity, instances, scheduler, **params)

    shares = [lengths[i::instances] for i in range(instances)]
    alone = max(time_of(share, share, capacity, 1, "skew_aware", tail=0.0) for share in shares)
    yield "longest first", lengths, alone
    yield "oracle", lengths, time(lengths, knee=SMALL_KNEE)
    missed = with_misses(lengths, rng)
    yield "recall 87 %", missed, time(missed, knee=SMALL_KNEE)
    yield "longest first over all instances", lengths, time(lengths, tail=0.0)
    noisy = with_errors(lengths, rng)
    yield "recall 87 %, errors in proportion", noisy, time(noisy, knee=SMALL_KNEE)
    yield "longest first over all instances, recall 87 %", missed, time(missed, tail=0.0)
    yield "least_loaded, without guesses", [1.0] * len(lengths), time(lengths, "least_loaded")
    yield "no instance below its knee", lengths, sum(lengths) / SMALL_KNEE / instances


def recall(lengths: Sequence[int], guesses: Sequence[float]) -> float:
    """Return the share of the longest fifth that is among the fifth of the largest guesses."""
    num = len(lengths) // 5
    longest, guessed = (set(sorted(range(len(of)), key=lambda i, of=of: -of[i])[:num]) for of in (lengths, guesses))  # type: ignore[misc]
    return len(longest & guessed) / num


def with_misses(lengths: Sequence[int], rng: random.Random) -> list[float]:
    """Return guesses that miss some of the longest fifth, however long, and take as many others for a part of it.

    What is missed is taken for the longest of the rest, and what is put in its place for the shortest of the fifth.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    num = len(lengths) // 5
    border, num_missed = lengths[order[num - 1]], round((1 - RECALL) * num)
    guesses = [float(length) for length in lengths]
    for part, guess in ((order[:num], border - 1.0), (order[num:], border + 1.0)):
        for i in rng.sample(part, num_missed):
            guesses[i] = guess
    return guesses


def with_errors(lengths: Sequence[int], rng: random.Random) -> list[float]:
    """Return guesses with log-normal errors, of the size that gives the recall: most misses are near the border."""
    errors = [rng.normalvariate(0, 1) for _ in lengths]
    low, high = 0.0, 3.0
    for _ in range(24):
        sigma = (low + high) / 2
        guesses = [length * math.exp(sigma * error) for length, error in zip(lengths, errors, strict=True)]
        low, high = (sigma, high) if recall(lengths, guesses) > RECALL else (low, sigma)
    return guesses


# ----------------------------------------------------------------------------------------------------------- AReaL


UNBOUNDED = 1000
"""An eta that no run of a few steps comes to."""


def areal(
    etas: Sequence[int] = (0, 1, 4, 8, UNBOUNDED), seeds: int = 3, batch: int = 4096, devices: int = DEVICES
) -> list[dict[str, Any]]:
    """Its gate at several eta on three quarters of the devices, over taking turns on all of them, step by step.

    A step has 128 sequences for each device, as in its runs, which train on 512 prompts with 16 answers.
    """
    cost = 0.004
    lengths = [log_normal(100 + seed, 20_000) for seed in range(seeds)]
    totals = [batch * statistics.fmean(of_seed) * cost for of_seed in lengths]
    plain = [
        run(of_seed, devices, 4096, total / devices, steps=3, conventional=1, batch=batch).tokens_per_time
        for of_seed, total in zip(lengths, totals, strict=True)
    ]
    training = devices // 4
    rows = []
    for eta in etas:
        found = [
            run(
                of_seed, devices - training, 128, total / training, steps=8, staleness=EtaGate(eta), batch=batch
            ).steady(3)
            for of_seed, total in zip(lengths, totals, strict=True)
        ]
        ratios = [steady.tokens_per_time / speed for steady, speed in zip(found, plain, strict=True)]
        rows.append(
            {"cost": cost, "eta": eta, "ratio": spread(ratios), "token_age": statistics.fmean(it.lag for it in found)}
        )
        report("areal", rows[-1])
    return rows


# --------------------------------------------------------------------------------------------------------- LlamaRL


def llamarl() -> dict[str, Any]:
    """The theorem's ratio over random decreasing costs and memories: both stages apart, over both on every device."""
    rng = random.Random(0)
    ratios = []
    for _ in range(2000):
        size = rng.randrange(2, 24)
        eta_t, eta_g = (sorted((rng.uniform(0.05, 10) for _ in range(size)), reverse=True) for _ in range(2))
        weights, per_t, per_g = rng.randrange(1, 9), rng.randrange(1, 9), rng.randrange(1, 9)
        memory = 5 * weights + per_t + per_g + rng.randrange(0, 81)
        together = min(
            eta_t[b_t - 1] + eta_g[b_g - 1]
            for b_t, b_g in itertools.product(range(1, size + 1), repeat=2)
            if 5 * weights + b_t * per_t + b_g * per_g <= memory
        )
        b_t, b_g = (min(size, (memory - own) // per) for own, per in ((4 * weights, per_t), (weights, per_g)))
        ratios.append(together / (eta_t[b_t - 1] + eta_g[b_g - 1]))
    return {
        "num": len(ratios), "smallest": min(ratios), "median": statistics.median(ratios), "largest": max(ratios),
        "equal_share": sum(ratio < 1 + 1e-12 for ratio in ratios) / len(ratios),
    }  # fmt: skip


PAPERS: dict[str, Callable[[], Any]] = {
    "pipelinerl": pipelinerl, "histopipe": histopipe, "streamrl": streamrl, "areal": areal, "llamarl": llamarl,
}  # fmt: skip


def report(name: str, row: Mapping[str, Any]) -> None:
    print(name, row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PAPERS, default=list(PAPERS))
    for name in parser.parse_args().only:
        began = time.process_time()
        found = PAPERS[name]()
        cpu_s = round(time.process_time() - began, 1)
        print(f"{name}: {cpu_s:.0f} s of one core", flush=True)
        rows = read_results("papers")["rows"] if (DIRECTORY / "papers.json").exists() else {}
        write_results("papers", rows | {name: found, "cpu_s": rows.get("cpu_s", {}) | {name: cpu_s}})


if __name__ == "__main__":
    main()
