"""What an adapter says of its engine: how to start a server, and how to attach to a running one.

Adapters are found by the entry point group ``inflight.engines``; each entry names an `EngineKind`. This module knows no
engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from inflight.base.extensions import load_installed
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.client import HttpEndpoint
from inflight.rollouts.drafts import DraftProvider


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user chooses for an engine that is started. None leaves the choice to the engine."""

    model: Path
    """Hugging Face checkpoint directory."""
    name: str | None = None
    dtype: str | None = None
    """A wire dtype, such as ``bfloat16``."""
    device: str | None = None
    """``cpu`` or ``cuda``."""
    max_model_len: int | None = None
    """Longest sequence, in tokens."""
    max_concurrent: int | None = None
    """Sequences decoded at a time."""
    threads: int | None = None
    """CPU threads of the engine's process."""
    drafts: DraftProvider | None = None
    """Where drafts come from, None for none."""
    arguments: Sequence[str] = field(default=())
    """Further arguments of the engine's own command line, after ours."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What one server takes of GPUs."""

    num_gpus: int = 1
    num_copies: int = 1
    """Copies of the model among these GPUs, each sharded over as many of them as the others."""
    memory_share: float = 0.9
    """Share of each GPU's memory that the engine fills with weights, KV cache and activations."""
    context: int | None = None
    """Tokens of the longest sequence; None: what the model allows."""
    stages_on_gpu: bool = False
    """Whether an update that arrives over NCCL or CUDA IPC waits in GPU memory, whole on each GPU, for its commit."""


def has_gpu(device: str | None) -> bool:
    """Return whether an engine started for ``device`` finds a GPU. None asks whether this machine has one."""
    return device.startswith("cuda") if device is not None else Path("/dev/nvidiactl").exists()


def integer_in(arguments: Sequence[str], *flags: str) -> int | None:
    """Return what `number_in` returns, as an integer."""
    number = number_in(arguments, *flags)
    return None if number is None else int(number)


def number_in(arguments: Sequence[str], *flags: str) -> float | None:
    """Return the number that an engine's arguments give a flag, whose names are ``flags``; None if they give none.

    Understands ``--flag N``, ``--flag=N`` and underscores in place of dashes; the last one counts. Raises `ConfigError`
    if it is not a number.
    """
    found: float | None = None
    for i, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name not in flags:
            continue
        text = value if has_value else next(iter(arguments[i + 1 : i + 2]), "")
        try:
            found = float(text)
        except ValueError as error:
            raise ConfigError(f"engine argument {argument!r} needs a number, not {text!r}") from error
    return found


class EngineKind(Protocol):
    """One kind of engine. Its values hold no state."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the entry point, such as ``vllm``."""

    @abstractmethod
    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        """Return the arguments after the Python interpreter that start a server to which inflight can attach."""

    @abstractmethod
    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        """Return the environment variables that the server needs besides the inherited ones."""

    @property
    def release_arguments(self) -> Sequence[str]:
        """Return the arguments with which a server on a GPU can release its memory; empty if it cannot."""
        return ()

    def drafts_problem(self, provider: DraftProvider) -> str | None:
        """Return why no server of this kind drafts from ``provider``, None if one can."""
        return f"the adapter of {self.name} does not know drafts"

    def gpu_use(self, arguments: Sequence[str]) -> GpuUse:
        """Return what a server takes of GPUs, given the further arguments of its command line."""
        return GpuUse()

    @property
    @abstractmethod
    def health_path(self) -> str:
        """Return the path that answers with status 200 once the server can generate."""

    @property
    @abstractmethod
    def liveness_path(self) -> str | None:
        """Return the path that answers in milliseconds, with status 503 once a part of the engine has died.

        None if the server has no such path. A path that samples a token does not qualify, nor does a path that a pause
        keeps from answering.
        """

    @abstractmethod
    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint for the engine's own server at ``url``. Sends nothing before the endpoint's first call."""


def load_engine_kind(name: str) -> EngineKind:
    """Return the engine registered under ``name``. Raises `ConfigError` with the known names."""
    kind: EngineKind = load_installed("engine", "engines", name, ("local",))
    return kind


def connect_endpoint(
    url: str, *, token: str | None = None, control_timeout_s: float = 30.0, generate_timeout_s: float = 600.0
) -> InferenceEndpoint:
    """Return an endpoint for ``http://...``, which speaks the contract, or for an engine's own ``ENGINE+http://...``.

    ``vllm+http://host:8000`` attaches to a vLLM server, ``sglang+http://host:30000`` to an SGLang server. Raises
    `ConfigError` for any other scheme. Sends nothing before the endpoint's first call.
    """
    scheme, separator, rest = url.partition("://")
    engine, plus, transport = scheme.rpartition("+")
    if not separator or not rest or transport not in ("http", "https"):
        raise ConfigError(f"{url!r} is not an endpoint; write http://HOST:PORT, or ENGINE+http://HOST:PORT")
    connect: Callable[..., InferenceEndpoint] = load_engine_kind(engine).connect if plus else HttpEndpoint
    return connect(
        f"{transport}://{rest}",
        token=token,
        control_timeout_s=control_timeout_s,
        generate_timeout_s=generate_timeout_s,
    )
