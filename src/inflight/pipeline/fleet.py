"""The servers of a run as endpoints: connected by URL, and checked against the run's model before any publish.

Knows nothing of processes, nor of which endpoint gets work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.contracts import InferenceEndpoint
from inflight.engines.kinds import connect_endpoint, load_engine_kind
from inflight.errors import ConfigError
from inflight.pipeline.config import RunConfig, ServersSection
from inflight.wire import Capabilities


def check_servers(servers: ServersSection) -> None:
    """Raise `ConfigError` for engines, interpreters and URLs that cannot be used; nothing is started or asked."""
    for member in servers.members:
        if member.engine != "local":
            load_engine_kind(member.engine)
        if member.python is not None and not (member.python.is_file() and os.access(member.python, os.X_OK)):
            raise ConfigError(
                f"servers.python {str(member.python)!r} is no interpreter; give the python of the virtual environment "
                f"that holds {member.engine}"
            )
    names = [connect_endpoint(url).name for url in servers.urls]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"servers.urls names {', '.join(twice)} twice; each server takes its own ranks of the group")
    num_servers = len(names) + sum(member.count for member in servers.members)
    if servers.urls_file is None and servers.quorum is not None and servers.quorum > num_servers:
        raise ConfigError(f"servers.quorum {servers.quorum} exceeds the number of servers, {num_servers}")
    if servers.urls_file is not None and not servers.urls_file.is_file():
        raise ConfigError(f"servers.urls_file {str(servers.urls_file)!r} is not there; give it one URL per line")


def connect_fleet(config: RunConfig, urls: Sequence[str], token: str) -> list[InferenceEndpoint]:
    """Return the endpoints behind ``urls``; nothing is sent yet."""
    timeout_s = config.servers.generate_timeout_s
    return [connect_endpoint(url, token=token, generate_timeout_s=timeout_s) for url in urls]


async def sequence_limits(
    config: RunConfig, vocab_size: int, wanted: Mapping[InferenceEndpoint, int]
) -> dict[InferenceEndpoint, int]:
    """Return how many sequences each endpoint runs at a time: what is wanted of it, or the fewer that it declares.

    Raises `ConfigError` for an endpoint that cannot take part in this run.
    """
    declared = await asyncio.gather(*(endpoint.capabilities() for endpoint in wanted))
    for endpoint, can in zip(wanted, declared, strict=True):
        if problem := _problem(config, vocab_size, can):
            raise ConfigError(f"{endpoint.name} {problem}")
    return {
        endpoint: min(can.max_concurrent_sequences, limit)
        for (endpoint, limit), can in zip(wanted.items(), declared, strict=True)
    }


def _problem(config: RunConfig, vocab_size: int, can: Capabilities) -> str | None:
    """Return why an endpoint of these capabilities cannot take part, and what to change."""
    servers, model = config.servers, config.model
    needs: tuple[tuple[str, dict[str, Any]], ...] = (
        ("in_flight", {"in_flight": servers.in_flight}),
        ("backend", {"transport": servers.backend}),
        ("delta" if servers.delta else "encoding", {"encodings": ["delta" if servers.delta else servers.encoding]}),
    )
    for setting, need in needs:
        if lack := can.lacks(**need):
            return f"does not declare {lack}: change servers.{setting}"
    if can.logprob_kind == "raw" and config.sampling.temperature != 1.0:
        return (
            "declares raw logprobs, which leave the temperature out, and sampling.temperature is "
            f"{config.sampling.temperature:g}: the loss needs those of the distribution that is sampled from. Set "
            "sampling.temperature to 1, or have the endpoint return processed logprobs"
        )
    if can.dtype != model.dtype:
        return (
            f"serves {can.model} in {can.dtype}, the run trains in {model.dtype}: set model.dtype to {can.dtype}, or "
            f"start the server with --dtype {model.dtype}"
        )
    if can.vocab_size != vocab_size:
        return (
            f"serves {can.model} with a vocabulary of {can.vocab_size} tokens, model.path {str(model.path)!r} has "
            f"{vocab_size}: start the server with that model, or set model.path to the server's"
        )
    return None
