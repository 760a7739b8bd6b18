"""Creates the endpoint for a URL, using the installed engine kinds."""

from __future__ import annotations

from collections.abc import Callable

from inflight.base.extensions import load_installed
from inflight.contracts import EngineKind, InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.client import HttpEndpoint


def load_engine_kind(name: str) -> EngineKind:
    """Return the engine kind registered under ``name``. Raises `ConfigError`, which lists the known names."""
    kind: EngineKind = load_installed("engine", "engines", name)
    return kind


def connect_endpoint(
    url: str, *, token: str | None = None, control_timeout_s: float = 30.0, generate_timeout_s: float = 600.0
) -> InferenceEndpoint:
    """Return an endpoint for a contract server (``http://...``) or an engine's own server (``ENGINE+http://...``).

    ``vllm+http://host:8000`` attaches to a vLLM server, ``sglang+http://host:30000`` to an SGLang server. Raises
    `ConfigError` for any other scheme. Nothing is sent until the endpoint is first called.
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
