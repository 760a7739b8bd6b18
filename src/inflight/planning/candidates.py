"""A candidate configuration, and its simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.planning.calibration import Costs
from inflight.planning.costs import Endpoint, TrainerCost
from inflight.planning.groups import Prompted
from inflight.planning.outcome import SimulationResult
from inflight.planning.setup import Setup
from inflight.planning.simulation import simulate
from inflight.planning.traces import RunMeasurements, Trace
from inflight.rollouts import HistoryStore, load_composer, load_scheduler, load_staleness


@dataclass(frozen=True)
class Candidate:
    """The settings that the planner chooses. Fields have the same names as in ``run.toml``."""

    num_endpoints: int
    max_concurrent: int
    group_size: int
    tokens_per_step: int
    conventional_steps: int = 0
    """Number of steps per phase in conventional mode; 0 means pipeline mode."""
    num_training_gpus: int = 1
    """Number of ranks among which the tokens of a step are divided."""
    max_lag: int = 8
    burst: int = 1
    scheduler: str = "least_loaded"
    scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    staleness: str = "max_lag"
    staleness_params: Mapping[str, Any] = field(default_factory=dict)
    composer: str = "token_budget"
    composer_params: Mapping[str, Any] = field(default_factory=dict)
    trains_on_equal_rewards: bool = False
    seed: int = 0


def candidate_of(directory: Path) -> Candidate:
    """Return the configuration of an existing run."""
    config = Trace.read(directory).config
    run, servers, train, rollouts = (config[name] for name in ("run", "servers", "train", "rollouts"))
    return Candidate(
        num_endpoints=servers["count"],
        max_concurrent=servers["max_concurrent"],
        group_size=config["sampling"]["group_size"],
        tokens_per_step=train["tokens_per_worker"] * train["num_ranks"],
        conventional_steps=run["conventional_steps"] if run["mode"] == "conventional" else 0,
        trains_on_equal_rewards=train["train_on_equal_rewards"],
        seed=run["seed"],
        burst=rollouts.get("burst", 1),  # older runs do not have this setting
        **{
            key: rollouts[key]
            for key in ("max_lag", "scheduler", "scheduler_params", "staleness", "staleness_params",
                        "composer", "composer_params")
        },
    )  # fmt: skip


def prompted_of(costs: Costs, group_size: int) -> Callable[[int, int], Prompted]:
    """Return the function that draws the outcome of an item at a version. Raises `ConfigError` if lengths are
    unknown."""
    if costs.prompted is None:
        raise ConfigError(
            "the lengths of completions are unknown: add [prompts] to the plan, or measure them with --from RUN_DIR"
        )
    return costs.prompted(group_size)


def simulate_candidate(costs: Costs, candidate: Candidate, num_steps: int) -> SimulationResult:
    """Simulate a configuration. Raises `ConfigError` if a policy does not accept its parameters."""
    history = HistoryStore()
    scheduler = load_scheduler(
        candidate.scheduler,
        candidate.scheduler_params,
        group_size=candidate.group_size,
        history=history,
        seed=candidate.seed,
    )
    capacity = max(candidate.max_concurrent, candidate.group_size)  # as the run does: a group is one request
    endpoint = Endpoint(
        "",
        capacity,
        costs.token_time,
        costs.context_time,
        costs.prompt_token_time,
        costs.admission_time,
        costs.admission_time_each,
        costs.request_time,
        costs.tokens_per_forward,
        mean_time_to_failure=costs.mean_time_to_failure,
        restart_time=costs.restart_time,
    )
    per_token = costs.trainer.per_token / candidate.num_training_gpus
    return simulate(
        Setup(
            scheduler,
            history,
            [dataclasses.replace(endpoint, name=f"endpoint-{i}") for i in range(candidate.num_endpoints)],
            prompted_of(costs, candidate.group_size),
            candidate.tokens_per_step,
            num_steps,
            staleness=load_staleness(candidate.staleness, candidate.staleness_params, candidate.max_lag),
            composer=load_composer(candidate.composer, candidate.composer_params, candidate.tokens_per_step),
            conventional_steps=candidate.conventional_steps,
            burst=candidate.burst,
            trainer=TrainerCost(costs.trainer.per_step, per_token),
            publish=costs.publish.with_endpoints(candidate.num_endpoints),
            contention=costs.contention,
            whole_requests=True,
            score_time=costs.score_time,
            trains_on_equal_rewards=candidate.trains_on_equal_rewards,
        )
    )


def predict(costs: Costs, candidate: Candidate, num_steps: int, num_skipped: int) -> RunMeasurements:
    """Return the predicted measurements of a run after its first ``num_skipped`` steps."""
    steady = simulate_candidate(costs, candidate, num_steps).steady(num_skipped)
    return RunMeasurements(steady.tokens_per_time, steady.steps_per_time, steady.age, steady.lag)
