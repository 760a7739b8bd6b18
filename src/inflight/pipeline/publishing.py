"""How a trainer rank brings versions to servers: pushed to a fleet, or stored for servers that pull."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from inflight.contracts import TrainerWorker
from inflight.errors import FencedError, UnsupportedError
from inflight.pipeline.config import ServersSection
from inflight.pipeline.messages import Members, PublishFacts, Served
from inflight.types import PublishReport
from inflight.weights.fleet import Fleet, MemberState
from inflight.weights.publisher import WeightPublisher
from inflight.weights.storing import newest_epoch, store_weights
from inflight.weights.transports.files import FileSender

_LEFT_OUT = (MemberState.SUSPECT, MemberState.DEAD)


class Publishing(Protocol):
    """What every rank calls to bring the present version to servers."""

    @abstractmethod
    def publish(self, worker: TrainerWorker, members: Members) -> Served | None:
        """Publish the worker's version; returns what came of it on rank 0, None on the others."""

    def close(self) -> None:
        """Leave the weight group, if there is one; servers go on."""
        return


class Push(Publishing):
    """Publishes to whoever of the fleet can be reached, and waits for them."""

    def __init__(self, servers: ServersSection, urls: Sequence[str], run_id: str, rank: int) -> None:
        self._servers = servers
        self._fleet = _connected(servers, urls, run_id) if rank == 0 else Fleet(None)
        self._served = set(self._fleet.states)
        """Names of the endpoints that were there from the start, or have held a version since."""

    def publish(self, worker: TrainerWorker, members: Members) -> Served | None:
        """Let servers join and leave, then publish."""
        started = time.time()
        unfit = self._change_members(members) if worker.rank == 0 else []
        report = self._fleet.publish(
            worker, in_flight=self._servers.in_flight, deadline_s=self._servers.publish_deadline_s
        )
        if report is None:
            return None
        healthy = self._fleet.healthy
        came = [change for change in self._fleet.changes if change.after is MemberState.HEALTHY]
        served = Served(
            span=(started, time.time()),
            facts=_facts(report) if healthy else None,
            endpoints=healthy,
            lost=(*unfit, *self._fleet.notes),
            restored=tuple(sorted(c.endpoint for c in came if c.endpoint in self._served and c.before in _LEFT_OUT)),
            joined=tuple(sorted(c.endpoint for c in came if c.endpoint not in self._served)),
            removed=tuple(name for name in self._fleet.states if name not in healthy),
            states=dict(self._fleet.states),
            changes=tuple((c.endpoint, c.before, c.after) for c in self._fleet.changes),
        )
        self._served |= {*healthy}
        return served

    def close(self) -> None:
        """Leave the weight group."""
        self._fleet.close()

    def _change_members(self, members: Members) -> list[str]:
        """Let servers join and leave as the run says; returns why some cannot."""
        if members.ask_all:
            self._fleet.ask_all()
        unfit = []
        for name in members.leave:
            self._fleet.leave(name)
        for url in members.join:
            try:
                self._fleet.join(url)
            except UnsupportedError as error:
                unfit.append(str(error))
        return unfit


class Pull(Publishing):
    """Stores each version, and waits for nobody."""

    def __init__(self, servers: ServersSection, run_id: str, rank: int) -> None:
        assert servers.directory is not None
        self._directory = servers.directory.absolute()
        self._servers = servers
        self._run_id = run_id
        self._store = FileSender(self._directory) if rank == 0 else None
        self._epoch = self._newest_epoch() + 1

    def publish(self, worker: TrainerWorker, members: Members) -> Served | None:
        """Store the version.

        Raises `FencedError` after a later incarnation has stored one: servers refuse what comes from this one.
        """
        started = time.time()
        newest = self._newest_epoch()
        report = store_weights(
            worker,
            self._store,
            run_id=self._run_id,
            epoch=self._epoch,
            encoding=self._servers.encoding,
            deadline_s=self._servers.publish_deadline_s,
        )
        if newest > self._epoch:  # told only now, when every rank has gathered
            raise FencedError(
                f"the trainer of run {self._run_id!r} was replaced: this is its epoch {self._epoch}, epoch "
                f"{newest} has taken over. Stop this trainer"
            )
        if report is None:
            return None
        ended = time.time()
        facts = PublishFacts(
            version=report.ref.version,
            size_bytes=report.size_bytes,
            sent_bytes=report.stored_bytes,
            gb_per_s=_gb_per_s(report.stored_bytes, report.store_s),
            gather_s=report.gather_s,
            wire_s=report.store_s,
            total_s=ended - started,
        )
        return Served(span=(started, ended), facts=facts)

    def _newest_epoch(self) -> int:
        return 0 if self._store is None else newest_epoch(self._directory, self._run_id)


def _connected(servers: ServersSection, urls: Sequence[str], run_id: str) -> Fleet:
    token = os.environ.get("INFLIGHT_TOKEN")
    publisher = WeightPublisher.connect(
        urls,
        run_id=run_id,
        token=token,
        backend=servers.backend,
        directory=None if servers.directory is None else servers.directory.absolute(),
        encoding=servers.encoding,
        delta=servers.delta,
        staged=servers.staged,
        connect_timeout_s=servers.publish_deadline_s,
    )
    return Fleet(publisher, quorum=servers.quorum, token=token)


def _facts(report: PublishReport) -> PublishFacts:
    spans = report.spans
    return PublishFacts(
        version=report.version,
        size_bytes=report.size_bytes,
        sent_bytes=report.sent_bytes,
        gb_per_s=_gb_per_s(report.sent_bytes, spans.wire_s),
        gather_s=spans.gather_s,
        wire_s=spans.wire_s,
        total_s=spans.total_s,
        hold_s=spans.hold_s,
        load_s=spans.load_s,
        first_token_s=spans.first_token_s,
        held_s={e.endpoint: e.timings.held_s for e in report.endpoints if e.timings is not None},
        outcomes={e.endpoint: str(e.outcome) for e in report.endpoints},
    )


def _gb_per_s(size_bytes: int, seconds: float) -> float | None:
    return size_bytes / 1e9 / seconds if seconds > 0 else None
