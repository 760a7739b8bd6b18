"""What papers claim about speed, in simulated time, by the planner's simulation and the live policies.

    python benchmarks/papers.py

or ``--only`` some of them, which keeps the others. Inputs are those of the papers where they give them, else those of
their supplements' simulations or ours, as docs/planner.md says. Writes ``results/papers.json``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from inflight.planning import Endpoint, Outcome, Prompted, Setup, TokenTime, TrainerCost, simulate
from inflight.rollouts import HistoryStore, MaxLag
from inflight.rollouts.schedulers import SCHEDULERS, HistoPipe
from inflight.rollouts.staleness import EtaGate
from results import DIRECTORY, read_results, write_results

MAX_LAG = 8


def log_normal(seed: int, number: int, *, median: float = 1500, largest: int = 8192) -> list[int]:
    """Return lengths as in PipelineRL's simulation: mean of the logarithm ln 1500, sigma 0.9, at most 8,192."""
    rng = random.Random(seed)
    return [min(largest, max(1, round(rng.lognormvariate(math.log(median), 0.9)))) for _ in range(number)]


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
) -> Outcome:
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
            staleness=staleness or MaxLag(MAX_LAG),
            conventional_steps=conventional,
            trainer=TrainerCost(step_time),
        )
    )  # fmt: skip


def pipelinerl() -> list[dict[str, Any]]:
    """The fastest split and number of completions in flight without an older token, over phases of as many steps."""
    lengths = log_normal(0, 20_000)
    mean = statistics.fmean(lengths)
    rows = []
    for cost, lag in itertools.product((0.004, 0.008), (8,)):
        total = BATCH * mean * cost
        phases = run(lengths, DEVICES, 4096, total / DEVICES, steps=2 * lag, conventional=lag)
        best: dict[str, Any] = {}
        share = cost / (cost + 1 / KNEE)
        splits = sorted({max(1, round(DEVICES * share * factor)) for factor in (0.9, 1.1)})
        for training, capacity in itertools.product(splits, (64, 96, 128)):
            if training >= DEVICES:
                continue
            found = run(lengths, DEVICES - training, capacity, total / training, steps=16, staleness=MaxLag(lag))
            steady = found.steady(5)
            tokens = steady.tokens_per_time
            if tokens > best.get("tokens", 0.0):
                best = {
                    "tokens": tokens, "training": training, "capacity": capacity, "token_age": steady.lag,
                    "lag_max": max(found.lags),
                }  # fmt: skip
        rows.append({"cost": cost, "lag": lag, "ratio": best["tokens"] / phases.tokens_per_time, **best})
    return rows


# --------------------------------------------------------------------------------------------------------- RhymeRL


def exponential(item: int, version: int) -> Prompted:
    """Lengths from e^0 to e^4, by rank."""
    return Prompted((round(10 * math.exp(4 * (item % 256) / 256)),), str(item % 256))


def histopipe() -> dict[str, float]:
    """Utilisation of 16 endpoints that run one completion at a time, prompts sorted into 16 rank groups."""
    found = {}
    for name, linear, alternate, steps in (
        ("sorted", False, False, 1), ("pairs", False, True, 2),
        ("linear", True, False, 1), ("linear pairs", True, True, 2),
    ):  # fmt: skip
        history = HistoryStore()
        for item in range(256):
            history.record(str(item), exponential(item, 0).lengths, (0.0,))
        scheduler = HistoPipe(1, history, groups_per_round=256, linear=linear, alternate=alternate, outlier=math.inf)
        outcome = simulate(
            Setup(
                scheduler,
                history,
                [Endpoint(f"endpoint-{i:02}", 1) for i in range(16)],
                exponential,
                256,
                12,
                unit="groups",
                staleness=MaxLag(1),
                conventional_steps=0 if steps == 2 else 1,
            )
        )
        found[name] = outcome.utilisation
    return found


# -------------------------------------------------------------------------------------------------------- StreamRL


def streamrl() -> list[dict[str, Any]]:
    """Algorithm 2 with longest first, by what the ranker recalls, over dispatch without predictions."""
    rows = []
    per_instance, instances = 512, 4
    for capacity in (256, 128):
        lengths = log_normal(1, per_instance * instances)
        times: dict[str, float] = {}
        recalls: dict[str, float] = {}
        for name, scheduler, params, error in (
            ("plain", "least_loaded", {}, 0.0),
            ("longest first", "skew_aware", {"tail": 0.0, "knee": 64.0}, 0.0),
            ("oracle", "skew_aware", {"knee": 64.0}, 0.0),
            ("recall 87 %", "skew_aware", {"knee": 64.0}, error_of_recall(lengths, 0.87)),
        ):
            history, rng = HistoryStore(), random.Random(2)
            guesses = [length * math.exp(rng.normalvariate(0, error)) for length in lengths]
            for item, guess in enumerate(guesses):
                history.record(str(item), (round(guess),), (0.0,))
            recalls[name] = recall(lengths, guesses)
            outcome = simulate(
                Setup(
                    SCHEDULERS[scheduler](group_size=1, history=history, **params),
                    history,
                    [Endpoint(f"instance-{i}", capacity, TokenTime.roofline(1.0, 64.0)) for i in range(instances)],
                    lambda item, _, lengths=lengths: Prompted((lengths[item],), str(item)),  # type: ignore[misc]
                    len(lengths),
                    1,
                    unit="groups",
                    conventional_steps=1,
                )
            )
            times[name] = outcome.time
        rows.append(
            {
                "capacity": capacity,
                "recall": recalls["recall 87 %"],
                **{name: times["plain"] / time for name, time in times.items() if name != "plain"},
            }
        )
    return rows


def recall(lengths: Sequence[int], guesses: Sequence[float]) -> float:
    """Return the share of the longest fifth that is among the fifth of the largest guesses."""
    num = len(lengths) // 5
    longest, guessed = (set(sorted(range(len(of)), key=lambda i, of=of: -of[i])[:num]) for of in (lengths, guesses))  # type: ignore[misc]
    return len(longest & guessed) / num


def error_of_recall(lengths: Sequence[int], wanted: float) -> float:
    """Return the sigma of log-normal errors by which guesses have a recall."""
    low, high = 0.0, 3.0
    for _ in range(24):
        sigma, rng = (low + high) / 2, random.Random(2)
        found = recall(lengths, [length * math.exp(rng.normalvariate(0, sigma)) for length in lengths])
        low, high = (sigma, high) if found > wanted else (low, sigma)
    return (low + high) / 2


# ----------------------------------------------------------------------------------------------------------- AReaL


def areal() -> list[dict[str, Any]]:
    """Its gate at several eta on three quarters of the devices, over taking turns on all of them, step by step.

    A step has 128 sequences for each device, as in its runs, which train on 512 prompts with 16 answers.
    """
    lengths, cost, batch = log_normal(3, 20_000), 0.004, 4096
    total = batch * statistics.fmean(lengths) * cost
    plain = run(lengths, DEVICES, 4096, total / DEVICES, steps=4, conventional=1, batch=batch)
    rows = []
    for eta in (0, 1, 4, 8):
        found = run(lengths, 24, 128, total / 8, steps=10, staleness=EtaGate(eta), batch=batch)
        ratio = found.steady(4).tokens_per_time / plain.tokens_per_time
        rows.append({"cost": cost, "eta": eta, "ratio": ratio, "token_age": found.steady(4).lag})
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PAPERS, default=list(PAPERS))
    for name in parser.parse_args().only:
        found = PAPERS[name]()
        print(name, found, flush=True)
        rows = read_results("papers")["rows"] if (DIRECTORY / "papers.json").exists() else {}
        write_results("papers", rows | {name: found})


if __name__ == "__main__":
    main()
