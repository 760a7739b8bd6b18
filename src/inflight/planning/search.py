"""Simulates every configuration of a plan, and finds the Pareto front of speed and token age."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from inflight.errors import ConfigError
from inflight.planning.calibration import Costs
from inflight.planning.candidates import Candidate, prompted_of, simulate_candidate
from inflight.planning.costs import Contention, PublishCost, TokenTime, TrainerCost
from inflight.planning.outcome import Steady
from inflight.planning.plan import SearchPlan

_NUM_SPLITS = 10
_MAX_COMPLETIONS = 50_000_000
"""Maximum number of completions in all simulations of a search. At about 20,000 per second, this takes most of an
hour."""


@dataclass(frozen=True, slots=True)
class EvaluatedCandidate:
    """A configuration and its simulated outcome."""

    candidate: Candidate
    steady: Steady
    num_dropped: int
    """Number of groups that no step trained on."""


def costs_of(plan: SearchPlan, measured: Costs | None) -> Costs:
    """Return the costs in a plan, completed with measured ones. Raises `ConfigError` if both lack a value."""
    if measured is None:
        missing = [it for it in ("generation", "training", "prompts", "hardware") if getattr(plan, it) is None]
        if missing:
            raise ConfigError(
                f"the plan has no section {', '.join(missing)}: add it, or measure it with --from RUN_DIR"
            )
        blank = PublishCost()
        measured = Costs(TokenTime(((1.0, 1.0),)), 0.0, Contention(), TrainerCost(), blank, 0.0)
    costs = measured
    if plan.hardware is not None:  # every endpoint has its own GPUs
        costs = dataclasses.replace(costs, contention=Contention())
    if (generation := plan.generation) is not None:
        failing = generation.mean_hours_to_failure
        costs = dataclasses.replace(
            costs,
            token_time=TokenTime(generation.token_s),
            context_time=0.0,
            admission_time=0.0,
            admission_time_each=0.0,
            request_time=generation.request_s,
            prompt_token_time=generation.prompt_token_s,
            tokens_per_forward=1.0 + generation.drafted_tokens,
            mean_time_to_failure=math.inf if failing is None else 3600 * failing,
            restart_time=generation.restart_s,
        )
    if (training := plan.training) is not None:
        costs = dataclasses.replace(costs, trainer=TrainerCost(training.step_s, training.token_gpu_s))
    if (publish := plan.publish) is not None:
        links = None if publish.links is None else publish.links.links()
        costs = dataclasses.replace(costs, publish=PublishCost(publish.total_s, publish.pause_s, links=links))
    if (prompts := plan.prompts) is not None:
        seed = plan.search.seed
        costs = dataclasses.replace(
            costs, prompted=lambda group_size: lambda item, _: prompts.prompted(group_size, seed, item)
        )
    return costs


def candidates(plan: SearchPlan, base: Candidate | None, *, knows_lengths: bool = True) -> Iterator[Candidate]:
    """Yield every combination of the plan; ``base`` is the configuration of the measured run.

    If ``knows_lengths`` is set and the plan has no ``[prompts]``, lengths come from measured groups, so that only the
    group size of the measured run can be tried.
    """
    search, hardware, generation = plan.search, plan.hardware, plan.generation
    if base is None:
        if search.tokens_per_step is None or search.group_size is None or generation is None:
            raise ConfigError("without --from, a plan needs search.tokens_per_step, search.group_size and [generation]")
        base = Candidate(1, generation.max_concurrent, search.group_size[0], search.tokens_per_step,
                         trains_on_equal_rewards=True)  # fmt: skip
    sizes = search.group_size or (base.group_size,)
    if knows_lengths and plan.prompts is None and {*sizes} != {base.group_size}:
        raise ConfigError(
            f"the run has groups of {base.group_size}, and lengths for other group sizes are unknown: add [prompts], "
            f"or set search.group_size = [{base.group_size}]"
        )
    base = dataclasses.replace(
        base, tokens_per_step=search.tokens_per_step or base.tokens_per_step, conventional_steps=0
    )
    policies = [
        {"conventional_steps": 0, "max_lag": lag, "scheduler": scheduler}
        for lag, scheduler in itertools.product(search.max_lag, search.scheduler)
        if "pipeline" in search.mode
    ] + [
        {"conventional_steps": steps, "scheduler": scheduler, "max_lag": max(steps, base.max_lag)}
        for steps, scheduler in itertools.product(search.conventional_steps, search.scheduler)
        if "conventional" in search.mode
    ]
    room = search.max_concurrent or (generation.max_concurrent if generation else base.max_concurrent,)
    for group_size, max_concurrent, policy in itertools.product(sizes, room, policies):
        own = dataclasses.replace(base, group_size=group_size, max_concurrent=max_concurrent, **policy)  # type: ignore[arg-type]
        if hardware is None:
            counts = search.endpoints or (base.num_endpoints,)
            yield from (dataclasses.replace(own, num_endpoints=num) for num in counts)
        elif own.conventional_steps:
            shared = generation.conventional_max_concurrent if generation else None
            yield dataclasses.replace(
                own,
                num_endpoints=hardware.gpus // hardware.gpus_per_endpoint,
                num_training_gpus=hardware.gpus,
                max_concurrent=min(max_concurrent, shared or max_concurrent),
            )
        else:
            for num in search.endpoints or splits(hardware.gpus, hardware.gpus_per_endpoint, hardware.trainer_unit):
                rest = hardware.gpus - num * hardware.gpus_per_endpoint
                num_training = rest // hardware.trainer_unit * hardware.trainer_unit
                if num_training < 1:
                    raise ConfigError(
                        f"search.endpoints: {num} endpoints of {hardware.gpus_per_endpoint} GPUs each leave none of "
                        f"the {hardware.gpus} GPUs for training; lower search.endpoints"
                    )
                yield dataclasses.replace(own, num_endpoints=num, num_training_gpus=num_training)


def splits(gpus: int, per_endpoint: int, unit: int) -> list[int]:
    """Return about ten evenly spaced numbers of endpoints; the largest leaves one unit for the trainer."""
    most = (gpus - unit) // per_endpoint
    if most < 1:
        raise ConfigError(f"{gpus} GPUs are too few for an endpoint of {per_endpoint} GPUs and a trainer of {unit}")
    return sorted({max(1, round(most * i / _NUM_SPLITS)) for i in range(1, _NUM_SPLITS + 1)})


def evaluate_candidate(costs: Costs, candidate: Candidate, num_steps: int) -> EvaluatedCandidate:
    """Simulate one configuration."""
    outcome = simulate_candidate(costs, candidate, num_steps)
    return EvaluatedCandidate(candidate, outcome.steady(num_steps // 5), outcome.dropped.total())


def search(
    costs: Costs, wanted: Sequence[Candidate], num_steps: int, on_progress: Callable[[int], None] = lambda _: None
) -> list[EvaluatedCandidate]:
    """Return the outcomes of simulated configurations; ``on_progress`` receives the number that have been simulated.

    Raises `ConfigError` if the search would take hours.
    """
    num = sum(num_completions(costs, candidate, num_steps) for candidate in wanted)
    if num > _MAX_COMPLETIONS:
        raise ConfigError(
            f"{len(wanted)} configurations of {num_steps} steps would simulate about {num:,.0f} completions, and more "
            f"than {_MAX_COMPLETIONS:,} take hours: lower hardware.gpus, search.num_steps or search.tokens_per_step, "
            "or search fewer configurations"
        )
    found = []
    for candidate in wanted:
        found.append(evaluate_candidate(costs, candidate, num_steps))
        on_progress(len(found))
    return found


def num_completions(costs: Costs, candidate: Candidate, num_steps: int) -> float:
    """Return the approximate number of completions of a simulation: the completions in its steps plus those that
    fill the slots."""
    prompted = prompted_of(costs, candidate.group_size)
    groups = [prompted(item, 0) for item in range(32)]
    tokens = statistics.fmean(length + it.num_prompt_tokens for it in groups for length in it.lengths)
    return num_steps * candidate.tokens_per_step / tokens + candidate.num_endpoints * candidate.max_concurrent


def pareto(found: Sequence[EvaluatedCandidate]) -> list[EvaluatedCandidate]:
    """Return the Pareto front, fastest first: the configurations with younger tokens than any faster one."""
    best: list[EvaluatedCandidate] = []
    for it in sorted(found, key=lambda it: (-it.steady.tokens_per_time, it.steady.lag)):
        if not best or it.steady.lag < best[-1].steady.lag:
            best.append(it)
    return best
