"""What the seed papers claim of lag and of batches, on a language model of which hundreds of steps take seconds.

    python -m benchmarks.research.criteria

or ``--only`` some of its parts, which keeps the others.

The model is a GRU with 64 units and 32 tokens, trained with the losses, advantages, composers and groups of inflight.
A prompt is one of 8 tokens; the reward is the share of the completion that repeats it. Lengths are those of
PipelineRL's simulation, a hundred times shorter (log-normal, mean of the logarithm ln 15, sigma 0.9, at most 82
tokens), and a completion has the length of its item. Everything is deterministic: how many tokens are sampled between
two steps follows from the number of completions in flight, and not from a clock. Writes ``results/criteria.json``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.results import DIRECTORY, read_results, write_results
from torch.nn.utils.rnn import pad_sequence

from inflight.losses import PRESETS, PolicyLoss, collate, metric_values, prepare
from inflight.losses.aggregation import Budget, SegmentMean, TokenMean
from inflight.losses.gates import Score
from inflight.planning import Endpoint, Prompted, Setup, TokenTime, TrainerCost, simulate
from inflight.rollouts import HistoryStore, MaxLag, WaitingGroups
from inflight.rollouts.composers import ConstantTokens
from inflight.rollouts.schedulers import SCHEDULERS
from inflight.rollouts.split import best_split
from inflight.run.sampling.batches import StepBatch, make_batch
from inflight.types import Group, Rollout
from inflight.wire import VersionSpan

VOCABULARY, HIDDEN, NUM_PROMPTS = 32, 64, 8
GROUP_SIZE, GROUPS_PER_STEP = 8, 8
MAX_LENGTH, MAX_LAG = 82, 8
SEEDS = (0, 1, 2)
NUM_STEPS = 120
LEARNING_RATE = 3e-3
BOUND = MaxLag(MAX_LAG)


def length_of(seed: int, item: int) -> int:
    return max(1, min(MAX_LENGTH, round(random.Random(f"{seed}:{item}").lognormvariate(math.log(15), 0.9))))


class Model(torch.nn.Module):
    """A language model whose keys and values are one recurrent state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.gru = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, state = self.gru(self.embedding(ids), state)
        return self.head(hidden).log_softmax(-1), state

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logprob of each token of sequences, one after another; 0 for the first of each."""
        ids = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
        found, _ = self(ids[:, :-1])
        chosen = found.gather(2, ids[:, 1:, None]).squeeze(2)
        padded = torch.cat([torch.zeros(len(ids), 1), chosen], 1)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        packed: torch.Tensor = padded[torch.arange(ids.shape[1]) < lengths[:, None]]
        return packed


@dataclass
class InFlight:
    """The completions of one item, which are sampled together."""

    item: int
    length: int
    state: torch.Tensor | None = None
    tokens: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def group(self) -> Group:
        prompt = self.item % NUM_PROMPTS
        edges = [0, *(i for i in range(1, self.length) if self.versions[i] != self.versions[i - 1]), self.length]
        spans = [
            VersionSpan(version=self.versions[start], start=start, end=end) for start, end in itertools.pairwise(edges)
        ]
        rollouts = [
            Rollout([prompt], ids, logprobs, spans, "length", sum(i == prompt for i in ids) / self.length, 1.0)
            for ids, logprobs in zip(
                torch.stack(self.tokens, 1).tolist(), torch.stack(self.logprobs, 1).tolist(), strict=True
            )
        ]
        return Group(self.item, self.item, rollouts)


class Trained:
    """A model in training, and what its steps reported."""

    def __init__(self, loss: PolicyLoss, advantages: Any, seed: int, learning_rate: float = LEARNING_RATE) -> None:
        self.model = Model(seed)
        self.loss, self.advantages = loss, advantages
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, weight_decay=0.0)
        self.version = 0
        self.rows: list[dict[str, float]] = []
        self.num_completions = 0

    @torch.no_grad()
    def token(self, groups: Sequence[InFlight]) -> None:
        """Sample the next token of every completion, from its present state."""
        last = torch.cat(
            [g.tokens[-1] if g.tokens else torch.full((GROUP_SIZE,), g.item % NUM_PROMPTS) for g in groups]
        )
        zero = torch.zeros(1, GROUP_SIZE, HIDDEN)
        states = torch.cat([zero if g.state is None else g.state for g in groups], 1)
        found, states = self.model(last[:, None], states)
        ids = found[:, 0].exp().multinomial(1)
        chosen = found[:, 0].gather(1, ids)
        for i, group in enumerate(groups):
            own = slice(i * GROUP_SIZE, (i + 1) * GROUP_SIZE)
            group.state = states[:, own]
            group.tokens.append(ids[own, 0])
            group.logprobs.append(chosen[own, 0])
            group.versions.append(self.version)

    @torch.no_grad()
    def whole(self, lengths: Mapping[int, int], model: Model | None = None, version: int | None = None) -> list[Group]:
        """Sample items, whose lengths are given, from first to last token with one version of the weights."""
        model, version = model or self.model, self.version if version is None else version
        last = torch.tensor([item % NUM_PROMPTS for item in lengths]).repeat_interleave(GROUP_SIZE)
        state: torch.Tensor | None = None
        tokens, logprobs = [], []
        for _ in range(max(lengths.values())):
            found, state = model(last[:, None], state)
            ids = found[:, 0].exp().multinomial(1)
            last = ids[:, 0]
            tokens.append(last)
            logprobs.append(found[:, 0].gather(1, ids)[:, 0])
        groups = []
        for i, (item, length) in enumerate(lengths.items()):
            own = slice(i * GROUP_SIZE, (i + 1) * GROUP_SIZE)
            sampled = [[it[own] for it in values[:length]] for values in (tokens, logprobs)]
            groups.append(InFlight(item, length, None, *sampled, versions=[version] * length).group())
        return groups

    def step(self, batch: StepBatch) -> None:
        """Take an optimizer step, and note what came of it."""
        row = gradient(self.model, self.loss, batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.version += 1
        rewards = [rollout.reward for group in batch.groups for rollout in group.rollouts]
        self.num_completions += len(rewards)
        lags = batch.token_lags
        self.rows.append(
            row | {"reward": statistics.fmean(rewards), "lag_mean": statistics.fmean(lags), "lag_max": max(lags)}
        )

    def batch(self, groups: Sequence[Group]) -> StepBatch:
        return make_batch(groups, self.version, self.advantages, BOUND)


def gradient(model: Model, loss: PolicyLoss, batch: StepBatch) -> dict[str, float]:
    """Compute the gradient of a step, and return its norm and the effective sample size."""
    model.zero_grad()
    packed = collate(batch.samples)
    plan = prepare(loss, [packed], current_version=batch.version)
    trainer_T = model.logprobs([[*s.rollout.prompt_token_ids, *s.rollout.completion_token_ids] for s in batch.samples])
    output = loss(packed, trainer_T, plan)
    output.loss.backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return {
        "gradient_norm": float(torch.stack(norms).norm()),
        "ess": metric_values(output.metrics)["effective_sample_size"],
        "num_tokens": float(len(batch.token_lags)),
    }


# ---------------------------------------------------------------------------------------------------------------
# Lag


def in_flight(trained: Trained, seed: int) -> None:
    """PipelineRL: so many groups are in flight that the longest completion outlives `MAX_LAG` steps."""
    mean = statistics.fmean(length_of(seed, item) for item in range(1000))
    num_running = round(MAX_LAG * GROUPS_PER_STEP * mean / MAX_LENGTH)
    items = iter(range(1_000_000))
    running: list[InFlight] = []
    finished: deque[Group] = deque()
    while len(trained.rows) < NUM_STEPS:
        while len(running) < num_running:
            running.append(InFlight(item := next(items), length_of(seed, item)))
        trained.token(running)
        finished.extend(group.group() for group in running if len(group.tokens) == group.length)
        running = [group for group in running if len(group.tokens) < group.length]
        while len(finished) >= GROUPS_PER_STEP:
            trained.step(trained.batch([finished.popleft() for _ in range(GROUPS_PER_STEP)]))


def conventional(trained: Trained, seed: int, steps_per_phase: int, num_steps: int = NUM_STEPS) -> None:
    """Sample for so many steps, then train them."""
    for phase in range(num_steps // steps_per_phase):
        first = phase * steps_per_phase * GROUPS_PER_STEP
        items = range(first, first + steps_per_phase * GROUPS_PER_STEP)
        groups = trained.whole({item: length_of(seed, item) for item in items})
        for start in range(0, len(groups), GROUPS_PER_STEP):
            trained.step(trained.batch(groups[start : start + GROUPS_PER_STEP]))


def at_lag(trained: Trained, seed: int, lag: int) -> None:
    """Sample every batch from the weights of ``lag`` steps ago."""
    versions: deque[Model] = deque(maxlen=lag + 1)
    for step in range(NUM_STEPS):
        versions.append(copy.deepcopy(trained.model))
        items = range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP)
        groups = trained.whole({item: length_of(seed, item) for item in items}, versions[0], max(0, step - lag))
        trained.step(trained.batch(groups))


def summary(trained: Trained) -> dict[str, Any]:
    rows = trained.rows
    rewards = [row["reward"] for row in rows]
    return {
        "reward_mean": statistics.fmean(rewards),
        "reward_last": statistics.fmean(rewards[-10:]),
        "ess_mean": statistics.fmean(row["ess"] for row in rows),
        "ess_min": min(row["ess"] for row in rows),
        "lag_mean": statistics.fmean(row["lag_mean"] for row in rows),
        "lag_max": max(row["lag_max"] for row in rows),
        "gradient_norm_max": max(row["gradient_norm"] for row in rows),
    }


def modes() -> dict[str, list[dict[str, Any]]]:
    """PipelineRL's comparison: effective sample size and reward of in-flight updates and of conventional phases."""
    preset = PRESETS["pipelinerl_paper"]
    found: dict[str, list[dict[str, Any]]] = {"in flight": [], "conventional G=1": [], "conventional G=8": []}
    for seed in SEEDS:
        for mode, rows in found.items():
            trained = Trained(preset.loss, preset.advantages, seed)
            torch.manual_seed(1000 + seed)
            if mode == "in flight":
                in_flight(trained, seed)
            else:
                conventional(trained, seed, int(mode[-1]))
            rows.append(summary(trained))
    return found


def losses() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Losses of AReaL and LlamaRL on tokens 8 versions old. Naive PPO takes its ratio to the behaviour policy."""
    capped = PRESETS["aipo"].loss
    tried = {
        "ppo, naive": (PRESETS["dapo"].loss, "std"),
        "decoupled_ppo": (PRESETS["decoupled_ppo"].loss, "std"),
        "a3po": (PRESETS["a3po"].loss, "std"),
        "aipo": (capped, "mean"),
        "aipo without its cap": (capped.model_copy(update={"gate": Score()}), "mean"),
    }
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, (loss, advantages) in tried.items():
        for lag in (0, MAX_LAG) if name == "ppo, naive" else (MAX_LAG,):
            for seed in SEEDS:
                trained = Trained(loss, advantages, seed)
                torch.manual_seed(1000 + seed)
                at_lag(trained, seed, lag)
                found.setdefault(name, {}).setdefault(f"lag {lag}", []).append(summary(trained))
    return found


# ---------------------------------------------------------------------------------------------------------------
# Batches


def batches() -> list[dict[str, Any]]:
    """C3PO's comparison: how much the gradient's norm and the tokens of a step vary while the weights stand still.

    Seven groups of ten are short (8 tokens), the others long (120). Three models: untrained, half-way, trained.
    """
    found = []
    for num_steps in (0, 30, NUM_STEPS):
        trained = Trained(PRESETS["dapo"].loss, "std", 0)
        torch.manual_seed(0)
        conventional(trained, 0, 1, num_steps)
        groups = trained.whole(
            {item: 120 if random.Random(item).random() < 0.3 else 8 for item in range(GROUPS_PER_STEP * 100)}
        )
        reward = statistics.fmean(rollout.reward for group in groups for rollout in group.rollouts)
        found.append({"trained_steps": num_steps, "reward": reward, "ways": _variations(trained, groups)})
    return found


def _variations(trained: Trained, groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Return, for each way to make steps of groups, how much gradients and tokens vary."""
    tokens_per_group = statistics.fmean(GROUP_SIZE * len(g.rollouts[0].completion_token_ids) for g in groups)
    budget = round(GROUPS_PER_STEP * tokens_per_group)
    gate = PRESETS["c3po"].loss.gate
    ways: dict[str, tuple[PolicyLoss, Iterator[StepBatch]]] = {
        "GRPO": (PolicyLoss(gate=gate, aggregation=SegmentMean()), _fixed(trained, groups)),
        "DAPO": (PolicyLoss(gate=gate, aggregation=TokenMean()), _fixed(trained, groups)),
        "C3PO": (PolicyLoss(gate=gate, aggregation=Budget(tokens=budget)), _budgeted(trained, groups, budget)),
    }
    found = {}
    for name, (loss, steps) in ways.items():
        rows = [gradient(trained.model, loss, batch) for batch in steps]
        found[name] = {
            "steps": float(len(rows)),
            "gradient_norm_variation": _variation([row["gradient_norm"] for row in rows]),
            "tokens_variation": _variation([row["num_tokens"] for row in rows]),
        }
    return found


def _fixed(trained: Trained, groups: Sequence[Group]) -> Iterator[StepBatch]:
    for start in range(0, len(groups), GROUPS_PER_STEP):
        yield trained.batch(groups[start : start + GROUPS_PER_STEP])


def _budgeted(trained: Trained, groups: Sequence[Group], budget: int) -> Iterator[StepBatch]:
    composer = ConstantTokens(tokens_per_step=2 * budget, budget=budget)
    waiting = WaitingGroups(BOUND, composer)
    waiting.advance(trained.version)
    for group in groups:
        waiting.add(group)
        while waiting.ready():
            yield make_batch(waiting.take(), trained.version, trained.advantages, BOUND, composer)


def _variation(values: Sequence[float]) -> float:
    """Return the standard deviation over the mean."""
    return statistics.stdev(values) / statistics.fmean(values)


# ---------------------------------------------------------------------------------------------------------------
# Speed, in simulated time

DEVICES, SAMPLES_PER_STEP, KNEE = 8, 256, 128.0
"""A fourth of PipelineRL's simulation: 32 devices, 1,024 samples per step, flat up to 128 sequences per device."""
SIMULATED_STEPS = 24


def speeds() -> list[dict[str, float]]:
    """PipelineRL over conventional RL in phases of 8 steps, by what a token costs in training.

    With as many completions in flight as make tokens no slower, and with fewer, so that none is ever older than 8.
    """
    rng = random.Random(0)
    lengths = [min(8192, max(1, round(rng.lognormvariate(math.log(1500), 0.9)))) for _ in range(20_000)]
    mean = statistics.fmean(lengths)
    found = []
    for cost in (0.004, 0.008):
        total = SAMPLES_PER_STEP * mean * cost
        split = best_split(DEVICES, lambda n: SAMPLES_PER_STEP * mean / (n * KNEE), lambda n, total=total: total / n)
        phases = _simulated(
            lengths,
            DEVICES,
            MAX_LAG * SAMPLES_PER_STEP // DEVICES,
            MAX_LAG,
            MAX_LAG * total / DEVICES,
            conventional=True,
        )
        for capacity in (128, 96):
            pipeline = _simulated(
                lengths, split.num_generating, capacity, 1, total / split.num_training, conventional=False
            )
            found.append(
                {
                    "cost": cost,
                    "num_generating": split.num_generating,
                    "num_training": split.num_training,
                    "capacity": capacity,
                    "ratio": pipeline.tokens_per_time / phases.tokens_per_time,
                    "lag_max": max(pipeline.group_lags),
                    "lag_mean": statistics.fmean(pipeline.group_lags),
                }
            )
    return found


def _simulated(
    lengths: Sequence[int], num_devices: int, capacity: int, steps: int, step_time: float, *, conventional: bool
) -> Any:
    history = HistoryStore()
    groups = steps * SAMPLES_PER_STEP
    return simulate(
        Setup(
            SCHEDULERS["least_loaded"](group_size=1, history=history),
            history,
            [Endpoint(f"device-{i}", capacity, TokenTime.roofline(1.0, KNEE)) for i in range(num_devices)],
            lambda item, _: Prompted((lengths[item % len(lengths)],), str(item)),
            groups,
            num_steps=SIMULATED_STEPS // steps,
            unit="groups",
            staleness=MaxLag(MAX_LAG),
            conventional_steps=int(conventional),
            trainer=TrainerCost(step_time),
        )
    )


PARTS = {"modes": modes, "losses": losses, "batches": batches, "speeds": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.only:
        found = PARTS[name]()
        print(name, _short(found), flush=True)
        rows = read_results("criteria")["rows"] if (DIRECTORY / "criteria.json").exists() else {}
        write_results("criteria", rows | {name: found})


def _short(value: Any) -> Any:
    """Return results with fewer digits."""
    if isinstance(value, dict):
        return {key: _short(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_short(of) for of in value]
    return round(value, 4)


if __name__ == "__main__":
    main()
