"""Schedulers decide which completions run where and when. Each is a state machine without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.base.extensions import make
from inflight.contracts import Scheduler
from inflight.rollouts.history import HistoryStore
from inflight.rollouts.schedulers.histopipe import HistoPipe
from inflight.rollouts.schedulers.least_loaded import LeastLoaded
from inflight.rollouts.schedulers.probing import ProbeFirst
from inflight.rollouts.schedulers.racing import OverProvision, TailRounds
from inflight.rollouts.schedulers.shortest_first import ShortestFirst
from inflight.rollouts.schedulers.skew_aware import SkewAware

SCHEDULERS = {
    "least_loaded": LeastLoaded,
    "histopipe": HistoPipe,
    "skew_aware": SkewAware,
    "probe_first": ProbeFirst,
    "tail_rounds": TailRounds,
    "over_provision": OverProvision,
    "shortest_first": ShortestFirst,
}
"""The built-in schedulers, by name."""


def load_scheduler(
    name: str, params: Mapping[str, Any], *, group_size: int, history: HistoryStore, seed: int
) -> Scheduler:
    """Return the named scheduler, constructed with ``group_size``, ``history``, ``seed`` and ``params``.

    Raises `ConfigError` if it is unknown or rejects its parameters.
    """
    arguments = {"group_size": group_size, "history": history, "seed": seed}
    scheduler: Scheduler = make(Scheduler, "scheduler", "schedulers", name, arguments, params, SCHEDULERS)
    return scheduler
