"""Tracks the version of each server, and gives work to the servers that are up to date."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inflight.base.tasks import run_together
from inflight.observe.trace import events
from inflight.run.config import RunConfig
from inflight.run.ranks.group import TrainerGroup
from inflight.run.ranks.messages import PublishResult
from inflight.run.record.journal import Journal
from inflight.run.sampling.sampling_endpoint import version_of
from inflight.run.servers.servers import REAP_S, Servers, no_server_left
from inflight.weights.send.fleet import MemberState
from inflight.wire import EndpointState, WeightVersion

_ASK_AGAIN_S = 0.5
"""Interval, in seconds, at which servers are asked for their versions."""
_VERSION_S = 2.0
"""How long a server that pulls versions may take to report the version that it serves."""
_SAMPLES = (EndpointState.READY, EndpointState.STAGING, EndpointState.PAUSED, EndpointState.UPDATING)
_LEFT_OUT = (MemberState.SUSPECT, MemberState.DEAD)


class Delivery(Protocol):
    """Tracks which version each server serves, and gives work to the servers that may sample."""

    serving: Mapping[str, int | None]
    """The version that each server reported, or None if it did not answer. Empty if versions are pushed."""

    @abstractmethod
    async def start(self, published: PublishResult | None) -> None:
        """Give work to the servers that have the first version."""

    @abstractmethod
    def record(self, published: PublishResult | None) -> None:
        """Record the result of a publish, if there was one, and give work to the servers that the publish reached."""

    @abstractmethod
    async def watch(self) -> None:
        """Give work to servers that return. Raises `EndpointError` if no server is left and none returns in time."""


@dataclass(eq=False)
class PushDelivery(Delivery):
    """Gives work only to the servers that the last publish reached."""

    servers: Servers
    trainers: TrainerGroup
    serving: Mapping[str, int | None] = field(default_factory=dict)
    noted: set[str] = field(default_factory=set)
    problems: Sequence[str] = ()
    """The problems with servers that the last publishes reported; empty once a publish has reached a server."""
    known: set[str] = field(default_factory=set)
    """The servers that took part from the start or have held a version since."""

    async def start(self, published: PublishResult | None) -> None:
        self.known = set() if published is None else {*published.states}
        self.record(published)

    def record(self, published: PublishResult | None) -> None:
        _record(published, self.servers.journal)
        if published is None:
            return
        version = published.version
        news = [text for text in published.notes if text not in self.noted]
        self.noted.update(news)
        self.problems = () if published.endpoints else published.notes or self.problems
        for text in news:
            self.servers.note(f"a server was left out: {text}")
        came = sorted(change for change in published.changes if change.after is MemberState.HEALTHY)
        restored = [name for name, before, _ in came if name in self.known and before in _LEFT_OUT]
        joined = [name for name, _, _ in came if name not in self.known]
        self.known = {*published.endpoints} | (self.known & published.states.keys())
        for name in restored:
            self.servers.note(f"{name} is back, at version {version}")
        for name in joined:
            self.servers.note(f"{name} has joined, at version {version}")
        if any(change.before is not MemberState.JOINING for change in published.changes) or news:
            self.servers.journal.fleet(
                published.span,
                restored=restored,
                joined=joined,
                removed=published.removed,
                changes=published.changes,
                states=published.states,
                serving=published.endpoints,
            )
        self.servers.actor.serve(published.endpoints, version)
        self.servers.served(published.endpoints)

    async def watch(self) -> None:
        """Whenever no server is left, publish again until one answers.

        As long as a server is left, the publish of each step contacts the lost ones.
        """
        actor, timeout_s = self.servers.actor, self.servers.config.run.start_timeout_s
        while True:
            await actor.unserved.wait()
            if self.servers.own:
                await asyncio.sleep(REAP_S)  # if all processes have ended, the run ends soon
            self.servers.note(f"no inference server is left; waiting up to {timeout_s:g} s for one to come back")
            deadline = time.monotonic() + timeout_s
            while actor.unserved.is_set():
                is_late = time.monotonic() > deadline
                self.record((await self.trainers.publish(self.servers.members())).published)
                if actor.unserved.is_set():
                    if is_late:
                        raise no_server_left(actor, self.problems)
                    await asyncio.sleep(_ASK_AGAIN_S)


@dataclass(eq=False)
class PullDelivery(Delivery):
    """Gives work to every server that reports a version; servers load stored versions on their own.

    A server may serve any version, since each token carries the version that sampled it.
    """

    servers: Servers
    serving: Mapping[str, int | None] = field(default_factory=dict)

    async def start(self, published: PublishResult | None) -> None:
        self.record(published)
        await self._look()

    def record(self, published: PublishResult | None) -> None:
        _record(published, self.servers.journal)

    async def watch(self) -> None:
        actor, last_seen = self.servers.actor, time.monotonic()
        while True:
            await asyncio.sleep(_ASK_AGAIN_S)
            await self._look()
            if not actor.unserved.is_set():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > self.servers.config.run.start_timeout_s:
                raise no_server_left(actor)

    async def _look(self) -> None:
        """Ask every server which version it serves, and give work to the servers that answer."""
        endpoints = list(self.servers.membership.taking_part)
        answers = await run_together(*(version_of(endpoint, _VERSION_S) for endpoint in endpoints))
        before = self.serving
        self.serving = {
            endpoint.name: answer.version if answer is not None and self._may_sample(answer) else None
            for endpoint, answer in zip(endpoints, answers, strict=True)
        }
        for name, version in self.serving.items():
            if version is not None and before.get(name, version) is None:
                self.servers.note(f"{name} is back, at version {version}")
            elif version is None and before.get(name) is not None:
                self.servers.note(
                    f"{name} does not answer or has incomplete weights: it receives no work until it recovers"
                )
        if self.serving != before:
            self.servers.journal.event(
                events.ServedVersions, trainer=self.servers.journal.version, servers=self.serving
            )
        self.servers.actor.serve([name for name, version in self.serving.items() if version is not None], 0)

    def _may_sample(self, served: WeightVersion) -> bool:
        """Return whether a server has weights of this run, and not a newer version from an earlier incarnation."""
        return (
            served.state in _SAMPLES
            and served.run_id in (None, self.servers.membership.run_id)
            and served.version <= self.servers.journal.version + 1
        )


def delivery_of(config: RunConfig, servers: Servers, trainers: TrainerGroup) -> Delivery:
    """Return the run's part of the configured delivery; `publishing_of` returns the ranks' part."""
    return PushDelivery(servers, trainers) if config.updates.followed is None else PullDelivery(servers)


def _record(published: PublishResult | None, journal: Journal) -> None:
    if published is not None and published.is_published:
        journal.event(events.WeightsPublished, published.span, **published.event_fields())
        journal.paused(published.paused_s)
