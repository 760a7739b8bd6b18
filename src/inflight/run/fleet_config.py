"""The section ``servers`` of a run: the servers that it starts, attaches to, and adds while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from inflight.base.toml import Section
from inflight.contracts import DEFAULT_MAX_CONCURRENT, EMBEDDED, EngineKind
from inflight.http.kinds import load_engine_kind

_OF_ONE_KIND = ("engine", "count", "python", "engine_arguments", "devices", "compile", "place")
"""The fields that describe the servers to start if all of them are of one kind."""


class ServerGroupSection(Section):
    """The settings of ``count`` servers of one kind."""

    engine: str = EMBEDDED
    """The engine: ``embedded``, or another entry point in the group ``inflight.engines``."""
    count: int = Field(default=1, ge=1)
    """The number of servers to start."""
    python: Path | None = None
    """The Python interpreter of the engine's virtual environment. If not set, that of the run is used."""
    engine_arguments: tuple[str, ...] = ()
    """Additional arguments for the command line of the engine's own server."""
    devices: tuple[NonNegativeInt, ...] | None = None
    """The indices of the GPUs of all these servers, server by server: ``count`` times as many as one server uses. If
    not set, the servers use any free GPUs.
    """
    max_concurrent: int = Field(default=DEFAULT_MAX_CONCURRENT, ge=1)
    """The maximum number of completions that a server decodes, and that the run sends to it, at the same time.

    In ``servers``, this also applies to attached and joining servers, and to the tables of a fleet that do not set it.
    """
    compile: bool = False
    """Compile the decode step and, on a GPU, capture CUDA graphs. The engine must support this option."""
    place: str | None = None
    """Where these servers run, in the form that the launcher expects. With ``ray``, this is the address of a host or
    the name of a custom resource of hosts. If not set, they run anywhere.
    """

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


class TlsSection(Section):
    """PEM files with which the run serves HTTPS to servers that join."""

    certificate: Path
    """The certificate for the address in ``join``."""
    key: Path
    """The key of the certificate, without a passphrase."""
    client_ca: Path | None = None
    """Certificate authorities. If set, the run answers only servers with a certificate that one of them has signed."""


class AttachSection(Section):
    """Servers that the run does not start: listed by URL, listed in a file, or joining on their own."""

    urls: tuple[str, ...] = ()
    """URLs of the servers to attach to; if any are set, the run starts no servers. INFLIGHT_TOKEN sets the control
    token.

    Use ``http://...`` for a server of inflight, and ``vllm+http://...`` or ``sglang+http://...`` for a server of the
    engine itself.
    """
    urls_file: Path | None = None
    """A file with one URL per line, which the run reads repeatedly: a server joins when its URL is added, and leaves
    when it is removed.

    These servers are in addition to ``urls`` or to the servers that the run starts. If only the file is set, the run
    starts none.
    """
    join: str | None = None
    """HOST:PORT at which the run listens for servers that join and leave on their own (``inflight serve --join``).
    These are in addition to the other servers. If only ``join`` is set, the run starts none.
    """
    tls: TlsSection | None = None
    """Serve HTTPS at ``join``. Clients read the certificates that they trust from ``$INFLIGHT_TLS_CA``."""

    @property
    def others_may_come(self) -> bool:
        """Whether servers may join while the run is in progress."""
        return self.urls_file is not None or self.join is not None


class ScalingSection(Section):
    """Servers that the run starts and stops as needed, in addition to the others. They join at ``attach.join``."""

    most: int = Field(ge=1)
    """The maximum number of additional servers."""
    window_s: float = Field(default=30.0, gt=0)
    """The fleet changes by at most one server after each window of this length."""
    wait_share: float = Field(default=0.3, ge=0, lt=1)
    """Start one more server if training waited for more than this share of a window."""
    free_share: float = Field(default=0.5, gt=0, lt=1)
    """Stop one server if more than this share of the slots was free over a window."""
    server: ServerGroupSection = ServerGroupSection()
    """The kind of the additional servers; ``count`` and ``devices`` do not apply."""

    @model_validator(mode="after")
    def _one_server_at_a_time(self) -> Self:
        if self.server.count != 1 or self.server.devices is not None:
            raise ValueError(
                "servers.scaling starts one server at a time, on free devices: leave out count and devices in "
                "servers.scaling.server"
            )
        return self


class ServersSection(ServerGroupSection):
    """The fleet: ``count`` servers of one kind or a mixed ``fleet`` that the run starts, or servers to attach to."""

    fleet: tuple[ServerGroupSection, ...] = ()
    """The kinds of servers in a mixed fleet, as tables. They replace ``engine``, ``count`` and the other settings of a
    single kind."""
    attach: AttachSection = AttachSection()
    scaling: ScalingSection | None = None
    """Start more servers when training waits for samples, and stop them when slots are free. If not set, the fleet
    keeps its size.
    """
    threads: int = Field(default=1, ge=1)
    """Number of CPU threads of each server that the run starts."""
    device: str | None = None
    """Device of all servers that the run starts: ``cpu`` or ``cuda``. If not set, they use GPUs if there are any."""
    drafts: Literal["off", "history", "siblings", "both"] = "off"
    """Speculative decoding without a draft model, on servers that the run starts: draft from earlier groups of the same
    prompt (``history``), from completions of the same group (``siblings``), or from both. Drafts do not change what is
    sampled."""
    colocated: bool = False
    """Let servers share GPUs with trainers and with each other. Each process keeps its share of the memory all the
    time, unless ``release_memory`` is set."""
    release_memory: bool = False
    """Make servers release their GPU memory while the trainers train, and keep their weights in host memory during that
    time. This requires ``run.mode = "conventional"``."""
    lease_s: float = Field(default=0.0, ge=0)
    """How long the servers that the run started keep running if the run is killed. ``--resume`` reuses them within this
    time. With 0, they end with the run; other values require launcher ``local``.
    """

    @property
    def members(self) -> tuple[ServerGroupSection, ...]:
        """The groups of servers to start; empty with ``attach.urls``, or if others may join and none is configured."""
        is_chosen = not self.model_fields_set.isdisjoint(("fleet", *_OF_ONE_KIND))
        if self.attach.urls or (self.attach.others_may_come and not is_chosen):
            return ()
        if not self.fleet:
            return (ServerGroupSection(**{name: getattr(self, name) for name in ServerGroupSection.model_fields}),)
        inherited = {"max_concurrent": self.max_concurrent}
        return tuple(
            member if "max_concurrent" in member.model_fields_set else member.model_copy(update=inherited)
            for member in self.fleet
        )

    @property
    def started(self) -> tuple[ServerGroupSection, ...]:
        """The fleet member of each server that the run starts, one entry per server."""
        return tuple(member for member in self.members for _ in range(member.count))

    @property
    def slots_of_attached(self) -> int:
        """The number of slots of a server that the run attaches to."""
        return self.max_concurrent

    @property
    def slots_of_joining(self) -> int:
        """The maximum number of slots of a server that joins on its own."""
        return max(self.max_concurrent, 0 if self.scaling is None else self.scaling.server.max_concurrent)

    @property
    def fewest_slots(self) -> int:
        """The smallest number of slots of any server."""
        limits = [member.max_concurrent for member in self.members]
        others = [self.max_concurrent] if not limits or self.attach.others_may_come else []
        return min(limits + others)

    @model_validator(mode="after")
    def _chooses_once_what_to_start(self) -> Self:
        alike = [name for name in _OF_ONE_KIND if name in self.model_fields_set]
        if self.fleet and alike:
            raise ValueError(f"servers.fleet replaces servers.{alike[0]}: set it in the fleet's tables")
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
                raise ValueError("servers.scaling needs servers.attach.join, the HOST:PORT at which its servers join")
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
            raise ValueError("servers.drafts and servers.compile cannot be combined: leave one of them out")
        return self
