"""Trackers: where people watch and compare their runs, such as Weights & Biases.

A tracker gets the configuration of a run once, each of its steps, and its end. It decides nothing, and a tracker that
fails or hangs never harms the run.
"""

from __future__ import annotations

from inflight.observe.trackers.reporting import Reporting, load_trackers
from inflight.observe.trackers.tracker import TrackedRun, Tracker

__all__ = ["Reporting", "TrackedRun", "Tracker", "load_trackers"]
