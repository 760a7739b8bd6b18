"""Strategies for delivering new versions to the servers, each with one half in the run and one in the ranks.

The half in the run tracks which server serves which version. The half in the ranks publishes or stores versions.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inflight.contracts import TrainerWorker
from inflight.run.config import RunConfig

if TYPE_CHECKING:
    from inflight.run.delivery import Delivery
    from inflight.run.ranks.group import TrainerGroup
    from inflight.run.ranks.messages import Start
    from inflight.run.ranks.publishing import Publishing
    from inflight.run.servers.servers import Servers


class Updates(Protocol):
    """A strategy for delivering new versions to the servers. Each half is loaded only where it is used."""

    knows_versions: bool
    """Whether the run knows the version with which a request begins, so that it can withdraw groups by version."""

    @abstractmethod
    def delivery(self, servers: Servers, trainers: TrainerGroup) -> Delivery:
        """Return the run's half."""

    @abstractmethod
    def publishing(self, worker: TrainerWorker, start: Start, deadline_s: float) -> Publishing:
        """Return a rank's half. Errors of connecting to the servers propagate."""


@dataclass(frozen=True)
class PushUpdates(Updates):
    """Rank 0 publishes each version to the servers and waits for them."""

    config: RunConfig
    knows_versions: bool = True

    def delivery(self, servers: Servers, trainers: TrainerGroup) -> Delivery:
        from inflight.run.delivery import PushDelivery

        return PushDelivery(servers, trainers)

    def publishing(self, worker: TrainerWorker, start: Start, deadline_s: float) -> Publishing:
        from inflight.run.ranks.publishing import PushParticipation, PushPublishing

        if worker.rank:
            return PushParticipation(self.config.updates, worker, deadline_s)
        urls = () if start.members is None else start.members.urls
        return PushPublishing(self.config.updates, worker, urls, start.run_id, deadline_s)


@dataclass(frozen=True)
class PullUpdates(Updates):
    """Rank 0 stores each version, and servers load the newest one on their own."""

    config: RunConfig
    knows_versions: bool = False

    def delivery(self, servers: Servers, trainers: TrainerGroup) -> Delivery:
        from inflight.run.delivery import PullDelivery

        return PullDelivery(servers)

    def publishing(self, worker: TrainerWorker, start: Start, deadline_s: float) -> Publishing:
        from inflight.run.ranks.publishing import PullParticipation, PullPublishing

        if worker.rank:
            return PullParticipation()
        return PullPublishing(self.config.updates, start.run_id, deadline_s)


def updates_of(config: RunConfig) -> Updates:
    """Return the strategy that a configuration names."""
    return PushUpdates(config) if config.updates.followed is None else PullUpdates(config)
