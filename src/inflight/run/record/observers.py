"""Observers of a run in addition to its files: trackers, Prometheus and the web page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from inflight.errors import InflightError
from inflight.observe.exports.prometheus import MetricsServer, RunMetrics
from inflight.observe.trace.events import Event
from inflight.observe.trackers import Reporting, TrackedRun, Tracker
from inflight.run.config import RunConfig
from inflight.run.record.page import serve_page
from inflight.run.record.run_directory import RunDirectory


class Observers:
    """Passes events to trackers and metrics. Metrics are served while the context is open.

    When the context is closed, the trackers are notified of the end, and of the `InflightError` that caused it.
    """

    def __init__(
        self,
        config: RunConfig,
        trackers: Mapping[str, Tracker],
        directory: RunDirectory,
        version: int,
        note: Callable[[str], None],
    ) -> None:
        self._settings = config.run
        self._directory = directory
        self._note = note
        tracked = TrackedRun(directory.run_id, directory.path, config.model_dump(mode="json"), version)
        self._reporting = Reporting(trackers, tracked, note)
        self._metrics = None if config.run.metrics_port is None else RunMetrics()
        self._server: MetricsServer | None = None

    @property
    def listeners(self) -> Sequence[Callable[[Event], None]]:
        """Functions that the journal calls with each event."""
        return [self._reporting.report] if self._metrics is None else [self._reporting.report, self._metrics.count]

    def calls(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return coroutines that serve the page until cancelled, if it is configured."""
        if not self._settings.page:
            return []
        return [serve_page(self._directory.path, self._directory.logs, self._note)]

    async def __aenter__(self) -> Self:
        if self._metrics is not None and self._settings.metrics_port is not None:
            self._server = MetricsServer(self._metrics, self._settings.metrics_port)
            self._server.__enter__()
            self._note(f"metrics for Prometheus at {self._server.url}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, InflightError):
            await asyncio.to_thread(self._reporting.end, None if error is None else str(error))
        if self._server is not None:
            self._server.__exit__(kind, error, trace)
