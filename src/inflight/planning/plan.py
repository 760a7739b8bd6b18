"""What ``inflight plan`` is asked: one typed model, read from TOML, of the machine, its costs and what to search."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from inflight.base.toml import Section, load_settings
from inflight.contracts import DEFAULT_MAX_CONCURRENT
from inflight.errors import ConfigError
from inflight.planning.costs import TokenTime
from inflight.planning.groups import Prompted


class HardwareSection(Section):
    """The GPUs that are divided between endpoints and trainer."""

    gpus: int = Field(ge=2)
    gpus_per_endpoint: int = Field(default=1, ge=1)
    trainer_unit: int = Field(default=1, ge=1)
    """GPUs of the trainer come in multiples of this."""


class GenerationSection(Section):
    """One endpoint."""

    token_s: tuple[tuple[float, float], ...]
    """(running completions, seconds of a token), ascending: the rows of ``inflight bench engine``, or a roofline."""
    max_concurrent: int = Field(default=DEFAULT_MAX_CONCURRENT, ge=1)
    conventional_max_concurrent: int | None = Field(default=None, ge=1)
    """Where trainer and endpoint share the memory of the same GPUs. None: the same."""
    prompt_token_s: float = Field(default=0.0, ge=0)
    request_s: float = Field(default=0.0, ge=0)
    drafted_tokens: float = Field(default=0.0, ge=0)
    """Drafted tokens that a verification accepts on average."""
    mean_hours_to_failure: float | None = Field(default=None, gt=0)
    """Of one endpoint. None: it never fails."""
    restart_s: float = Field(default=60.0, ge=0)


class TrainingSection(Section):
    """One optimizer step; what it costs for each token is divided by the trainer's GPUs."""

    step_s: float = Field(default=0.0, ge=0)
    token_gpu_s: float = Field(gt=0)
    """Seconds of one GPU for one token, forward and backward."""


class PublishSection(Section):
    """From the end of a step until its version is served."""

    total_s: float = Field(default=0.0, ge=0)
    pause_s: float = Field(default=0.0, ge=0)


class PromptsSection(Section):
    """Lengths of completions: log-normal between prompts, and among the completions of one prompt."""

    median_tokens: float = Field(gt=0)
    sigma: float = Field(default=0.9, ge=0)
    """Of the logarithm, between prompts."""
    sigma_within: float = Field(default=0.15, ge=0)
    """Of the logarithm, among completions of one prompt."""
    max_tokens: int = Field(ge=1)
    prompt_tokens: int = Field(default=0, ge=0)
    num_prompts: int = Field(default=1_000_000, ge=1)
    """Distinct ones: fewer than are sampled come back in later epochs, and have a history by then."""
    environment_s: float = Field(default=0.0, ge=0)
    """Time that the environment of one completion takes, exponential, in which its slot is held."""

    def prompted(self, group_size: int, seed: int, item: int) -> Prompted:
        """Return what is sampled for an item."""
        prompt = item % self.num_prompts
        draw = random.Random(f"{seed}:{prompt}").normalvariate(0.0, self.sigma)
        own = random.Random(f"{seed}:{prompt}:{item}")
        median = math.log(self.median_tokens)
        lengths = tuple(
            max(1, min(self.max_tokens, round(math.exp(median + draw + own.normalvariate(0.0, self.sigma_within)))))
            for _ in range(group_size)
        )
        waits = tuple(own.expovariate(1 / self.environment_s) for _ in lengths) if self.environment_s else ()
        return Prompted(lengths, str(prompt), self.prompt_tokens, waits=waits)


T = TypeVar("T")
Tried = Annotated[tuple[T, ...], Field(min_length=1)]


class SearchSection(Section):
    """What is tried: every combination."""

    mode: tuple[Literal["pipeline", "conventional"], ...] = ("pipeline", "conventional")
    endpoints: Tried[int] | None = None
    """None: with ``[hardware]`` about ten splits of its GPUs, else as many as the run had."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """None: as the run had."""
    group_size: Tried[int] | None = None
    max_lag: Tried[int] = (1, 2, 4, 8)
    """Of the pipeline."""
    conventional_steps: Tried[int] = (1, 4)
    max_concurrent: Tried[int] | None = None
    scheduler: Tried[str] = ("least_loaded",)
    num_steps: int = Field(default=24, ge=4)
    """Simulated steps; the first fifth is not counted."""
    seed: int = 0


class SearchPlan(Section):
    """A plan. What it leaves out is taken from the runs given with ``--from``."""

    hardware: HardwareSection | None = None
    generation: GenerationSection | None = None
    training: TrainingSection | None = None
    publish: PublishSection | None = None
    prompts: PromptsSection | None = None
    search: SearchSection = SearchSection()

    @model_validator(mode="after")
    def _curve_is_one(self) -> Self:
        if self.generation is not None:
            try:
                TokenTime(self.generation.token_s)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return self


def load_plan(path: Path) -> SearchPlan:
    """Return the plan in a TOML file. Raises `ConfigError`, which names the key and the value."""
    return load_settings(SearchPlan, path, "plan")
