"""The section ``servers`` of a run: which servers it starts, which it attaches to, and when it starts more."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from inflight.base.toml import Section
from inflight.contracts import DEFAULT_MAX_CONCURRENT, EMBEDDED, EngineKind
from inflight.http.kinds import load_engine_kind

_OF_ONE_KIND = ("engine", "count", "python", "engine_arguments", "devices", "compile", "place")
"""Fields of the section that choose what to start when all servers are alike."""


class FleetMember(Section):
    """What ``count`` servers of one kind are started with."""

    engine: str = EMBEDDED
    """``embedded``, or another entry point in the group ``inflight.engines``."""
    count: int = Field(default=1, ge=1)
    python: Path | None = None
    """Interpreter of the engine's virtual environment. None: the present one."""
    engine_arguments: tuple[str, ...] = ()
    """Further arguments for the engine's own command line."""
    devices: tuple[NonNegativeInt, ...] | None = None
    """GPUs of these servers, one after the other: ``count`` times as many as each runs on. None: any that are free."""
    max_concurrent: int = Field(default=DEFAULT_MAX_CONCURRENT, ge=1)
    """Completions that a server decodes at a time, and that the run sends it at a time.

    In ``servers`` it also applies to servers that are attached to or join, and to tables of a fleet that do not set it.
    """
    compile: bool = False
    """Compile the decode step, and capture CUDA graphs on a GPU, with an engine that takes this option."""
    place: str | None = None
    """Where these servers run, as the launcher names places: for ``ray``, a host's address or a custom resource of the
    hosts. None: anywhere."""

    @property
    def kind(self) -> EngineKind:
        """The kind of engine. Raises `ConfigError` if it is not installed."""
        return load_engine_kind(self.engine)

    @model_validator(mode="after")
    def _settings_apply_to_the_engine(self) -> Self:
        if self.compile and "compile" in self.kind.unsupported_options:
            raise ValueError(f"compile does not apply to engine {self.engine!r}: use engine_arguments")
        if (self.python is not None or self.engine_arguments) and self.kind.runs_in_process:
            raise ValueError(
                f"python and engine_arguments do not apply to engine {self.engine!r}: set engine, or leave them out"
            )
        return self


class AttachSection(Section):
    """Servers that the run does not start: listed by URL, listed in a file, or joining by themselves."""

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

    @property
    def others_may_come(self) -> bool:
        """Whether servers may join while the run continues."""
        return self.urls_file is not None or self.join is not None


class ScalingSection(Section):
    """Servers that the run starts and stops by itself, in addition to the others; they join at ``attach.join``."""

    most: int = Field(ge=1)
    """Most servers in addition to the others."""
    window_s: float = Field(default=30.0, gt=0)
    """The fleet changes by one server at most after each window of this length."""
    wait_share: float = Field(default=0.3, ge=0, lt=1)
    """One more server where training waited for more than this share of a window."""
    free_share: float = Field(default=0.5, gt=0, lt=1)
    """One server less where more than this share of the slots was free."""
    server: FleetMember = FleetMember()
    """Its kind; ``count`` and ``devices`` do not apply."""

    @model_validator(mode="after")
    def _one_server_at_a_time(self) -> Self:
        if self.server.count != 1 or self.server.devices is not None:
            raise ValueError(
                "servers.scaling.server is started one at a time where there is room: leave out count and devices"
            )
        return self


class ServersSection(FleetMember):
    """The fleet: ``count`` servers of one kind or a mixed ``fleet`` that the run starts, or servers to attach to."""

    fleet: tuple[FleetMember, ...] = ()
    """Tables of a mixed fleet, instead of ``engine``, ``count``, ``python`` and what else is of one kind."""
    attach: AttachSection = AttachSection()
    scaling: ScalingSection | None = None
    """Let the run start and stop more servers as training waits for them. None: the fleet keeps its size."""
    threads: int = Field(default=1, ge=1)
    device: str | None = None
    """Of all servers that the run starts: ``cpu`` or ``cuda``. None: GPUs if there are any."""
    drafts: Literal["off", "history", "siblings", "both"] = "off"
    """What the servers that the run starts draft completions from: earlier groups of the same prompt, completions of
    the same group, or both. Drafts do not change what is sampled."""
    colocated: bool = False
    """Let servers share GPUs with trainers and each other. Each keeps its part of the memory all the time, unless
    ``release_memory`` is set."""
    release_memory: bool = False
    """Let servers release their GPU memory while the trainers train, in ``run.mode = "conventional"``. They keep their
    weights in host memory meanwhile."""
    lease_s: float = Field(default=0.0, ge=0)
    """How long servers that the run starts keep running without it, if it is killed. ``--resume`` then takes them over
    unchanged. 0: they end with the run. With launcher ``local`` only."""

    @property
    def members(self) -> tuple[FleetMember, ...]:
        """The servers to start; none with ``attach.urls``, or if others may come and nothing is set to start."""
        is_chosen = not self.model_fields_set.isdisjoint(("fleet", *_OF_ONE_KIND))
        if self.attach.urls or (self.attach.others_may_come and not is_chosen):
            return ()
        if not self.fleet:
            return (FleetMember(**{name: getattr(self, name) for name in FleetMember.model_fields}),)
        inherited = {"max_concurrent": self.max_concurrent}
        return tuple(
            member if "max_concurrent" in member.model_fields_set else member.model_copy(update=inherited)
            for member in self.fleet
        )

    @property
    def started(self) -> tuple[FleetMember, ...]:
        """The member of each server that the run starts."""
        return tuple(member for member in self.members for _ in range(member.count))

    @property
    def slots_of_attached(self) -> int:
        """Most completions at a time on a server that the run attaches to."""
        return self.max_concurrent

    @property
    def slots_of_joining(self) -> int:
        """Most completions at a time on a server that joins by itself."""
        return max(self.max_concurrent, 0 if self.scaling is None else self.scaling.server.max_concurrent)

    @property
    def fewest_slots(self) -> int:
        """Completions at a time on the server that has the fewest slots."""
        limits = [member.max_concurrent for member in self.members]
        others = [self.max_concurrent] if not limits or self.attach.others_may_come else []
        return min(limits + others)

    @model_validator(mode="after")
    def _chooses_once_what_to_start(self) -> Self:
        alike = [name for name in _OF_ONE_KIND if name in self.model_fields_set]
        if self.fleet and alike:
            raise ValueError(f"servers.fleet replaces servers.{alike[0]}: write it in the fleet's tables")
        started = [name for name in ("fleet", "engine", "devices") if name in self.model_fields_set]
        if self.attach.urls and started:
            raise ValueError(
                f"servers.attach.urls attaches to running servers and starts none: leave out servers.{started[0]} or "
                "the urls"
            )
        return self

    @model_validator(mode="after")
    def _scaled_servers_can_join(self) -> Self:
        if self.scaling is not None:
            if self.attach.join is None:
                raise ValueError(
                    "servers.scaling needs servers.attach.join, HOST:PORT where the servers that it starts join"
                )
            if self.lease_s:
                raise ValueError("servers.scaling starts servers that end with the run: leave out servers.lease_s")
            if self.release_memory:
                raise ValueError("servers.release_memory needs a fleet that keeps its size: leave out servers.scaling")
        return self

    @model_validator(mode="after")
    def _every_engine_can_draft(self) -> Self:
        if self.drafts != "off":
            for member in self.members:
                if (problem := member.kind.drafts_problem(self.drafts)) is not None:
                    raise ValueError(
                        f"servers.drafts is {self.drafts!r}, but a server has engine {member.engine!r}: {problem}"
                    )
        if self.drafts != "off" and any(member.compile for member in self.members):
            raise ValueError("servers.drafts and servers.compile exclude each other: leave one of them out")
        return self
