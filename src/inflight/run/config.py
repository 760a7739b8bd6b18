"""The configuration of a run: a typed model read from TOML, with overrides from the command line."""

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
from inflight.rollouts.tasks import TaskSettings
from inflight.run.distillation_config import DistillationSection
from inflight.run.fleet_config import ServersSection
from inflight.run.updates_config import UpdatesSection
from inflight.wire import MIN_TEMPERATURE


def _split_commas(value: object) -> object:
    """Return the parts of a comma-separated string, and any other value unchanged."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class RunSection(Section):
    """The mode and the length of the run, and where it writes its files."""

    directory: Path
    """The directory that the run writes to. A directory that holds a checkpoint can be used only with ``--resume``."""
    mode: Literal["pipeline", "conventional"] = "pipeline"
    """``pipeline`` trains while generation continues. ``conventional`` alternates: it generates the data of
    ``conventional_steps`` optimizer steps, then trains on it."""
    compress_events: bool = False
    """Compress each file of events once it is full."""
    record: bool = False
    """Record the inputs and results of each step in the directory ``record``, for ``inflight replay``."""
    page: bool = False
    """Serve a web page about the run, as ``inflight watch`` does, and print its address."""
    conventional_steps: int = Field(default=1, ge=1)
    """The number of optimizer steps per phase in conventional mode."""
    launcher: str = "local"
    """What starts the servers and trainers: ``local`` (child processes on this machine), ``ray`` (processes on the
    hosts of a Ray cluster), ``outside`` (a job that ``inflight launch`` emits), another entry point
    in the group ``inflight.launchers``, or ``module:attribute``."""
    launcher_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the launcher, such as ``{ address = "10.0.0.1:6379" }`` for ``ray``."""
    restarts: int = Field(default=3, ge=0)
    """How many times in a row, without a new checkpoint in between, the run may restart all trainer ranks from the last
    checkpoint after one of them is lost. The servers keep running. If a rank is lost before the first step, the run
    ends. With 0, the loss of a rank always ends the run, and ``--resume`` continues it.
    """
    num_steps: int = Field(default=100, ge=1)
    """The number of optimizer steps after which the run ends."""
    stop_at_reward: float | None = None
    """End the run early once the mean reward over the last ten steps reaches this value. If not set, the run takes all
    steps.
    """
    seed: int = 0
    """The seed for the order of items, for sampling and for the policies."""
    checkpoint_every_steps: int = Field(default=50, ge=1)
    """Save a checkpoint each time this many steps have been trained."""
    checkpoint_every_s: float = Field(default=60.0, gt=0)
    """Also save a checkpoint after a step if both this many seconds and 20 times the duration of the last save have
    passed since that save.
    """
    keep_checkpoints: int = Field(default=2, ge=1)
    """The number of checkpoints to keep; older ones are deleted."""
    background_saves: bool = False
    """Keep training while a checkpoint is written. The workers first copy their state to host memory."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long to wait for the servers to start and, after the loss of all servers, for one to come back."""
    step_timeout_s: float | None = Field(default=None, gt=0)
    """How long to wait for one batch of finished completions, or for one optimizer step and its publish. If not set,
    900 s; for a step, the time to move the weights at 0.5 GB/s is added.
    """
    save_timeout_s: float | None = Field(default=None, gt=0)
    """How long to wait for a checkpoint. If not set, 900 s plus the time to write its bytes at 0.5 GB/s."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Loopback port at which the run serves ``/metrics`` for Prometheus; 0 means any free port. If not set, no metrics
    are served.
    """
    trackers: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = ()
    """Trackers that receive the metrics of the run: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``, another entry
    point in the group ``inflight.trackers``, or ``module:attribute``. Write a list or a comma-separated string.
    """
    tracker_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options for each tracker, such as ``{ wandb = { project = "letters", mode = "offline" } }``."""


class ModelSection(Section):
    """The model that is trained and served."""

    path: Path
    """The directory of a checkpoint in the format of transformers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which trainer and servers compute and in which weights are published. ``train.master_dtype`` sets the
    dtype of the trained parameters.
    """


class TaskSection(TaskSettings):
    """The task or environment, and how its episodes and rewards are computed."""

    system_prompt: str | None = None
    """The system message before each problem of a task. If not set, there is none, and some chat templates insert their
    own; an empty string prevents that.
    """
    reward_timeout_s: float = Field(default=60.0, gt=0)
    """How long the task may take to make an item, or to compute the rewards of one group."""
    reward_processes: int | None = Field(default=None, ge=0)
    """Number of processes that make the items of a task and compute its rewards; each scores one group at a time. If
    not set, one process scores several groups at once, each in a thread. With 0, threads of the run's own process do
    this work; they slow the run down if rewards are computed in Python, and block it if they hold the interpreter's
    lock.
    """
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """How long an episode of an environment may take."""
    extra_episodes: int = Field(default=0, ge=0)
    """Number of episodes of an environment to start in addition to ``sampling.group_size``. Episodes that still run
    when enough have finished are abandoned."""


class EvaluationSection(Section):
    """Problems of the task that the model answers greedily before the first step and after the last one.

    The run does not train on them, unless the task has so few distinct problems that they recur.
    """

    num_items: int = Field(default=0, ge=0)
    """Number of problems; the same ones are answered both times. With 0, nothing is evaluated."""
    num_shown: int = Field(default=3, ge=0)
    """Number of problems whose answers before and after training are printed at the end."""


class SamplingSection(Section):
    """How completions are sampled."""

    group_size: int = Field(default=8, ge=2, le=1024)
    """The number of completions that are sampled for each item and compared with each other."""
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=100.0)
    """The sampling temperature."""
    max_tokens: int = Field(default=128, ge=1, le=2**31 - 1)
    """The maximum number of tokens in a completion."""
    generate_timeout_s: float = Field(default=600.0, gt=0)
    """How long a server may take to answer one request."""


class TrainSection(OptimizerSettings):
    """The workers and their optimizer."""

    trainer: str = "fsdp"
    """The kind of worker: ``fsdp``, ``torchtitan``, ``deepspeed``, ``megatron``, another entry point in the group
    ``inflight.workers``, or ``module:attribute``, which names an `inflight.contracts.WorkerKind`.
    """
    trainer_options: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the workers, such as ``{ cpu_offload = true }``. For ``fsdp``, see
    `inflight_fsdp.WorkerConfig`."""
    lora: LoraSettings | None = None
    """Train and publish a LoRA adapter instead of the weights of the model. The trainer must support this, as
    ``fsdp`` does."""
    num_ranks: int = Field(default=1, ge=1)
    """The number of trainer processes."""
    device: Literal["cpu", "cuda"] | None = None
    """Where the ranks compute. If not set, each computes on its own GPU if there are any, and otherwise on the CPU."""
    devices: tuple[NonNegativeInt, ...] | None = None
    """The index of each rank's GPU. If not set, ranks use any free GPUs."""
    place: str | None = None
    """Where the ranks run, in the form that the launcher expects (see ``servers.place``). If not set, they run
    anywhere, close together if possible.
    """
    threads: int = Field(default=1, ge=1)
    """Number of threads of each rank. The default is 1. If the model has 10 million parameters or more, however, ranks
    that compute on the CPU of this machine divide its cores equally; threads sleep while they wait for each other, so
    that servers can use the cores.
    """
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained parameters and of the optimizer's moments, independent of ``model.dtype``.

    ``bfloat16`` halves their memory, but loses updates that are smaller than the rounding of a weight. The run reports
    the share of updates that are lost."""
    tokens_per_worker: int = Field(default=4096, ge=1)
    """A step begins once this many training tokens (prompts and completions) per rank have accumulated."""
    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """The maximum number of tokens that a rank computes at a time. It limits the memory of a step, not its result."""
    router_replay: bool = False
    """For mixtures of experts: compute each token with the experts that were used to sample it, instead of the
    experts that the trainer's routers choose. The servers and the trainer must support it.
    """
    train_on_equal_rewards: bool = False
    """Also train on groups whose rewards are all equal. Their advantages are 0, so by default the run only counts
    them."""

    @model_validator(mode="after")
    def _sets_each_option_once(self) -> TrainSection:
        known = {"device", "lora", "master_dtype", *OptimizerSettings.model_fields}
        if twice := sorted(known & self.trainer_options.keys()):
            raise ValueError(f"trainer_options.{twice[0]} is a setting of [train]: write train.{twice[0]} instead")
        return self


class LossSection(Section):
    """The policy loss and the estimator of advantages."""

    preset: str = "pipelinerl_paper"
    """The name of a loss. Run ``inflight losses`` for a list."""
    policy: PolicyLoss | None = None
    """A loss composed of pieces, instead of a preset."""
    advantages: AdvantageEstimator | None = None
    """The estimator of advantages. If not set, the preset chooses it; with ``policy``, it is ``leave_one_out``."""
    reference_kl: float = Field(default=0.0, ge=0)
    """Coefficient of a KL penalty towards the initial model. If it is above 0, this penalty replaces any KL penalty of
    the loss itself."""

    @model_validator(mode="after")
    def _names_one_loss(self) -> LossSection:
        if self.policy is not None and "preset" in self.model_fields_set:
            raise ValueError(f"both preset ({self.preset!r}) and policy are set: set only one of them")
        return self

    def policy_loss(self) -> PolicyLoss:
        """Return the loss with its KL penalty. Raises `ConfigError` if it is unknown or no worker supports it."""
        loss = self.policy or preset(self.preset).loss
        if "entropy" in loss.needs:
            raise ConfigError("loss.policy has an entropy bonus, but no worker computes entropies: remove it")
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
    """The policies that schedule completions, limit the age of tokens, and compose optimizer steps.

    Run ``inflight policies`` for a list. You can also name an entry point in the group ``inflight.schedulers``,
    ``inflight.staleness`` or ``inflight.composers``, or ``module:attribute``.
    """

    max_lag: int = Field(default=8, ge=0)
    """The largest lag of a token that is trained on: the trainer's weight version minus the version that sampled it."""
    burst: int = Field(default=1, ge=1)
    """Once enough groups are in flight, new ones are offered only when there is room for this many. If a step has only
    one or two groups, set this to several: an engine is more efficient when it samples several groups at a time, and
    updates then arrive while groups are being sampled."""
    scheduler: str = "least_loaded"
    """Decides which completions run where and when. It is constructed with ``sampling.group_size``, ``run.seed`` and
    ``scheduler_params``.
    """
    scheduler_params: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the scheduler."""
    staleness: str = "max_lag"
    """Decides which tokens are too old to train on. It is constructed with ``max_lag`` and ``staleness_params``."""
    staleness_params: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the staleness policy."""
    min_ess: float | None = Field(default=None, gt=0, le=1)
    """The minimum effective sample size of a step, as a share of its trained tokens (1 if all importance ratios are
    equal). ``on_low_ess`` decides what happens after a step below it. If not set, any step is accepted."""
    on_low_ess: Literal["wait", "stop"] = "wait"
    """What happens after a step below ``min_ess``: with ``wait``, the next step uses only tokens that were sampled
    after that step; ``stop`` ends the run.
    """
    credit: Credit = "episode"
    """How the rewards of an environment become advantages of tokens: see `inflight.rollouts.credit`."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """The discount factor per turn for later rewards, if ``credit`` is ``return`` or ``critic``."""
    critic_target: Target = "monte_carlo"
    """What the critic learns from, if ``credit`` is ``critic``: Monte Carlo returns (``monte_carlo``) or temporal
    differences (``td``)."""
    composer: str = "token_budget"
    """Decides which finished groups make up a step. It is constructed with the number of tokens per step over all
    ranks, and ``composer_params``.
    """
    composer_params: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the composer."""


class RunConfig(Section):
    """The configuration of one run."""

    run: RunSection
    model: ModelSection
    task: TaskSection
    evaluation: EvaluationSection = EvaluationSection()
    sampling: SamplingSection = SamplingSection()
    servers: ServersSection = ServersSection()
    updates: UpdatesSection = UpdatesSection()
    train: TrainSection = TrainSection()
    loss: LossSection = LossSection()
    distillation: DistillationSection = DistillationSection()
    rollouts: RolloutsSection = RolloutsSection()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.sampling.group_size > self.servers.fewest_slots:
            raise ValueError(
                f"sampling.group_size {self.sampling.group_size} exceeds servers.max_concurrent "
                f"{self.servers.fewest_slots}: a whole group could never run at the same time; lower the first or "
                "raise the second"
            )
        if self.sampling.max_tokens >= self.train.max_tokens_per_micro_batch:
            raise ValueError(
                f"sampling.max_tokens {self.sampling.max_tokens} plus a prompt do not fit into "
                f"train.max_tokens_per_micro_batch {self.train.max_tokens_per_micro_batch}: lower the first or raise "
                "the second"
            )
        if self.servers.release_memory and self.run.mode != "conventional":
            raise ValueError(
                "servers.release_memory needs run.mode 'conventional', in which servers wait while the trainers train: "
                f"in mode {self.run.mode!r} they sample all the time and need their memory"
            )
        if self.run.mode == "conventional" and self.run.conventional_steps - 1 > self.rollouts.max_lag:
            raise ValueError(
                f"run.conventional_steps {self.run.conventional_steps} trains on tokens of lag "
                f"{self.run.conventional_steps - 1}, but rollouts.max_lag {self.rollouts.max_lag} masks them: raise "
                "rollouts.max_lag"
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
                    "with updates.mode 'pull', servers load versions at any time, but with servers.release_memory they "
                    "hold no memory while the trainers train: set updates.mode to 'push'"
                )
        if servers.release_memory and updates.delta and find_transport(updates.transport).needs_gpu:
            raise ValueError(
                f"updates.delta over {updates.transport!r} keeps a copy of the weights in GPU memory, which "
                "servers.release_memory does not free: leave out one of them, or choose transport 'shm'"
            )
        return self

    @model_validator(mode="after")
    def _training_may_overlap_publishes(self) -> RunConfig:
        if not self.updates.overlap:
            return self
        if self.run.mode != "pipeline":
            raise ValueError(
                f"updates.overlap lets the next step begin during a publish, but in run.mode {self.run.mode!r} that "
                "step first waits for samples of the published version: leave out updates.overlap, or set run.mode to "
                "'pipeline'"
            )
        if self.train.num_ranks > 1 and not self.updates.sharded:
            raise ValueError(
                f"updates.overlap with train.num_ranks {self.train.num_ranks} needs updates.sharded, because gathering "
                "the weights would interleave with the ranks' communication in forward and backward passes: set "
                "updates.sharded to true, or leave out updates.overlap"
            )
        if self.train.num_ranks > 1 and self.train.lora is not None:
            raise ValueError(
                f"updates.overlap is not supported for a LoRA with train.num_ranks {self.train.num_ranks}, because its "
                "merged weights are gathered for servers that cannot merge it: leave out updates.overlap"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """The number of training tokens of one optimizer step, over all ranks."""
        return self.train.tokens_per_worker * self.train.num_ranks


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that a TOML file describes, with overrides as in `load_settings`."""
    return load_settings(RunConfig, path, "configuration", overrides)
