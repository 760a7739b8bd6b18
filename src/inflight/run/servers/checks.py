"""Checks the servers of a run: their settings, the file that lists them, and their capabilities."""

from __future__ import annotations

import os
from pathlib import Path

from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.kinds import connect_endpoint
from inflight.run.config import RunConfig
from inflight.run.fleet_config import ServersSection
from inflight.wire import Capabilities, Needs

_MAX_FILE_BYTES = 1 << 20
"""Maximum number of bytes that are read from a list of servers."""


def check_servers(servers: ServersSection) -> None:
    """Raise `ConfigError` for engines, interpreters and URLs that cannot be used. Contacts no server."""
    for member in servers.members:
        if member.kind.releases_memory == "never" and servers.release_memory:
            raise ConfigError(
                f"servers.release_memory needs engines that can release their memory, but {member.engine} cannot: "
                "omit this setting"
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

    Comments begin with ``#``. Lines that are not URLs are skipped. The URLs are None if the file cannot be read.
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


def needs_of(config: RunConfig, vocab_size: int) -> Needs:
    """Return what a run requires of each server."""
    updates = config.updates
    return Needs(
        in_flight=updates.in_flight,
        transport=updates.transport,
        encodings=("delta" if updates.delta else updates.encoding,),
        sharded=updates.overlap and config.train.num_ranks > 1,
        releases_memory=config.servers.release_memory,
        routed_experts=config.train.router_replay,
        lora_or_merged=config.train.lora is not None,
        processed_logprobs=config.sampling.temperature != 1.0,
        dtype=config.model.dtype,
        vocab_size=vocab_size,
    )


_ADVICE = {
    "in_flight": "change updates.in_flight",
    "transport": "change updates.transport",
    "encodings": "change updates.encoding and updates.delta",
    "sharded": "leave out updates.overlap, or use another engine",
    "releases_memory": "change servers.release_memory",
    "routed_experts": "change train.router_replay",
    "lora_or_merged": "leave train.lora out to train and publish all weights, or use another engine",
    "processed_logprobs": "set sampling.temperature to 1, or have the endpoint return processed logprobs",
    "dtype": "change model.dtype, or start the server with another --dtype",
    "vocab_size": "start the server with the model of the run, or set model.path to the server's",
}


async def check_endpoint(config: RunConfig, vocab_size: int, endpoint: InferenceEndpoint) -> Capabilities:
    """Return the capabilities of an endpoint. Raises `ConfigError` if it cannot take part in this run."""
    can = await endpoint.capabilities()
    if missing := can.missing(needs_of(config, vocab_size)):
        problems = [f"does not support {what}: {_ADVICE[need]}" for need, what in missing.items()]
        raise ConfigError(f"{endpoint.name} {'; it '.join(problems)}")
    return can
