"""Two ranks of a trainer that both send: what a failure, a silence and an abandoned call of one of them lead to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

import pytest

from inflight.base.threads import start_in_thread
from inflight.conformance.fleet.sources import RankLink, ShardedShadeSource
from inflight.errors import PublishError, TransferError
from inflight.types import EndpointOutcome
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.send.ranks import JoinOrder, PartSender, RankSenders
from inflight.weights.transports import make_sender
from tests.gates import SOON_S
from tests.weights.test_abandoned import Local

BUCKET_BYTES = 100_000


class SecondRank:
    """Rank 1 in threads of this process; ``failure`` is raised once, where ``step`` begins, after ``gate`` is set."""

    def __init__(self, local: Local, step: str = "", failure: Exception | None = None) -> None:
        here, there = Pipe()
        self.source = ShardedShadeSource(0, (), RankLink(here, 1), lambda *_: None)
        self.other = ShardedShadeSource(1, (), RankLink(there, 0), self._reach)
        self.gate = threading.Event()
        self._step, self._failure = step, failure
        self._parts = PartSender(self.other, make_sender("http"))
        for source in (self.source, self.other):
            source.hold(1, local.tensors)

    def _reach(self, step: str, _: int) -> None:
        if step == self._step:
            self.gate.wait(SOON_S)
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def send(self, deadline_s: float) -> Future[None]:
        return start_in_thread(lambda: self._parts.send(deadline_s), "rank 1")

    def close(self) -> None:
        self.gate.set()
        self.source.link.lose("the test is over")
        self._parts.close()


@contextmanager
def publishing(local: Local, ranks: SecondRank) -> Iterator[WeightPublisher]:
    try:
        with WeightPublisher(
            [local.endpoint], make_sender("http"), run_id="here", sharded=ranks.source, delta=True
        ) as publisher:
            yield publisher
    finally:
        ranks.close()


@pytest.fixture
def local(model_dir: Path) -> Local:
    return Local(model_dir)


def test_a_failure_of_another_rank_ends_the_publish_with_a_report_and_the_next_succeeds(local: Local) -> None:
    ranks = SecondRank(local, "encode", TransferError("its memory is full"))
    ranks.gate.set()
    with publishing(local, ranks) as publisher:
        sending = ranks.send(SOON_S)
        with pytest.raises(PublishError, match="rank 1 of the trainer: its memory is full") as raised:
            publish_weights(ranks.source, publisher, bucket_bytes=BUCKET_BYTES, deadline_s=SOON_S)
        sending.result(SOON_S)
        assert [it.outcome for it in raised.value.report.endpoints] == [EndpointOutcome.ABORTED]
        for version in (2, 3):  # all of it, and a delta in which nothing has changed
            ranks.source.version = ranks.other.version = version
            sending = ranks.send(SOON_S)
            report = publish_weights(ranks.source, publisher, bucket_bytes=BUCKET_BYTES, deadline_s=SOON_S)
            sending.result(SOON_S)
            assert report.applied_everywhere
        assert report.sent_bytes < report.size_bytes / 10


def test_a_rank_that_does_not_answer_ends_the_publish_at_its_deadline(local: Local) -> None:
    ranks = SecondRank(local, "answer")
    with publishing(local, ranks) as publisher:
        sending = ranks.send(SOON_S)
        started = time.monotonic()
        with pytest.raises(PublishError, match=r"the publish updated 0 of \d+ endpoints, but at least"):
            publish_weights(ranks.source, publisher, bucket_bytes=BUCKET_BYTES, deadline_s=1.0)
        assert time.monotonic() - started < SOON_S / 2
        assert ranks.source.link.lost == "rank 1 did not answer in time"
        ranks.gate.set()
        with pytest.raises(TransferError, match="rank 0 is gone"):
            sending.result(SOON_S)
        with pytest.raises(PublishError, match="the trainer's ranks have lost their connection"):
            publish_weights(ranks.source, publisher, bucket_bytes=BUCKET_BYTES, deadline_s=1.0)


class OneAtATime(ShardedShadeSource):
    """A source that records the messages of each exchange, and holds the first one until ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__(0, (), RankLink(Pipe()[0], 1), lambda *_: None)
        self.gate, self.has_begun = threading.Event(), threading.Event()
        self.noted: list[str] = []

    def exchange(self, message: bytes, timeout_s: float) -> Sequence[bytes]:
        self.noted.append("begins")
        self.has_begun.set()
        self.gate.wait(SOON_S)
        self.noted.append("ends")
        return [message, b"{}"]


def test_a_call_that_a_publish_has_abandoned_exchanges_nothing_at_the_same_time_or_afterwards() -> None:
    source = OneAtATime()
    ranks = RankSenders(make_sender("http"), source, delta=False)
    with ranks.sending(BUCKET_BYTES, SOON_S):
        joining = start_in_thread(ranks.join, "abandoned")
        assert source.has_begun.wait(SOON_S)
        releasing = threading.Timer(0.2, source.gate.set)
        releasing.start()
    assert source.noted == ["begins", "ends", "begins", "ends"]
    with pytest.raises(TransferError, match="no weight group is open"):
        joining.result(SOON_S)
    with pytest.raises(TransferError, match="the publish has ended"):
        ranks._order(JoinOrder())
    releasing.join()
