"""Experiment trackers, such as Weights & Biases.

A tracker receives the configuration of a run once, each of its steps, and its end. A tracker that fails or hangs does
not affect the run.
"""

from __future__ import annotations

from inflight.observe.trackers.reporting import Reporting, load_trackers
from inflight.observe.trackers.tracker import TrackedRun, Tracker

__all__ = ["Reporting", "TrackedRun", "Tracker", "load_trackers"]
