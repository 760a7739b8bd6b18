"""What an adapter says of its engine: how to start one, and how to attach to one that runs.

Adapters are found by the entry point group ``inflight.engines``; each entry names an `EngineKind`.
This module knows no engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.client import HttpEndpoint

GROUP = "inflight.engines"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user chooses of an engine that is started. None leaves it to the engine."""

    model: Path
    """Hugging Face checkpoint directory."""
    name: str | None = None
    """Name of the served model."""
    dtype: str | None = None
    """A wire dtype, such as ``bfloat16``."""
    device: str | None = None
    """``cpu`` or ``cuda``."""
    max_model_len: int | None = None
    """Longest sequence in tokens."""
    max_concurrent: int | None = None
    """Sequences decoded at a time."""
    threads: int | None = None
    """CPU threads of the engine's process."""
    arguments: Sequence[str] = field(default=())
    """Further arguments of the engine's own command line, after ours."""


def has_gpu(device: str | None) -> bool:
    """Return True if an engine that is started for ``device`` finds a GPU; None: whether this machine has one."""
    return device.startswith("cuda") if device is not None else Path("/dev/nvidiactl").exists()


class EngineKind(Protocol):
    """One kind of engine. Values of it hold no state."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of the entry point, such as ``vllm``."""

    @abstractmethod
    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        """Return what follows the Python interpreter on the command line of a server that inflight can attach to."""

    @abstractmethod
    def environment(self, options: EngineOptions) -> Mapping[str, str]:
        """Return the environment variables that the server needs beside the inherited ones."""

    @property
    @abstractmethod
    def health_path(self) -> str:
        """Return the path that answers status 200 once the server can generate."""

    @property
    @abstractmethod
    def liveness_path(self) -> str | None:
        """Return the path that answers status 503 once a part of the engine has died, and in milliseconds until then.

        None if no path does: one that samples a token, or that a pause keeps from answering, is none.
        """

    @abstractmethod
    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint for the engine's own server at ``url``; nothing is sent before its first call."""


def load_engine_kind(name: str) -> EngineKind:
    """Return the engine registered under ``name``. Raises `ConfigError` with the known names."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigError(f"unknown engine {name!r}; known: {', '.join(['local', *sorted(found)])}")
    try:
        kind: EngineKind = found[name].load()
    except ImportError as error:
        raise ConfigError(f"engine {name!r} cannot be loaded: {error}; pip install 'inflight[{name}]'") from error
    return kind


def connect_endpoint(
    url: str, *, token: str | None = None, control_timeout_s: float = 30.0, generate_timeout_s: float = 600.0
) -> InferenceEndpoint:
    """Return an endpoint for ``http://...``, which speaks the contract, or ``ENGINE+http://...``, an engine's server.

    ``vllm+http://host:8000`` attaches to a vLLM server, ``sglang+http://host:30000`` to an SGLang server. Raises
    `ConfigError` for any other scheme; nothing is sent before the endpoint's first call.
    """
    scheme, separator, rest = url.partition("://")
    engine, plus, transport = scheme.rpartition("+")
    if not separator or not rest or transport not in ("http", "https"):
        raise ConfigError(f"{url!r} is no endpoint; write http://HOST:PORT, or ENGINE+http://HOST:PORT")
    if not plus:
        return HttpEndpoint(
            url, token=token, control_timeout_s=control_timeout_s, generate_timeout_s=generate_timeout_s
        )
    return load_engine_kind(engine).connect(
        f"{transport}://{rest}",
        token=token,
        control_timeout_s=control_timeout_s,
        generate_timeout_s=generate_timeout_s,
    )
