"""Schedulers in simulated time: what each paper claims, and what the same object gains here over the plain one.

    python benchmarks/rollouts.py

Groups of 8, log-normal lengths (mean of the logarithm ln 150, sigma 0.9, at most 819 tokens: a tenth of a reasoning
model's), completions of one prompt alike within 15 %, 256 prompts over several epochs, four endpoints that take 64
completions each and slow down beyond 32. A live run drives the same objects. Writes ``results/rollouts.json``.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from typing import Any

from inflight.contracts.scheduling import Finished, Joined, Offered, Scored, StepWanted
from inflight.planning import Endpoint, Prompted, Setup, SimulationResult, TokenTime, TrainerCost, simulate
from inflight.rollouts import HistoryStore, MaxLag
from inflight.rollouts.schedulers import SCHEDULERS
from results import write_results

GROUP_SIZE = 8
NUM_PROMPTS = 256
SEEDS = (0, 1)
SETTINGS = {
    "conventional": {"conventional_steps": 1},
    "pipeline, max_lag 1": {"staleness": MaxLag(1), "trainer": TrainerCost(1500.0)},
}
CLAIMS = {
    "least_loaded": ("PipelineRL", "the default; every other row is relative to it"),
    "histopipe": ("RhymeRL, HistoPipe", "1.43x end to end"),
    "skew_aware": ("StreamRL, algorithm 2", "1.04 to 1.27x; 1.08x at 72B"),
    "probe_first": ("Seer", "2.04x rollout, with its other parts"),
    "tail_rounds": ("RollPacker", "2.03 to 2.56x over veRL"),
    "over_provision": ("APRIL", "1.23x on average, at most 1.44x"),
    "shortest_first": ("SortedRL", "half of the bubbles"),
}


def lengths(seed: int, item: int) -> tuple[int, ...]:
    base = random.Random(f"{seed}:{item % NUM_PROMPTS}").lognormvariate(math.log(150), 0.9)
    churn = random.Random(f"{seed}:{item}")
    return tuple(max(1, min(819, round(base * churn.lognormvariate(0, 0.15)))) for _ in range(GROUP_SIZE))


def outcome(name: str, seed: int, setting: dict[str, Any]) -> SimulationResult:
    history = HistoryStore()
    return simulate(
        Setup(
            SCHEDULERS[name](group_size=GROUP_SIZE, history=history),
            history,
            [Endpoint(f"endpoint-{i}", 64, TokenTime.roofline(1.0, 32.0)) for i in range(4)],
            lambda item, _: Prompted(lengths(seed, item), str(item % NUM_PROMPTS)),
            64,
            num_steps=12,
            unit="groups",
            **setting,
        )
    )


def decision_ms(name: str) -> float:
    """Return the milliseconds of CPU time of one decision with 1,000 running completions: median of 200."""
    history = HistoryStore()
    scheduler = SCHEDULERS[name](group_size=GROUP_SIZE, history=history)
    for i in range(8):
        scheduler.observe(Joined(0.0, f"endpoint-{i}", 125, keeps_partials=True))
    scheduler.observe(StepWanted(0.0, 0, 125))
    running: list[tuple[int, int]] = []
    num_offered, spent = 0, []
    for turn in range(400):
        while scheduler.num_wanted() > 0 and num_offered < 4000:
            scheduler.observe(Offered(0.0, num_offered, str(num_offered % 64), 10, (0,) * GROUP_SIZE))
            num_offered += 1
            if name == "least_loaded":
                break
        started = time.thread_time()
        decisions = scheduler.decide(float(turn))
        if turn >= 200:
            spent.append(time.thread_time() - started)
        running += [(it.item, i) for it in decisions for i in it.completions]
        if turn >= 200 and running:
            item, i = running.pop(0)
            scheduler.observe(Finished(float(turn), item, i, 100))
            if i == GROUP_SIZE - 1:
                scheduler.observe(Scored(float(turn), item, str(item % 64), (100,) * GROUP_SIZE, (0.0,) * GROUP_SIZE))
    return 1000 * statistics.median(spent)


def main() -> None:
    rows = []
    plain = {
        (label, seed): outcome("least_loaded", seed, setting) for label, setting in SETTINGS.items() for seed in SEEDS
    }
    for name, (paper, claim) in CLAIMS.items():
        row: dict[str, Any] = {"name": name, "paper": paper, "claim": claim, "decision_ms": decision_ms(name)}
        for label, setting in SETTINGS.items():
            ratios, slots, lags = [], [], []
            for seed in SEEDS:
                found = outcome(name, seed, setting)
                ratios.append(found.tokens_per_time / plain[label, seed].tokens_per_time)
                slots.append(sum(found.slot_time.values()) / (4 * 64 * found.time))
                lags.append(statistics.fmean(found.group_lags))
            row[label] = {"ratios": ratios, "slot_share": statistics.fmean(slots), "lag": statistics.fmean(lags)}
            row["recall"] = found.scheduler.get("predictor_recall")
        rows.append(row)
        print(row, flush=True)
    write_results("rollouts", rows)


if __name__ == "__main__":
    main()
