"""Schedulers: which completions run where and when. Each is a state machine without I/O, for a run or a simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.contracts import Scheduler
from inflight.extensions import make
from inflight.rollouts.schedulers.least_loaded import LeastLoaded

SCHEDULERS = {"least_loaded": LeastLoaded}
"""Those that are built in, by name."""


def load_scheduler(name: str, params: Mapping[str, Any], *, group_size: int, seed: int) -> Scheduler:
    """Return a scheduler by name, made with ``group_size``, ``seed`` and ``params``. Raises `ConfigError`."""
    arguments = {"group_size": group_size, "seed": seed}
    scheduler: Scheduler = make(Scheduler, "scheduler", "schedulers", name, arguments, params, SCHEDULERS)
    return scheduler
