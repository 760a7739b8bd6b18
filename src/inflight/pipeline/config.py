"""The configuration of a run: one typed model, read from TOML, every field overridable on the command line."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_validator

from inflight.errors import ConfigError
from inflight.losses import Kl, PolicyLoss, preset
from inflight.rollouts import AdvantageEstimator
from inflight.weights.encoding import Rounding
from inflight.wire import Backend, InFlightPolicy


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """What kind of run, for how long, and where it is written."""

    directory: Path
    mode: Literal["pipeline", "conventional"] = "pipeline"
    """``pipeline``: generation never stops. ``conventional``: generate for G optimizer steps, then train them."""
    conventional_steps: int = Field(default=1, ge=1)
    """G of the conventional mode."""
    num_steps: int = Field(default=100, ge=1)
    stop_at_reward: float | None = None
    """End the run early once the mean reward over the last ten steps reaches this; None: never."""
    seed: int = 0
    checkpoint_every_steps: int = Field(default=50, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    background_saves: bool = False
    """Train on while a checkpoint is written. The workers copy their state first, which takes host memory for it."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for the servers to start, and for one of them to come back once none is left."""
    step_timeout_s: float = Field(default=900.0, gt=0)
    """Longest wait for one batch of finished completions, or for one optimizer step."""


class ModelSection(Section):
    """The model that is trained and served."""

    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed by trainer and servers, and what is sent. What is trained is kept as ``train.master_dtype``."""


class TaskSection(Section):
    """The task: a reasoning-gym dataset by name, or ``module:factory``."""

    name: str
    params: dict[str, Any] = {}
    reward_timeout_s: float = Field(default=60.0, gt=0)


class SamplingSection(Section):
    """How completions are sampled."""

    group_size: int = Field(default=8, ge=2)
    temperature: float = Field(default=1.0, gt=0.0)
    max_tokens: int = Field(default=128, ge=1)


_OF_ONE_KIND = ("engine", "count", "python", "engine_arguments")
"""Fields of the servers section that say what to start, if all are started alike."""


class FleetMember(Section):
    """``count`` servers that are started alike."""

    engine: str = "local"
    """``local``, the embedded engine, or an entry point in the group ``inflight.engines``."""
    count: int = Field(default=1, ge=1)
    python: Path | None = None
    """Interpreter of the engine's virtual environment; None: the one that runs this."""
    engine_arguments: tuple[str, ...] = ()
    """Further arguments of the engine's own command line."""
    max_concurrent: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _embedded_engine_takes_none(self) -> FleetMember:
        _check_embedded(self)
        return self


class ServersSection(Section):
    """The fleet: servers started by the run, ``count`` of one engine or a mixed ``fleet``, or running ones by URL."""

    engine: str = "local"
    count: int = Field(default=1, ge=1)
    python: Path | None = None
    engine_arguments: tuple[str, ...] = ()
    fleet: tuple[FleetMember, ...] = ()
    """Tables of a mixed fleet, in the place of ``engine``, ``count``, ``python`` and ``engine_arguments``."""
    urls: tuple[str, ...] = ()
    """Servers to attach to; when given, none is started. The control token is read from INFLIGHT_TOKEN.

    ``http://...`` speaks the contract; ``vllm+http://...`` and ``sglang+http://...`` are the engines' own servers.
    """
    urls_file: Path | None = None
    """File with one URL per line, read again and again: new lines join while the run goes on, removed ones leave.

    Besides ``urls``, or servers that the run starts; alone, it starts none.
    """
    max_concurrent: int = Field(default=64, ge=1)
    threads: int = Field(default=1, ge=1)
    device: str | None = None
    in_flight: InFlightPolicy = InFlightPolicy.KEEP
    publish_deadline_s: float = Field(default=60.0, gt=0)
    backend: Backend = "gloo"
    """How weights travel: broadcast (``gloo``, ``nccl``), or stored and read (``shm``, ``file``, ``http``)."""
    updates: Literal["push", "pull"] = "push"
    """``push``: each publish waits for the servers. ``pull``: versions are stored, and servers take the newest one."""
    directory: Path | None = None
    """Where ``file`` stores weights: on a file system that the trainer and every server see by this path."""
    quorum: int | None = Field(default=None, ge=1)
    """How many servers have to hold each version; with fewer the run waits. None: all that can be reached, or one."""
    encoding: Rounding = "raw"
    """``bfloat16`` and ``float8`` round weights on the way, for fewer bytes."""
    delta: bool = False
    """Send only what changed since the last publish, for one more copy of the weights in memory on each side."""
    staged: bool = True
    """Sample on while weights arrive, on the servers that can; they hold a second copy of the weights meanwhile."""
    generate_timeout_s: float = Field(default=600.0, gt=0)

    @property
    def members(self) -> tuple[FleetMember, ...]:
        """What is to be started; nothing if there are URLs, or a file of them and no word of what to start."""
        is_told = not self.model_fields_set.isdisjoint(("fleet", *_OF_ONE_KIND))
        if self.urls or (self.urls_file is not None and not is_told):
            return ()
        if not self.fleet:
            return (
                FleetMember(
                    engine=self.engine,
                    count=self.count,
                    python=self.python,
                    engine_arguments=self.engine_arguments,
                    max_concurrent=self.max_concurrent,
                ),
            )
        inherited = {"max_concurrent": self.max_concurrent}
        return tuple(
            member if "max_concurrent" in member.model_fields_set else member.model_copy(update=inherited)
            for member in self.fleet
        )

    @model_validator(mode="after")
    def _says_once_what_to_start(self) -> ServersSection:
        alike = [name for name in _OF_ONE_KIND if name in self.model_fields_set]
        if self.fleet and alike:
            raise ValueError(f"servers.fleet replaces servers.{alike[0]}: write it in the fleet's tables")
        started = [name for name in ("fleet", "engine") if name in self.model_fields_set]
        if self.urls and started:
            raise ValueError(
                f"servers.urls attaches to running servers and starts none: leave servers.{started[0]} out, or the urls"
            )
        _check_embedded(self)
        return self

    @model_validator(mode="after")
    def _says_once_how_weights_travel(self) -> ServersSection:
        if self.backend == "file" and self.directory is None:
            raise ValueError("servers.backend 'file' needs servers.directory, which the trainer and every server see")
        if self.backend != "file" and self.directory is not None:
            raise ValueError(
                f"servers.directory is for servers.backend 'file', and it is {self.backend!r}: leave one of them out"
            )
        if self.updates == "pull":
            if self.backend != "file":
                raise ValueError(
                    f"servers.updates 'pull' stores versions in servers.directory, and servers.backend is "
                    f"{self.backend!r}: set it to 'file'"
                )
            if self.delta or self.quorum is not None:
                raise ValueError("servers.updates 'pull' waits for nobody: leave servers.delta and servers.quorum out")
            if foreign := [member.engine for member in self.members if member.engine != "local"]:
                raise ValueError(
                    f"servers.updates 'pull' needs servers that follow, and {foreign[0]} does not: use engine 'local'"
                )
        if self.delta and self.encoding != "raw":
            raise ValueError(
                "servers.delta sends changed elements as they are, and servers.encoding is "
                f"{self.encoding!r}: leave one of them out"
            )
        return self


def _check_embedded(section: FleetMember | ServersSection) -> None:
    if section.engine == "local" and (section.python is not None or section.engine_arguments):
        raise ValueError("python and engine_arguments are for other engines, and engine is 'local': name the engine")


class TrainSection(Section):
    """The workers and their optimizer."""

    trainer: str = "fsdp"
    """``fsdp``, ``torchtitan``, or another entry point in the group ``inflight.workers``."""
    trainer_options: dict[str, Any] = {}
    """Further settings of its workers, such as ``{ cpu_offload = true }``: see `inflight_fsdp.WorkerConfig`."""
    num_ranks: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trained parameters and the optimizer's moments, whatever ``model.dtype`` is computed, served and sent.

    ``bfloat16`` halves their memory and loses the updates that are smaller than a weight's rounding: the run says how
    many those are."""
    tokens_per_worker: int = Field(default=4096, ge=1)
    """A step begins once this many training tokens (prompts and completions) have accumulated for each worker."""
    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    learning_rate: float = Field(default=1e-4, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_gradient_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    train_on_equal_rewards: bool = False
    """Groups whose rewards are all equal have no advantage; by default they are counted but not trained on."""


class LossSection(Section):
    """Policy loss, advantages and staleness."""

    preset: str = "pipelinerl_paper"
    """One of `inflight losses`."""
    policy: PolicyLoss | None = None
    """A loss put together from pieces, instead of a preset."""
    advantages: AdvantageEstimator | None = None
    """None: the preset's, and ``leave_one_out`` with a ``policy``."""
    reference_kl: float = Field(default=0.0, ge=0)
    """Above 0: coefficient of a KL penalty towards the model that the run starts from, in place of the loss's own."""
    max_lag: int = Field(default=8, ge=0)
    """Largest lag, in versions, of a token that is trained on."""

    @model_validator(mode="after")
    def _names_one_loss(self) -> LossSection:
        if self.policy is not None and "preset" in self.model_fields_set:
            raise ValueError(f"both preset ({self.preset!r}) and policy are set: which loss is it? Leave one out")
        return self

    def policy_loss(self) -> PolicyLoss:
        """Return the loss with its KL penalty. Raises `ConfigError` if the preset is unknown or cannot be run."""
        loss = self.policy or preset(self.preset).loss
        if "entropy" in loss.needs:
            raise ConfigError("loss.policy has an entropy bonus, which no worker gives entropies for: leave it out")
        if self.reference_kl == 0:
            return loss
        others = tuple(penalty for penalty in loss.penalties if not isinstance(penalty, Kl))
        return loss.model_copy(update={"penalties": (*others, Kl(coefficient=self.reference_kl))})

    def estimator(self) -> AdvantageEstimator:
        """Return the estimator of advantages. Raises `ConfigError` if the preset is unknown."""
        if self.advantages is not None:
            return self.advantages
        return "leave_one_out" if self.policy is not None else preset(self.preset).advantages


class RunConfig(Section):
    """One run."""

    run: RunSection
    model: ModelSection
    task: TaskSection
    sampling: SamplingSection = SamplingSection()
    servers: ServersSection = ServersSection()
    train: TrainSection = TrainSection()
    loss: LossSection = LossSection()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        limits = [member.max_concurrent for member in self.servers.members]
        if not limits or self.servers.urls_file is not None:
            limits.append(self.servers.max_concurrent)
        if self.sampling.group_size > min(limits):
            raise ValueError(
                f"sampling.group_size {self.sampling.group_size} exceeds servers.max_concurrent "
                f"{min(limits)}: a group would never run as a whole"
            )
        if self.sampling.max_tokens >= self.train.max_tokens_per_micro_batch:
            raise ValueError(
                f"sampling.max_tokens {self.sampling.max_tokens} and a prompt do not fit into "
                f"train.max_tokens_per_micro_batch {self.train.max_tokens_per_micro_batch}: lower the one or raise "
                "the other"
            )
        if self.run.mode == "conventional" and self.run.conventional_steps - 1 > self.loss.max_lag:
            raise ValueError(
                f"run.conventional_steps {self.run.conventional_steps} trains on tokens of lag "
                f"{self.run.conventional_steps - 1}, loss.max_lag {self.loss.max_lag} masks them: raise it"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step over all workers."""
        return self.train.tokens_per_worker * self.train.num_ranks


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a TOML file, with overrides such as ``["--train.learning_rate", "1e-4"]``.

    Raises `ConfigError` that names the key, the value, and for an unknown key the nearest one. Relative paths are
    taken from the current directory.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"configuration {str(path)!r} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration {str(path)!r} is not TOML: {error}") from error
    for key, value in _pairs(overrides):
        _set(values, key, value)
    try:
        return RunConfig.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(_explain(problem) for problem in error.errors(include_url=False))) from error


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    pairs, rest = [], list(overrides)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} is no override; write --section.field value")
        key, has_value, value = flag[2:].partition("=")
        if not has_value:
            if not rest:
                raise ConfigError(f"override {flag} has no value")
            value = rest.pop(0)
        pairs.append((key, value))
    return pairs


def _set(values: dict[str, Any], key: str, text: str) -> None:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override --{key}: {section!r} is a value, not a section")
    values[name] = value


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.0)
        prefix = "".join(f"{part}." for part in location[:-1])
        return f"unknown key {key!r}; did you mean {prefix}{nearest[0]}?"
    if problem["type"] == "missing":
        return f"key {key!r} is missing"
    return f"{key or 'configuration'}: {problem['msg']} (got {problem['input']!r})" if key else str(problem["msg"])


def _known_keys(sections: Sequence[str]) -> list[str]:
    model: Any = RunConfig
    for section in sections:
        if not section.isdigit():  # the index of a table in a list of them
            annotation = model.model_fields[section].annotation
            model = next(iter(get_args(annotation)), annotation)
    return list(model.model_fields)
