"""The endpoints that take part in a run: connected, checked, retired, and closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from inflight.base.tasks import run_together
from inflight.contracts import InferenceEndpoint
from inflight.errors import ConfigError
from inflight.http.kinds import connect_endpoint
from inflight.run.config import RunConfig
from inflight.run.ranks.messages import Members
from inflight.run.record.journal import Journal
from inflight.run.sampling.actor import Actor
from inflight.run.servers.checks import check_endpoint
from inflight.wire import Capabilities


@dataclass(eq=False, kw_only=True)
class FleetMembership:
    """The endpoints to which versions are published. ``actor`` is notified of each endpoint that joins or leaves."""

    config: RunConfig
    token: str
    vocab_size: int
    actor: Actor
    journal: Journal
    run_id: str | None = None
    """The run's name for servers, known once the servers are started."""
    taking_part: dict[InferenceEndpoint, str] = field(default_factory=dict)
    """URLs by endpoint, including endpoints that are leaving."""
    departed: list[InferenceEndpoint] = field(default_factory=list)
    """Endpoints that have left; their connections are closed at the end."""
    has_new_servers: bool = False
    """Whether a server has joined or returned since the last publish."""

    async def attach(self, limits: Mapping[str, int]) -> None:
        """Begin with the servers at these URLs, each with its number of slots.

        Raises `ConfigError` if one cannot take part.
        """
        self.taking_part = {self.connect(url): url for url in limits}
        capabilities = await run_together(*map(self.check, self.taking_part))
        for (endpoint, url), can in zip(self.taking_part.items(), capabilities, strict=True):
            self.actor.add(endpoint, limits[url], can)

    def connect(self, url: str) -> InferenceEndpoint:
        timeout_s = self.config.sampling.generate_timeout_s
        return connect_endpoint(url, token=self.token, generate_timeout_s=timeout_s)

    async def check(self, endpoint: InferenceEndpoint) -> Capabilities:
        """Return the capabilities of an endpoint. Raises `ConfigError` if it cannot take part."""
        can = await check_endpoint(self.config, self.vocab_size, endpoint)
        if self.config.train.lora is not None:
            run_id = (await endpoint.weight_version()).run_id
            if run_id not in (None, self.run_id):
                raise ConfigError(
                    f"{endpoint.name} serves weights of run {run_id!r}, but train.lora needs the weights with which it "
                    "was started: restart the server"
                )
        return can

    def add(self, endpoint: InferenceEndpoint, url: str, num_slots: int, capabilities: Capabilities) -> None:
        """Let a checked endpoint take part from the next publish on."""
        self.has_new_servers = True
        self.taking_part[endpoint] = url
        self.actor.add(endpoint, num_slots, capabilities)

    def retire(self, name: str, *, hands_on: bool = False) -> None:
        """Give an endpoint no more work; it leaves once its groups have ended or continue elsewhere."""
        self.actor.retire(name, lambda: self._remove_retired(name), hands_on=hands_on)

    def _remove_retired(self, name: str) -> None:
        """Remove a retired server that has finished its groups."""
        for endpoint in [endpoint for endpoint in self.taking_part if endpoint.name == name]:
            del self.taking_part[endpoint]
            self.departed.append(endpoint)
        self.journal.fleet(left=[name])

    def take_members(self) -> Members:
        """Return the servers of the next publish. Servers that join afterwards belong to the publish after it."""
        members = Members(urls=tuple(self.taking_part.values()), ask_all=self.has_new_servers)
        self.has_new_servers = False
        return members

    async def disconnect(self) -> None:
        """Close the connections to all servers."""
        endpoints = (*self.taking_part, *self.departed)
        await asyncio.gather(*(endpoint.aclose() for endpoint in endpoints), return_exceptions=True)
