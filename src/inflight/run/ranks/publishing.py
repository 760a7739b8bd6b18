"""How trainer ranks publish versions: rank 0 pushes them to a fleet, or stores them for servers that pull them.

The other ranks participate in gathering, or send the weights that they hold.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from inflight.base.clock import unix_time
from inflight.contracts import ShardedWeightSource, TrainerWorker
from inflight.errors import ConfigError, FencedError
from inflight.run.machines.time_limits import time_limits
from inflight.run.ranks.messages import Members, PublishResult, Start
from inflight.run.updates_config import UpdatesSection
from inflight.weights.send.fleet import Fleet, take_part
from inflight.weights.send.gathering import gather_only
from inflight.weights.send.publisher import WeightPublisher
from inflight.weights.send.ranks import PartSender
from inflight.weights.send.storing import newest_incarnation, store_weights
from inflight.weights.transports import make_sender
from inflight.weights.transports.files import DirectorySender


class Publishing(Protocol):
    """One rank's role in publishing. All ranks publish together."""

    @abstractmethod
    def publish(self, worker: TrainerWorker, members: Members) -> PublishResult | None:
        """Publish the worker's current version; return the result on rank 0."""

    def close(self) -> None:
        return


class PushPublishing(Publishing):
    """Publishes to the servers of the fleet that can be reached, and waits for them."""

    def __init__(
        self,
        updates: UpdatesSection,
        worker: TrainerWorker,
        urls: Sequence[str],
        run_id: str,
        deadline_s: float,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._updates = updates
        self._deadline_s = deadline_s
        token = os.environ.get("INFLIGHT_TOKEN")
        publisher = WeightPublisher.connect(
            urls,
            run_id=run_id,
            token=token,
            transport=updates.transport,
            address=updates.own_address,
            directory=_directory_of(updates, worker),
            encoding=updates.encoding,
            delta=updates.delta,
            staged=updates.staged,
            sharded=_shards_of(updates, worker),
            connect_timeout_s=deadline_s,
        )
        self._fleet = Fleet(publisher, quorum=updates.quorum, token=token, group=group)

    def publish(self, worker: TrainerWorker, members: Members) -> PublishResult:
        started = unix_time()
        self._fleet.set_members(members.urls)
        if members.ask_all:
            self._fleet.ask_all()
        report = self._fleet.publish(worker, in_flight=self._updates.in_flight, deadline_s=self._deadline_s)
        return PublishResult(
            span=(started, unix_time()),
            is_published=bool(self._fleet.healthy),
            version=report.version,
            size_bytes=report.size_bytes,
            sent_bytes=report.sent_bytes,
            **asdict(report.spans),
            paused_s={e.endpoint: e.timings.paused_s for e in report.endpoints if e.timings is not None},
            outcomes={e.endpoint: str(e.outcome) for e in report.endpoints},
            notes=self._fleet.notes,
            states=dict(self._fleet.states),
            changes=self._fleet.changes,
        )

    def close(self) -> None:
        self._fleet.close()


class PushParticipation(Publishing):
    """The role in `PushPublishing` of every rank except rank 0."""

    def __init__(
        self, updates: UpdatesSection, worker: TrainerWorker, deadline_s: float, group: dist.ProcessGroup | None
    ) -> None:
        self._deadline_s = deadline_s
        self._group = group
        self._parts: PartSender | None = None
        if (shards := _shards_of(updates, worker)) is not None:
            directory = _directory_of(updates, worker)
            sender = make_sender(updates.transport, address=updates.own_address, directory=directory)
            self._parts = PartSender(shards, sender)

    def publish(self, worker: TrainerWorker, members: Members) -> None:
        take_part(worker, self._parts, deadline_s=self._deadline_s, group=self._group)

    def close(self) -> None:
        if self._parts is not None:
            self._parts.close()


class PullParticipation(Publishing):
    """The role in `PullPublishing` of every rank except rank 0."""

    def publish(self, worker: TrainerWorker, members: Members) -> None:
        gather_only(worker)


class PullPublishing(Publishing):
    """Stores each version without waiting for servers."""

    def __init__(self, updates: UpdatesSection, run_id: str, deadline_s: float) -> None:
        assert updates.directory is not None
        self._directory = updates.directory.absolute()
        self._updates = updates
        self._deadline_s = deadline_s
        self._run_id = run_id
        self._store = DirectorySender(self._directory)
        self._incarnation = newest_incarnation(self._directory, run_id) + 1

    def publish(self, worker: TrainerWorker, members: Members) -> PublishResult:
        """Store the current version.

        Raises `FencedError` if a later incarnation has stored a version, because servers refuse versions of
        earlier incarnations.
        """
        started = unix_time()
        newest = newest_incarnation(self._directory, self._run_id)
        report = store_weights(
            worker,
            self._store,
            run_id=self._run_id,
            incarnation=self._incarnation,
            encoding=self._updates.encoding,
            deadline_s=self._deadline_s,
        )
        if newest > self._incarnation:  # raised only after every rank has gathered
            raise FencedError(
                f"the trainer of run {self._run_id!r} was replaced: this is its incarnation {self._incarnation}, and "
                f"incarnation {newest} has taken over. Stop this trainer"
            )
        ended = unix_time()
        return PublishResult(
            span=(started, ended),
            version=report.ref.version,
            size_bytes=report.size_bytes,
            sent_bytes=report.stored_bytes,
            gather_s=report.gather_s,
            wire_s=report.store_s,
            total_s=ended - started,
        )


def publishing_of(worker: TrainerWorker, start: Start, deadline_s: float) -> Publishing:
    """Return a rank's role in publishing; all ranks call this together. Errors in connecting to the servers propagate.

    Raises `ConfigError` if publishes are to overlap training, but the worker does not support it.
    """
    updates, group = start.config.updates, None
    if updates.overlap:
        _check_overlap(updates, worker)
        if worker.world_size > 1:  # forward and backward passes use the default group meanwhile
            timeout = timedelta(seconds=time_limits(start.config).collective_s)
            group = dist.new_group(backend="gloo", timeout=timeout)
    if updates.followed is not None:
        return PullParticipation() if worker.rank else PullPublishing(updates, start.run_id, deadline_s)
    if worker.rank:
        return PushParticipation(updates, worker, deadline_s, group)
    urls = () if start.members is None else start.members.urls
    return PushPublishing(updates, worker, urls, start.run_id, deadline_s, group)


def _check_overlap(updates: UpdatesSection, worker: TrainerWorker) -> None:
    """Raise `ConfigError` unless a publish reads only weights that forward and backward passes do not modify."""
    name, remedy = type(worker).__name__, "leave out updates.overlap"
    if not isinstance(worker, ShardedWeightSource):
        raise ConfigError(
            f"updates.overlap is set, but {name} is not a ShardedWeightSource, whose weights can be read during "
            f"forward and backward passes: {remedy}"
        )
    if worker.world_size > 1 and not worker.shardings():
        raise ConfigError(
            f"updates.overlap is set, but the ranks of {name} cannot send the weights of this model that they hold, "
            f"and gathering them would interleave with forward and backward passes: {remedy}"
        )


def _shards_of(updates: UpdatesSection, worker: TrainerWorker) -> ShardedWeightSource | None:
    """Return the worker if every rank is to send the weights that it holds.

    Raises `ConfigError` if the worker cannot.
    """
    if not updates.sharded or worker.world_size == 1:
        return None
    if not isinstance(worker, ShardedWeightSource):
        raise ConfigError(
            f"updates.sharded is set, but {type(worker).__name__} is not a ShardedWeightSource: its ranks cannot "
            "send the weights that they hold. Leave out updates.sharded"
        )
    return worker


def _directory_of(updates: UpdatesSection, worker: TrainerWorker) -> Path | None:
    """Return the directory where a rank stores weights: each rank that sends has its own."""
    if updates.directory is None:
        return None
    whole = updates.directory.absolute()
    return whole if _shards_of(updates, worker) is None else whole / f"rank-{worker.rank}"
