"""The configuration of a run: one typed model, read from TOML; every field can be overridden on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from inflight.base.toml import Section, load_settings
from inflight.base.transport_registry import find_transport
from inflight.errors import ConfigError
from inflight.losses import Kl, PolicyLoss, preset
from inflight.model.lora_settings import LoraSettings
from inflight.model.optimizer_settings import OptimizerSettings
from inflight.rollouts import AdvantageEstimator, Credit
from inflight.rollouts.critic import Target
from inflight.run.fleet_config import ServersSection
from inflight.run.updates_config import UpdatesSection


def _listed(value: object) -> object:
    """Return the parts of a text that has commas between them, as it comes from the command line."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class RunSection(Section):
    """What kind of run, how long, and where its files go."""

    directory: Path
    mode: Literal["pipeline", "conventional"] = "pipeline"
    """``pipeline``: generation never stops. ``conventional``: generate for G optimizer steps, then train them."""
    compress_events: bool = False
    """Whether files of events are compressed once they are full."""
    record: bool = False
    """Whether what decided each step is kept in the directory ``record``, for ``inflight replay``."""
    page: bool = False
    """Whether the run serves its page, as ``inflight watch`` does; its address is printed."""
    conventional_steps: int = Field(default=1, ge=1)
    """G of the conventional mode."""
    launcher: str = "local"
    """What starts servers and trainers: ``local``, children on this machine; ``ray``, processes on the hosts of a Ray
    cluster; ``outside``, a job that ``inflight launch`` emits; another entry point in the group
    ``inflight.launchers``, or ``module:attribute``."""
    launcher_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the launcher, such as ``{ address = "10.0.0.1:6379" }`` for ``ray``."""
    restarts: int = Field(default=0, ge=0)
    """How often all trainer ranks are started again from the last checkpoint, when one is lost and no checkpoint was
    made since the last time. Servers stay unchanged. 0: the run ends, and ``--resume`` continues it."""
    num_steps: int = Field(default=100, ge=1)
    stop_at_reward: float | None = None
    """End the run early once the mean reward over the last ten steps reaches this. None: never."""
    seed: int = 0
    checkpoint_every_steps: int = Field(default=50, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    background_saves: bool = False
    """Keep training while a checkpoint is written. Workers first copy their state, which takes host memory."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for the servers to start, and for one to come back once none is left."""
    step_timeout_s: float | None = Field(default=None, gt=0)
    """Longest wait for one batch of finished completions, or for one optimizer step and its publish. None: 900 s, and
    for a step what moving the weights may take in addition, at 0.5 GB/s."""
    save_timeout_s: float | None = Field(default=None, gt=0)
    """Longest wait for a checkpoint. None: 900 s, and what writing its bytes may take in addition, at 0.5 GB/s."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port on loopback where the run serves ``/metrics`` for Prometheus; 0: any free one. None: it serves none."""
    trackers: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Where people watch the run in addition to its directory: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``,
    another entry point in the group ``inflight.trackers``, or ``module:attribute``. A text with commas is a list.
    """
    tracker_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options by tracker, such as ``{ wandb = { project = "letters", mode = "offline" } }``."""


class ModelSection(Section):
    """The model that is trained and served."""

    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation in trainer and servers, and of published weights. Parameters: ``train.master_dtype``."""


class TaskSection(Section):
    """The task or environment: a reasoning-gym dataset, an entry point in the group ``inflight.tasks``, or
    ``module:factory``."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """Longest that the rewards of one group may take."""
    reward_processes: int = Field(default=0, ge=0)
    """Processes that score the groups of a task. 0: threads of the run, which rewards in Python slow down."""
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Longest that an episode of an environment may take."""
    extra_episodes: int = Field(default=0, ge=0)
    """Episodes of an environment that are begun beyond ``sampling.group_size``; the last to finish are abandoned."""


class SamplingSection(Section):
    """How completions are sampled."""

    group_size: int = Field(default=8, ge=2)
    temperature: float = Field(default=1.0, gt=0.0)
    max_tokens: int = Field(default=128, ge=1)
    generate_timeout_s: float = Field(default=600.0, gt=0)
    """Longest that a server may take to answer one request."""


class TrainSection(OptimizerSettings):
    """The workers and their optimizer."""

    trainer: str = "fsdp"
    """``fsdp``, ``torchtitan``, ``deepspeed``, another entry point in the group ``inflight.workers``, or
    ``module:attribute``: an `inflight.contracts.WorkerKind`."""
    trainer_options: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the workers, such as ``{ cpu_offload = true }``: see `inflight_fsdp.WorkerConfig`."""
    lora: LoraSettings | None = None
    """Train and publish a LoRA instead of the model's weights, with a trainer that can: ``fsdp``."""
    num_ranks: int = Field(default=1, ge=1)
    device: Literal["cpu", "cuda"] | None = None
    """None: a GPU for each rank if there are any."""
    devices: tuple[NonNegativeInt, ...] | None = None
    """The GPU of each rank. None: any that are free."""
    place: str | None = None
    """Where the ranks run, as the launcher names places. None: anywhere, close to one another if possible."""
    threads: int = Field(default=1, ge=1)
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained parameters and the optimizer's moments, independent of ``model.dtype``.

    ``bfloat16`` halves their memory and loses updates that are smaller than a weight's rounding; the run reports what
    share that is."""
    tokens_per_worker: int = Field(default=4096, ge=1)
    """A step begins once this many training tokens (prompts and completions) per worker have accumulated."""
    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    router_replay: bool = False
    """Whether each token is computed with the experts that sampled it, not with those that the trainer's routers would
    choose. For mixtures of experts; the servers and the trainer must support it."""
    train_on_equal_rewards: bool = False
    """Groups whose rewards are all equal have no advantage; by default the run counts them without training on them."""

    @model_validator(mode="after")
    def _sets_each_option_once(self) -> TrainSection:
        known = {"device", "lora", "master_dtype", *OptimizerSettings.model_fields}
        if twice := sorted(known & self.trainer_options.keys()):
            raise ValueError(f"trainer_options.{twice[0]} is a setting of [train]: write train.{twice[0]} instead")
        return self


class LossSection(Section):
    """Policy loss and advantages."""

    preset: str = "pipelinerl_paper"
    """A name that ``inflight losses`` lists."""
    policy: PolicyLoss | None = None
    """A loss made of pieces, instead of a preset."""
    advantages: AdvantageEstimator | None = None
    """None: the preset's, or ``leave_one_out`` with a ``policy``."""
    reference_kl: float = Field(default=0.0, ge=0)
    """If above 0: coefficient of a KL penalty towards the initial model, which replaces the loss's own KL penalty."""

    @model_validator(mode="after")
    def _names_one_loss(self) -> LossSection:
        if self.policy is not None and "preset" in self.model_fields_set:
            raise ValueError(f"both preset ({self.preset!r}) and policy are set: leave one out")
        return self

    def policy_loss(self) -> PolicyLoss:
        """Return the loss with its KL penalty. Raises `ConfigError` if it is unknown or no worker can run it."""
        loss = self.policy or preset(self.preset).loss
        if "entropy" in loss.needs:
            raise ConfigError("loss.policy has an entropy bonus, but no worker computes entropies: leave it out")
        if self.reference_kl == 0:
            return loss
        others = tuple(penalty for penalty in loss.penalties if not isinstance(penalty, Kl))
        return loss.model_copy(update={"penalties": (*others, Kl(coefficient=self.reference_kl))})

    def estimator(self) -> AdvantageEstimator:
        """Return the estimator of advantages. Raises `ConfigError` if the preset is unknown."""
        if self.advantages is not None:
            return self.advantages
        return "leave_one_out" if self.policy is not None else preset(self.preset).advantages


class RolloutsSection(Section):
    """Which completions run where and when, which tokens are too old, and which groups make up an optimizer step.

    Other policies than those that ``inflight policies`` lists are entry points in the groups ``inflight.schedulers``,
    ``inflight.staleness`` and ``inflight.composers``, or ``module:attribute``.
    """

    max_lag: int = Field(default=8, ge=0)
    """Largest lag, in versions, of a trained token."""
    scheduler: str = "least_loaded"
    """Constructed with ``sampling.group_size``, ``run.seed`` and ``scheduler_params``."""
    scheduler_params: dict[str, Any] = Field(default_factory=dict)
    staleness: str = "max_lag"
    """Constructed with ``max_lag`` and ``staleness_params``."""
    staleness_params: dict[str, Any] = Field(default_factory=dict)
    min_ess: float | None = Field(default=None, gt=0, le=1)
    """Least effective sample size of a step, as a share of its tokens. None: any."""
    on_low_ess: Literal["wait", "stop"] = "wait"
    """Below it, ``wait`` trains next only on tokens sampled since, and ``stop`` ends the run."""
    credit: Credit = "episode"
    """What a token's advantage is made of in an environment: see `inflight.rollouts.credit`."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Of later rewards, per turn, where ``credit`` is ``return`` or ``critic``."""
    critic_target: Target = "monte_carlo"
    """What the critic of ``credit = "critic"`` learns from: ``monte_carlo`` returns, or ``td``."""
    composer: str = "token_budget"
    """Constructed with the tokens of a step over all workers, and ``composer_params``."""
    composer_params: dict[str, Any] = Field(default_factory=dict)


class RunConfig(Section):
    """One run."""

    run: RunSection
    model: ModelSection
    task: TaskSection
    sampling: SamplingSection = SamplingSection()
    servers: ServersSection = ServersSection()
    updates: UpdatesSection = UpdatesSection()
    train: TrainSection = TrainSection()
    loss: LossSection = LossSection()
    rollouts: RolloutsSection = RolloutsSection()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.sampling.group_size > self.servers.fewest_slots:
            raise ValueError(
                f"sampling.group_size {self.sampling.group_size} exceeds servers.max_concurrent "
                f"{self.servers.fewest_slots}: a group would never run as a whole"
            )
        if self.sampling.max_tokens >= self.train.max_tokens_per_micro_batch:
            raise ValueError(
                f"sampling.max_tokens {self.sampling.max_tokens} and a prompt do not fit into "
                f"train.max_tokens_per_micro_batch {self.train.max_tokens_per_micro_batch}: lower the first or "
                "raise the second"
            )
        if self.servers.release_memory and self.run.mode != "conventional":
            raise ValueError(
                "servers.release_memory needs run.mode 'conventional', in which servers wait while the trainers train: "
                f"in mode {self.run.mode!r} they sample all the time and need their memory"
            )
        if self.run.mode == "conventional" and self.run.conventional_steps - 1 > self.rollouts.max_lag:
            raise ValueError(
                f"run.conventional_steps {self.run.conventional_steps} trains on tokens of lag "
                f"{self.run.conventional_steps - 1}, but rollouts.max_lag {self.rollouts.max_lag} masks them: raise it"
            )
        return self

    @model_validator(mode="after")
    def _updates_reach_the_servers(self) -> RunConfig:
        servers, updates = self.servers, self.updates
        num_servers = len(servers.attach.urls) + len(servers.started)
        if not servers.attach.others_may_come and updates.quorum is not None and updates.quorum > num_servers:
            raise ValueError(f"updates.quorum {updates.quorum} exceeds the number of servers, {num_servers}")
        if updates.mode == "pull":
            if foreign := [member.engine for member in servers.members if not member.kind.runs_in_process]:
                raise ValueError(
                    f"updates.mode 'pull' needs servers that load stored versions, but {foreign[0]} does not: "
                    "use engine 'embedded'"
                )
            if servers.release_memory:
                raise ValueError(
                    "updates.mode 'pull' loads versions at any time, but servers.release_memory takes their memory "
                    "away: set updates.mode to 'push'"
                )
        if servers.release_memory and updates.delta and find_transport(updates.transport).needs_gpu:
            raise ValueError(
                f"updates.delta over {updates.transport!r} keeps a copy of the weights in GPU memory, which "
                "servers.release_memory does not free: leave out one of them, or choose transport 'shm'"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step over all workers."""
        return self.train.tokens_per_worker * self.train.num_ranks


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a TOML file, with overrides: see `load_settings`."""
    return load_settings(RunConfig, path, "configuration", overrides)
