"""The specifications from which the servers of a run are started."""

from __future__ import annotations

from inflight.contracts import EngineOptions
from inflight.http.server_spec import EngineProcessOptions, ServerSpec
from inflight.run.config import RunConfig
from inflight.run.fleet_config import ServerGroupSection

_SHARE_OF_ENGINE = 0.9
"""The share of a server's start timeout that its engine may use."""


def server_spec(config: RunConfig, member: ServerGroupSection) -> ServerSpec:
    """Return the specification of one server of a fleet member, without its address and the run that it joins."""
    servers = config.servers
    released = member.kind.release_arguments if servers.release_memory else ()
    options = EngineOptions(
        model=config.model.path,
        name=config.model.path.name,
        dtype=config.model.dtype,
        device=servers.device,
        max_concurrent=member.max_concurrent,
        compile=member.compile,
        drafts=None if servers.drafts == "off" else servers.drafts,
        threads=servers.threads,
        arguments=(*released, *member.engine_arguments),
    )
    python = None if member.python is None else str(member.python)
    # Shorter than the run's own wait for the server, because the server's error quotes the engine's log.
    process = EngineProcessOptions(python=python, start_timeout_s=_SHARE_OF_ENGINE * config.run.start_timeout_s)
    return ServerSpec(options, member.engine, process=process)
