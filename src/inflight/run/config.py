"""The configuration of a run: one typed model, read from TOML; every field can be overridden on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from inflight.base.toml import Section, load_settings
from inflight.base.transport_registry import find_transport
from inflight.errors import ConfigError
from inflight.http.kinds import load_engine_kind
from inflight.losses import Kl, PolicyLoss, preset
from inflight.model.lora_settings import LoraSettings
from inflight.model.optimizer_settings import OptimizerSettings
from inflight.rollouts import AdvantageEstimator, Credit
from inflight.rollouts.critic import Target
from inflight.weights.encode.bucket_bytes import Rounding
from inflight.wire import InFlightPolicy, TransportName


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
    made since the last time. Servers stay as they are. 0: the run ends, and ``--resume`` continues it."""
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
    for a step what moving the weights may take besides, at 0.5 GB/s."""
    save_timeout_s: float | None = Field(default=None, gt=0)
    """Longest wait for a checkpoint. None: 900 s, and what writing its bytes may take besides, at 0.5 GB/s."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port on loopback where the run serves ``/metrics`` for Prometheus; 0: any free one. None: it serves none."""
    trackers: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Where people watch the run besides its directory: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``, another
    entry point in the group ``inflight.trackers``, or ``module:attribute``. A text with commas is a list."""
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
    """Episodes of an environment that are begun beyond ``sampling.group_size``; the last to finish are given up."""


class SamplingSection(Section):
    """How completions are sampled."""

    group_size: int = Field(default=8, ge=2)
    temperature: float = Field(default=1.0, gt=0.0)
    max_tokens: int = Field(default=128, ge=1)


_OF_ONE_KIND = ("engine", "count", "python", "engine_arguments", "devices", "compile", "place")
"""Fields of the servers section that say what to start when all servers are alike."""


class FleetMember(Section):
    """``count`` servers of one kind."""

    engine: str = "local"
    """``local``, the embedded engine, or an entry point in the group ``inflight.engines``."""
    count: int = Field(default=1, ge=1)
    python: Path | None = None
    """Interpreter of the engine's virtual environment. None: the present one."""
    engine_arguments: tuple[str, ...] = ()
    """Further arguments for the engine's own command line."""
    devices: tuple[NonNegativeInt, ...] | None = None
    """GPUs of these servers, one after the other: ``count`` times as many as each runs on. None: any that are free."""
    max_concurrent: int = Field(default=64, ge=1)
    compile: bool = False
    """Compile the decode step of the embedded engine, and capture CUDA graphs on a GPU."""
    place: str | None = None
    """Where these servers run, as the launcher names places: for ``ray``, a host's address or a custom resource that
    hosts declare. None: anywhere."""

    @model_validator(mode="after")
    def _only_the_embedded_engine_compiles(self) -> Self:
        if self.compile and self.engine != "local":
            raise ValueError(f"compile applies to engine 'local', not to {self.engine!r}: use engine_arguments")
        return self

    @model_validator(mode="after")
    def _embedded_engine_takes_none(self) -> Self:
        if self.engine == "local" and (self.python is not None or self.engine_arguments):
            raise ValueError(
                "python and engine_arguments do not apply to engine 'local': set engine, or leave them out"
            )
        return self


class ScaleSection(Section):
    """Servers that the run starts and stops by itself, besides the others; they join it at ``servers.join``."""

    most: int = Field(ge=1)
    """Most servers besides the others."""
    window_s: float = Field(default=30.0, gt=0)
    """The fleet changes by one server at most after each window of this length."""
    wait_share: float = Field(default=0.3, ge=0, lt=1)
    """One more server where training waited for more than this share of a window."""
    free_share: float = Field(default=0.5, gt=0, lt=1)
    """One server less where more than this share of the slots stood free."""
    server: FleetMember = FleetMember()
    """Its kind; ``count`` and ``devices`` do not apply."""

    @model_validator(mode="after")
    def _one_server_at_a_time(self) -> Self:
        if self.server.count != 1 or self.server.devices is not None:
            raise ValueError(
                "servers.scale.server is started one at a time where there is room: leave out count and devices"
            )
        return self


class ServersSection(FleetMember):
    """The fleet: servers that the run starts (``count`` of one engine or a mixed ``fleet``), or running ones by URL."""

    fleet: tuple[FleetMember, ...] = ()
    """Tables of a mixed fleet, instead of ``engine``, ``count``, ``python`` and what else is of one kind."""
    urls: tuple[str, ...] = ()
    """Servers to attach to; the run then starts none. The control token is read from INFLIGHT_TOKEN.

    ``http://...`` speaks the contract; ``vllm+http://...`` and ``sglang+http://...`` are the engines' own servers.
    """
    urls_file: Path | None = None
    """File with one URL per line, read repeatedly: servers join when they are added and leave when they are removed.

    It adds to ``urls`` or to the servers that the run starts; with the file alone, the run starts none.
    """
    join: str | None = None
    """HOST:PORT at which the run listens for servers that join and leave by themselves: ``inflight serve --join``. Like
    ``urls_file``, it adds to the other servers; alone, the run starts none."""
    scale: ScaleSection | None = None
    """Let the run start and stop more servers as training waits for them. None: the fleet is what it is."""
    threads: int = Field(default=1, ge=1)
    device: str | None = None
    """Of all servers that the run starts: ``cpu`` or ``cuda``. None: GPUs if there are any."""
    colocated: bool = False
    """Let servers share GPUs with trainers and each other. Each keeps its part of the memory all the time, unless
    ``release_memory`` is set."""
    release_memory: bool = False
    """Let servers release their GPU memory while the trainers train, in ``run.mode = "conventional"``. They keep their
    weights in host memory meanwhile."""
    in_flight: InFlightPolicy = InFlightPolicy.KEEP
    publish_deadline_s: float | None = Field(default=None, gt=0)
    """Longest that a publish may take. None: 60 s, and what moving the weights may take besides, at 0.5 GB/s."""
    transport: TransportName = "gloo"
    """Broadcast (``gloo``, ``nccl``), stored (``shm``, ``ipc``, ``file``, ``http``), or an installed transport."""
    updates: Literal["push", "pull"] = "push"
    """``push``: each publish waits for the servers. ``pull``: versions are stored and servers load the newest one."""
    address: str = "127.0.0.1"
    """Address of trainer rank 0's host as the servers see it: ``gloo``, ``nccl`` and ``http`` listen there for them.
    Left out, it is what the launcher says of that host: 127.0.0.1 with launcher ``local``."""
    directory: Path | None = None
    """Where ``file`` stores weights: a path that the trainer and every server can read."""
    quorum: int | None = Field(default=None, ge=1)
    """How many servers must hold each version; with fewer the run waits. None: all that are reached, at least one."""
    encoding: Rounding = "raw"
    """``bfloat16`` and ``float8`` round weights in transit, to send fewer bytes."""
    delta: bool = False
    """Send only what changed since the last publish. Costs one more copy of the weights in memory on each side."""
    staged: bool = True
    """Keep sampling while weights arrive, on servers that can. They hold a second copy of the weights meanwhile."""
    lease_s: float = Field(default=0.0, ge=0)
    """How long servers that the run starts go on without it, if it is killed. ``--resume`` then takes them over as they
    are. 0: they end with the run. With launcher ``local`` only."""
    generate_timeout_s: float = Field(default=600.0, gt=0)
    drafts: Literal["off", "history", "siblings", "both"] = "off"
    """What the servers that the run starts draft completions from: earlier groups of the same prompt, completions of
    the same group, or both. Drafts do not change what is sampled."""

    @property
    def others_may_come(self) -> bool:
        """Whether servers may join while the run goes on."""
        return self.urls_file is not None or self.join is not None

    @property
    def members(self) -> tuple[FleetMember, ...]:
        """The servers to start; none if ``urls`` is set, or if others may come and nothing says what to start."""
        is_told = not self.model_fields_set.isdisjoint(("fleet", *_OF_ONE_KIND))
        if self.urls or (self.others_may_come and not is_told):
            return ()
        if not self.fleet:
            return (FleetMember(**{name: getattr(self, name) for name in FleetMember.model_fields}),)
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
        started = [name for name in ("fleet", "engine", "devices") if name in self.model_fields_set]
        if self.urls and started:
            raise ValueError(
                f"servers.urls attaches to running servers and starts none: leave out servers.{started[0]} or the urls"
            )
        return self

    @model_validator(mode="after")
    def _scaled_servers_can_join(self) -> ServersSection:
        if self.scale is not None:
            if self.join is None:
                raise ValueError("servers.scale needs servers.join, HOST:PORT where the servers that it starts join")
            if self.lease_s:
                raise ValueError("servers.scale starts servers that end with the run: leave out servers.lease_s")
            if self.release_memory:
                raise ValueError("servers.release_memory is for a fleet that stays: leave out servers.scale")
        return self

    @model_validator(mode="after")
    def _every_engine_can_draft(self) -> ServersSection:
        if self.drafts != "off":
            for engine in {member.engine for member in self.members} - {"local"}:
                if (problem := load_engine_kind(engine).drafts_problem(self.drafts)) is not None:
                    raise ValueError(
                        f"servers.drafts is {self.drafts!r}, but a server has engine {engine!r}: {problem}"
                    )
        if self.drafts != "off" and any(member.compile for member in self.members):
            raise ValueError("servers.drafts and servers.compile exclude each other: leave one of them out")
        return self

    @model_validator(mode="after")
    def _says_once_how_weights_travel(self) -> ServersSection:
        if self.transport == "file" and self.directory is None:
            raise ValueError(
                "servers.transport 'file' needs servers.directory, which the trainer and every server can read"
            )
        if self.transport != "file" and self.directory is not None:
            raise ValueError(
                f"servers.directory applies only to servers.transport 'file', but that is {self.transport!r}: leave "
                "out one of them"
            )
        if self.updates == "pull":
            if self.transport != "file":
                raise ValueError(
                    f"servers.updates 'pull' stores versions in servers.directory, but servers.transport is "
                    f"{self.transport!r}: set it to 'file'"
                )
            if self.delta or self.quorum is not None:
                raise ValueError(
                    "servers.updates 'pull' waits for no server: leave out servers.delta and servers.quorum"
                )
            if foreign := [member.engine for member in self.members if member.engine != "local"]:
                raise ValueError(
                    f"servers.updates 'pull' needs servers that load stored versions, but {foreign[0]} does not: "
                    "use engine 'local'"
                )
            if self.release_memory:
                raise ValueError(
                    "servers.updates 'pull' loads versions at any time, but servers.release_memory takes their memory "
                    "away: set servers.updates to 'push'"
                )
        if self.release_memory and self.delta and find_transport(self.transport).needs_gpu:
            raise ValueError(
                f"servers.delta over {self.transport!r} keeps a copy of the weights in GPU memory, which "
                "servers.release_memory does not free: leave out one of them, or choose transport 'shm'"
            )
        if self.delta and self.encoding != "raw":
            raise ValueError(
                "servers.delta sends changed elements unrounded, but servers.encoding is "
                f"{self.encoding!r}: leave one of them out"
            )
        return self


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
    def _sets_each_option_once(self) -> Self:
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
    train: TrainSection = TrainSection()
    loss: LossSection = LossSection()
    rollouts: RolloutsSection = RolloutsSection()

    @model_validator(mode="after")
    def _transport_is_installed(self) -> RunConfig:
        try:
            find_transport(self.servers.transport)
        except ConfigError as error:
            raise ValueError(f"servers.transport: {error}") from error
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        limits = [member.max_concurrent for member in self.servers.members]
        if not limits or self.servers.others_may_come:
            limits.append(self.servers.max_concurrent)
        if self.sampling.group_size > min(limits):
            raise ValueError(
                f"sampling.group_size {self.sampling.group_size} exceeds servers.max_concurrent "
                f"{min(limits)}: a group would never run as a whole"
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

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step over all workers."""
        return self.train.tokens_per_worker * self.train.num_ranks


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a TOML file, with overrides: see `load_settings`."""
    return load_settings(RunConfig, path, "configuration", overrides)
