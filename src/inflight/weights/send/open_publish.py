"""A publish that endpoints have been asked to accept, as the training thread sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from inflight.errors import PublishError
from inflight.types import PublishReport, WeightBucket
from inflight.weights.send.publish import CLOSED, Publish, Stopwatch


class OpenPublish:
    """A publish that endpoints have been asked to accept, and whose buckets have not been sent yet.

    An endpoint that does not stage the update neither samples nor accepts other updates until the publish ends, at the
    latest at its deadline.
    """

    def __init__(self, run: Callable[..., Any], publish: Publish, running: Future[PublishReport]) -> None:
        self._run = run
        """Runs an async call in the publisher's event loop, and returns its result."""
        self._publish = publish
        self._running = running

    @property
    def is_over(self) -> bool:
        return self._running.done()

    def wait_until_accepted(self) -> None:
        """Return once every endpoint has accepted the update, and has paused unless it stages the update.

        Raises `PublishError` if the publish ended instead; all endpoints have then resumed.
        """
        self._run(self._publish.wait_until_accepted)
        if self.is_over:
            report = self._running.result()
            raise PublishError(f"the update was not accepted: {report.summary()}", report)

    def send(self, gathered: Iterator[WeightBucket], gathering: Stopwatch | None = None) -> PublishReport:
        """Send the buckets, and return the report. ``gathering`` measures how long gathering takes.

        An exception from ``gathered``, or an interrupt, ends the publish on all endpoints before it is raised here.
        """
        gathering = gathering or Stopwatch()
        try:
            with contextlib.suppress(*CLOSED):  # the publish has ended; its report states why
                while True:
                    with gathering:
                        bucket = next(gathered, None)
                        encoded = None if bucket is None else self._publish.encode(bucket)
                    self._run(self._publish.buckets.send, encoded)
                    if encoded is None:
                        break
            report = self._running.result()
        except BaseException as error:
            self.end(f"{type(error).__name__} in the trainer")
            raise
        return replace(report, spans=replace(report.spans, gather_s=gathering.total_s))

    def end(self, problem: str) -> None:
        """End the publish on all endpoints, and return once all reachable endpoints have resumed. Idempotent."""
        self._run(self._publish.end, problem)
        with contextlib.suppress(Exception):
            self._running.result()
