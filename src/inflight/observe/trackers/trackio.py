"""Trackio. Options go to ``trackio.init``: ``project``, ``space_id``, ``server_url`` and others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import trackio

from inflight.observe.trackers.tracker import TrackedRun, Tracker


class Trackio(Tracker):
    """Logs each optimizer step under its version.

    Trackio keeps both values of a step that a resumed run repeats.
    """

    def __init__(self, **options: Any) -> None:
        inspect.signature(trackio.init).bind_partial(**options)
        self._options = {"project": "inflight"} | options
        self._run: Any = None

    def begin(self, run: TrackedRun) -> str:
        given: dict[str, Any] = {"name": run.run_id, "resume": "allow", "config": dict(run.config), "embed": False}
        self._run = trackio.init(**(given | self._options))
        return f"trackio show --project {self._options['project']}"

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=version)

    def end(self, failure: str | None) -> None:
        self._run.finish()
