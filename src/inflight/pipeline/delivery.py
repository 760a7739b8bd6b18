"""Who serves which version, and so who may be given work: pushed to the fleet, or pulled by the servers themselves."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from inflight.contracts import InferenceEndpoint
from inflight.errors import InflightError
from inflight.pipeline.actor import Actor
from inflight.pipeline.journal import Journal
from inflight.pipeline.messages import Served
from inflight.pipeline.servers import REAP_S, Servers, nobody_left
from inflight.pipeline.trainer_group import TrainerGroup
from inflight.weights.fleet import MemberState
from inflight.wire import EndpointState, WeightVersion

_ASK_AGAIN_S = 0.5
"""Pause between two questions whether a server is back, while there is none."""
_VERSION_S = 2.0
"""How long a server that takes versions by itself may take to say which one it serves."""
_SAMPLES = (EndpointState.READY, EndpointState.STAGING, EndpointState.HELD, EndpointState.UPDATING)
_PARTS = {"version", "gather_s", "wire_s", "hold_s", "load_s", "sent_bytes"}
"""What the timeline shows of an update."""


class Delivery(Protocol):
    """What a run knows of the versions that its servers have."""

    serving: Mapping[str, int | None]
    """Version that each server said it serves, None if it gave no answer; empty where a publish says it."""

    @abstractmethod
    async def start(self, served: Served | None) -> None:
        """Give work to the servers that have the first version."""

    @abstractmethod
    def published(self, served: Served | None) -> None:
        """Note what a publish did, if there was one, and give work to the servers that it reached."""

    @abstractmethod
    async def watch(self) -> None:
        """Give work to servers that come back. Raises `EndpointError` if none is left and none comes in time."""


@dataclass(eq=False)
class PushDelivery(Delivery):
    """A publish says who has the version: those get work, and no other."""

    trainers: TrainerGroup
    servers: Servers
    actor: Actor
    journal: Journal
    note: Callable[[str], None]
    timeout_s: float
    serving: Mapping[str, int | None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    async def start(self, served: Served | None) -> None:
        """Give work to the servers that the first publish reached."""
        self.published(served)

    def published(self, served: Served | None) -> None:
        """Give work to the servers that the publish reached, and tell who was left out, is back or has joined."""
        if served is None:
            return
        version, facts = self.journal.version, served.facts
        if facts is not None:
            self.journal.event("publish", *served.span, **facts.model_dump(include=_PARTS))
            self.journal.held(facts.held_s)
        news = [text for text in served.lost if text not in self.told]
        self.told.update(news)
        for text in news:
            self.note(f"a server was left out: {text}")
        for name in served.restored:
            self.note(f"{name} is back, at version {version}")
        for name in served.joined:
            self.note(f"{name} has joined, at version {version}")
        changed = [change for change in served.changes if change[1] != MemberState.JOINING]
        if changed or served.restored or news:
            told = served.model_dump(include={"restored", "joined", "removed", "changes", "states"})
            self.journal.event("fleet", *served.span, version=version, serving=served.endpoints, left=[], **told)
        self.actor.serve(served.endpoints, version)
        self.servers.served(served.endpoints)

    async def watch(self) -> None:
        """Whenever no server is left, publish to the first that answers again.

        While some are left, each publish asks those that are not. Raises `EndpointError` if none answers in time.
        """
        while True:
            await self.actor.unserved.wait()
            if self.servers.own:
                await asyncio.sleep(REAP_S)  # the ends of all of them end the run, and are seen a little later
            self.note(f"no inference server is left; waiting up to {self.timeout_s:g} s for one to come back")
            deadline = time.monotonic() + self.timeout_s
            while self.actor.unserved.is_set():
                is_late = time.monotonic() > deadline
                self.published((await self.trainers.publish(self.servers.members())).served)
                if self.actor.unserved.is_set():
                    if is_late:
                        raise nobody_left(self.actor)
                    await asyncio.sleep(_ASK_AGAIN_S)


@dataclass(eq=False)
class PullDelivery(Delivery):
    """Servers take stored versions when they are ready: those that say which one they serve get work.

    Tokens tell their versions, so that any version may be sampled from.
    """

    servers: Servers
    actor: Actor
    journal: Journal
    note: Callable[[str], None]
    timeout_s: float
    serving: Mapping[str, int | None] = field(default_factory=dict)

    async def start(self, served: Served | None) -> None:
        """Give work to the servers that answer."""
        self.published(served)
        await self._look()

    def published(self, served: Served | None) -> None:
        """Note that a version was stored, if one was."""
        if served is not None and served.facts is not None:
            self.journal.event("publish", *served.span, **served.facts.model_dump(include=_PARTS))

    async def watch(self) -> None:
        """Ask servers again and again what they serve. Raises `EndpointError` if none answers in time."""
        last_seen = time.monotonic()
        while True:
            await asyncio.sleep(_ASK_AGAIN_S)
            await self._look()
            if not self.actor.unserved.is_set():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > self.timeout_s:
                raise nobody_left(self.actor)

    async def _look(self) -> None:
        """Ask every server what it serves, and give work to those that answer."""
        endpoints = list(self.servers.endpoints)
        answers = await asyncio.gather(*map(_version, endpoints))
        before = self.serving
        self.serving = {
            endpoint.name: answer.version if answer is not None and answer.state in _SAMPLES else None
            for endpoint, answer in zip(endpoints, answers, strict=True)
        }
        for name, version in self.serving.items():
            if version is not None and before.get(name, version) is None:
                self.note(f"{name} is back, at version {version}")
            elif version is None and before.get(name) is not None:
                self.note(f"{name} does not answer, or has no whole weights: it gets no work")
        if self.serving != before:
            now = time.time()
            self.journal.event("versions", now, now, trainer=self.journal.version, servers=self.serving)
        self.actor.serve([name for name, version in self.serving.items() if version is not None], 0)


async def _version(endpoint: InferenceEndpoint) -> WeightVersion | None:
    """Return what an endpoint says it serves, None if it does not say it in time: it gets no work until it does."""
    try:
        async with asyncio.timeout(_VERSION_S):
            return await endpoint.weight_version()
    except (TimeoutError, InflightError):
        return None
