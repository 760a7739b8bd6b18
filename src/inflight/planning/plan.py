"""The input of ``inflight plan``, read from TOML: the machine, its costs, and the configurations to try."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from inflight.base.toml import Section, load_settings
from inflight.contracts import DEFAULT_MAX_CONCURRENT
from inflight.errors import ConfigError
from inflight.planning.costs import Links, TokenTime
from inflight.planning.groups import Prompted


class HardwareSection(Section):
    """The GPUs that are divided between endpoints and the trainer."""

    gpus: int = Field(ge=2)
    gpus_per_endpoint: int = Field(default=1, ge=1)
    trainer_unit: int = Field(default=1, ge=1)
    """The number of trainer GPUs must be a multiple of this."""


class GenerationSection(Section):
    """The costs of one endpoint."""

    token_s: tuple[tuple[float, float], ...]
    """Pairs (running completions, seconds per token) in ascending order, as ``inflight bench engine`` prints them."""
    max_concurrent: int = Field(default=DEFAULT_MAX_CONCURRENT, ge=1)
    conventional_max_concurrent: int | None = Field(default=None, ge=1)
    """``max_concurrent`` in conventional mode, where trainer and endpoints share GPU memory. None means the same
    value."""
    prompt_token_s: float = Field(default=0.0, ge=0)
    request_s: float = Field(default=0.0, ge=0)
    drafted_tokens: float = Field(default=0.0, ge=0)
    """Mean number of drafted tokens that are accepted per verification."""
    mean_hours_to_failure: float | None = Field(default=None, gt=0)
    """Mean time to failure of one endpoint. None means that it never fails."""
    restart_s: float = Field(default=60.0, ge=0)


class TrainingSection(Section):
    """The costs of one optimizer step. The cost per token is divided by the number of trainer GPUs."""

    step_s: float = Field(default=0.0, ge=0)
    token_gpu_s: float = Field(gt=0)
    """GPU seconds for one token, forward and backward."""


class LinksSection(Section):
    """The links over which weights are sent."""

    weights_gb: float = Field(gt=0)
    sender_gbit_per_s: float = Field(gt=0)
    """Bandwidth of each sending trainer host's link."""
    endpoint_gbit_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth of each endpoint host's link. None means the same as for senders."""
    senders: int = Field(default=1, ge=1)
    """Number of trainer hosts that send: 1 unless ``updates.sharded`` is set."""
    forwarded: bool = False
    """Whether endpoints forward what they receive, as over the transport gloo."""

    def links(self) -> Links:
        """Return the links, converted to bytes and bytes per second."""
        of_endpoint = self.endpoint_gbit_per_s or self.sender_gbit_per_s
        return Links(
            size_bytes=1e9 * self.weights_gb,
            num_senders=self.senders,
            sender_bytes_per_s=1.25e8 * self.sender_gbit_per_s,
            endpoint_bytes_per_s=1.25e8 * of_endpoint,
            are_forwarded=self.forwarded,
        )


class PublishSection(Section):
    """The time from the end of a step until its version is served."""

    total_s: float = Field(default=0.0, ge=0)
    """The constant part. If there are links, the time of the transfer is added to it."""
    pause_s: float = Field(default=0.0, ge=0)
    links: LinksSection | None = None


class PromptsSection(Section):
    """The distribution of completion lengths: log-normal across prompts, and across the completions of one prompt."""

    median_tokens: float = Field(gt=0)
    sigma: float = Field(default=0.9, ge=0)
    """Standard deviation of the logarithm across prompts."""
    sigma_within: float = Field(default=0.15, ge=0)
    """Standard deviation of the logarithm across completions of one prompt."""
    max_tokens: int = Field(ge=1)
    prompt_tokens: int = Field(default=0, ge=0)
    num_prompts: int = Field(default=1_000_000, ge=1)
    """Number of distinct prompts. If more items are sampled, prompts repeat in later epochs and then have a history."""
    environment_s: float = Field(default=0.0, ge=0)
    """Mean time in the environment per completion, exponentially distributed. The completion holds its slot during this
    time."""

    def prompted(self, group_size: int, seed: int, item: int) -> Prompted:
        """Return the simulated outcome of an item."""
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
NonEmpty = Annotated[tuple[T, ...], Field(min_length=1)]


class SearchSection(Section):
    """The values to try, in every combination."""

    mode: tuple[Literal["pipeline", "conventional"], ...] = ("pipeline", "conventional")
    endpoints: NonEmpty[int] | None = None
    """None means about ten splits of the GPUs in ``[hardware]`` or, without that section, the number in the measured
    run."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """None means the value of the measured run."""
    group_size: NonEmpty[int] | None = None
    max_lag: NonEmpty[int] = (1, 2, 4, 8)
    """Applies to pipeline mode only."""
    conventional_steps: NonEmpty[int] = (1, 4)
    max_concurrent: NonEmpty[int] | None = None
    scheduler: NonEmpty[str] = ("least_loaded",)
    num_steps: int = Field(default=24, ge=4)
    """Number of simulated steps; the first fifth is excluded from averages."""
    seed: int = 0


class SearchPlan(Section):
    """A plan. Values that it omits are measured from the runs given with ``--from``."""

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
    """Return the plan in a TOML file. Raises a `ConfigError` that names the key and the value."""
    return load_settings(SearchPlan, path, "plan")
