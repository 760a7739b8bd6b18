"""Lookup of installed kinds of trainer workers by name."""

from __future__ import annotations

from inflight.base.extensions import import_object, load_installed
from inflight.contracts import WorkerKind
from inflight.errors import ConfigError


def load_worker_kind(name: str) -> WorkerKind:
    """Return the worker kind that an entry point or ``module:attribute`` names. Raises `ConfigError`."""
    kind = import_object(name) if ":" in name else load_installed("worker", "workers", name, ("module:attribute",))
    if not isinstance(kind, WorkerKind):
        raise ConfigError(
            f"worker {name!r} is a {type(kind).__name__}, not a WorkerKind: name an instance of a subclass of "
            "inflight.contracts.WorkerKind"
        )
    return kind
