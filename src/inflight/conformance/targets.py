"""The targets of the kit: endpoints, workers and transports, specified by a URL, a command or ``module:function``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from inflight.base.extensions import check_reference
from inflight.errors import ConfigError
from inflight.wire import WireModel

SERVER_GROUP = "server-group-"
"""Prefix of a file name that ends with the id of the process group of a server that was started for a check."""


class _Target(WireModel):
    factory: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the factory."""

    @property
    def label(self) -> str:
        """The name of the target in the certificate."""
        return self.factory or ""


class EndpointTarget(_Target):
    """An endpoint to check. Exactly one of ``url``, ``factory`` and ``command`` is given.

    ``url`` is a server that speaks the contract or, as ``vllm+http://...``, an engine's own server, which is checked
    through its adapter. ``factory`` is ``module:function``: it receives a model directory (a `pathlib.Path`) and the
    options, and returns an `InferenceEndpoint` that serves the model, an awaitable that returns one, or an async
    context manager that yields one. ``command`` starts a server, with ``{model}``, ``{port}`` and ``{token_file}``
    filled in.
    """

    kind: Literal["endpoint"] = "endpoint"
    url: str | None = None
    command: str | None = None
    model: Path | None = None
    """The served checkpoint.

    If None, the kit creates one, unless the target is a URL, in which case the checkpoint is unknown.
    """
    token: str | None = None
    """The token for the control routes of a URL."""
    worker: str | None = None
    """The worker to compare the endpoint's logprobs with, as ``module:attribute``. If None, transformers is used."""
    tolerance: float | None = None
    """Maximum difference between logprobs that count as equal. If None, it depends on the dtype that the endpoint
    reports."""

    @property
    def label(self) -> str:
        return self.url or self.factory or self.command or ""


class WorkerTarget(_Target):
    """A trainer worker to check on ``num_ranks`` ranks.

    ``factory`` is the ``module:attribute`` of an `inflight.contracts.WorkerKind`, as in the entry-point group
    ``inflight.workers``. The kind creates each rank from ``model_path`` and the options.
    """

    kind: Literal["worker"] = "worker"
    factory: str
    num_ranks: int = 1
    options_of_ranks: dict[str, Any] = Field(default_factory=dict)
    """Further options for workers on several ranks. The single rank with which they are compared does not receive
    these options."""
    experts: bool = False
    """Whether the kit's checkpoints are mixtures of experts."""

    @property
    def flags(self) -> dict[str, str]:
        """The options that the certificate records."""
        options = {key: str(value) for key, value in (self.options | self.options_of_ranks).items()}
        return {**options, **({"experts": "true"} if self.experts else {}), "ranks": str(self.num_ranks)}


class TransportTarget(_Target):
    """A transport to check: the name of an installed one, or ``module:attribute`` of an `inflight.contracts.Transport`.

    If there are options, ``module:attribute`` is a function that creates a transport from them.
    """

    kind: Literal["transport"] = "transport"
    factory: str


Target = EndpointTarget | WorkerTarget | TransportTarget


def endpoint_target(text: str, **others: Any) -> EndpointTarget:
    """Return the target that a URL or ``module:function`` specifies. Raises `ConfigError` if the text is neither."""
    if "://" in text:
        try:
            parts = urlsplit(text)
            transport = parts.scheme.rpartition("+")[2]  # vllm+http: an engine's own server, through its adapter
            is_usable = transport in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ConfigError(f"{text!r} is not the URL of a server; give a URL such as http://127.0.0.1:8000")
        return EndpointTarget(url=text.rstrip("/"), **others)
    check_reference(text)
    return EndpointTarget(factory=text, **others)
