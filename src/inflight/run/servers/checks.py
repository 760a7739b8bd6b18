"""The servers of a run as endpoints: listed in a file, connected by URL, and checked against the run's model.

Knows nothing of processes or of which endpoint gets work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.kinds import connect_endpoint
from inflight.run.config import RunConfig
from inflight.run.fleet_config import ServersSection
from inflight.wire import Capabilities

_MAX_FILE_BYTES = 1 << 20
"""Only this much of a list of servers is read."""


def check_servers(servers: ServersSection) -> None:
    """Raise `ConfigError` for engines, interpreters and URLs that cannot be used. Starts and contacts nothing."""
    for member in servers.members:
        if member.kind.releases_memory == "never" and servers.release_memory:
            raise ConfigError(
                f"servers.release_memory needs engines that can release their memory, but {member.engine} cannot: "
                "leave it out"
            )
        if member.python is not None and not (member.python.is_file() and os.access(member.python, os.X_OK)):
            raise ConfigError(
                f"servers.python {str(member.python)!r} is not an interpreter; give the path of python in the "
                f"virtual environment that has {member.engine}"
            )
    names = [connect_endpoint(url).name for url in servers.attach.urls]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"servers.attach.urls lists {', '.join(twice)} more than once; list each server once")
    file = servers.attach.urls_file
    if file is not None and not file.is_file():
        raise ConfigError(f"servers.attach.urls_file {str(file)!r} does not exist; create it with one URL per line")


def read_server_list(path: Path) -> tuple[dict[str, str] | None, list[str]]:
    """Return the URLs in a file, by endpoint name, and the problems found in it.

    Comments begin with ``#``. Lines that are not a URL are left out. The URLs are None if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        problem = f"servers.attach.urls_file {str(path)!r} cannot be read: {error.strerror}; the fleet is unchanged"
        return None, [problem]
    listed: dict[str, str] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        if url := line.partition("#")[0].strip():
            try:
                listed.setdefault(connect_endpoint(url).name, url)
            except ConfigError as error:
                problems.append(f"line {number} of {str(path)!r} is ignored: {error}")
    return listed, problems


async def declared(config: RunConfig, vocab_size: int, endpoint: InferenceEndpoint) -> Capabilities:
    """Return what an endpoint declares. Raises `ConfigError` if it cannot take part in this run."""
    can = await endpoint.capabilities()
    if problem := _problem(config, vocab_size, can):
        raise ConfigError(f"{endpoint.name} {problem}")
    return can


def _problem(config: RunConfig, vocab_size: int, can: Capabilities) -> str | None:
    """Return why an endpoint with these capabilities cannot take part and what to change; None if it can."""
    updates, model = config.updates, config.model
    needs: tuple[tuple[str, dict[str, Any]], ...] = (
        ("updates.in_flight", {"in_flight": updates.in_flight}),
        ("updates.transport", {"transport": updates.transport}),
        (
            "updates.delta" if updates.delta else "updates.encoding",
            {"encodings": ["delta" if updates.delta else updates.encoding]},
        ),
        ("servers.release_memory", {"releases_memory": config.servers.release_memory}),
        ("train.router_replay", {"routed_experts": config.train.router_replay}),
    )
    for setting, need in needs:
        if lack := can.lacks(**need):
            return f"does not declare {lack}: change {setting}"
    if config.train.lora is not None and not (can.lora or can.partial_updates):
        return (
            "declares neither lora nor partial updates, so it cannot serve what train.lora trains: leave train.lora "
            "out to train and publish all weights, or use another engine"
        )
    if can.logprob_kind == "raw" and config.sampling.temperature != 1.0:
        return (
            "declares raw logprobs, which ignore the temperature, but sampling.temperature is "
            f"{config.sampling.temperature:g}: the loss needs logprobs of the distribution that is sampled from. Set "
            "sampling.temperature to 1, or have the endpoint return processed logprobs"
        )
    if can.dtype != model.dtype:
        return (
            f"serves {can.model} in {can.dtype}, but the run trains in {model.dtype}: set model.dtype to {can.dtype}, "
            f"or start the server with --dtype {model.dtype}"
        )
    if can.vocab_size != vocab_size:
        return (
            f"serves {can.model} with a vocabulary of {can.vocab_size} tokens, but model.path {str(model.path)!r} has "
            f"{vocab_size}: start the server with that model, or set model.path to the server's"
        )
    return None
