"""Endpoints for ``inflight serve`` that fail once in a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.loading import load_endpoint


def without_memory_once(model: Path, *, name: str, **_: Any) -> EmbeddedEndpoint:
    """Return an endpoint that finds no memory when it is to take its own back for the first time."""
    endpoint = load_endpoint(model, name=name)
    take_memory = endpoint._engine.take_memory

    def none_left() -> None:
        endpoint._engine.take_memory = take_memory  # type: ignore[method-assign]
        raise RuntimeError("out of memory")

    endpoint._engine.take_memory = none_left  # type: ignore[method-assign]
    return endpoint
