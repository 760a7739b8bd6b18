"""Launchers start the processes of a run, on this machine or on others, and report how they ended.

A launcher only places and watches processes. Rollouts, weights and requests never pass through it.
"""

from __future__ import annotations

from inflight.launchers.launcher import Launched, Launcher, ProcessEnd, Program
from inflight.launchers.loading import load_launcher
from inflight.launchers.local import LocalLauncher

__all__ = ["Launched", "Launcher", "LocalLauncher", "ProcessEnd", "Program", "load_launcher"]
