"""Measures configurations in short real runs, one after another, as Spreeze does, instead of simulating them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inflight.base.toml import read_toml
from inflight.errors import ConfigError
from inflight.observe.trace.files import read_events, read_steps
from inflight.planning.applying import settings_of
from inflight.planning.candidates import Candidate
from inflight.planning.outcome import Steady
from inflight.planning.plan import SearchPlan
from inflight.planning.search import EvaluatedCandidate
from inflight.planning.traces import measurements_of


def base_of(path: Path) -> Candidate:
    """Return the configuration in the TOML file of a run. Raises `ConfigError` if it configures a mixed fleet."""
    from inflight.run.config import load_config

    config = load_config(path)
    servers = config.servers
    if servers.fleet or servers.attach.urls or servers.attach.others_may_come:
        raise ConfigError(f"{path} configures a mixed fleet: --measure sets servers.count, which does not apply to it")
    return Candidate(
        config.servers.count,
        config.servers.max_concurrent,
        config.sampling.group_size,
        config.tokens_per_step,
        max_lag=config.rollouts.max_lag,
        scheduler=config.rollouts.scheduler,
    )


def measure(
    source: Path, wanted: Sequence[Candidate], plan: SearchPlan, limit_s: float, on_progress: Callable[[int], None]
) -> list[EvaluatedCandidate]:
    """Run every configuration for ``search.num_steps`` steps, each in a directory that is removed afterwards.

    Nothing else should use the machine. Raises `ConfigError` if a run fails or takes longer than ``limit_s``.
    """
    values = read_toml(source, "configuration")
    num_steps, found = plan.search.num_steps, []
    with tempfile.TemporaryDirectory(prefix="inflight-measure-") as parent:
        for number, candidate in enumerate(wanted):
            directory = Path(parent) / str(number)
            settings = {
                **settings_of(candidate, values),
                "run.directory": str(directory),
                "run.num_steps": num_steps,
                "run.checkpoint_every_steps": num_steps,
            }
            _run(source, settings, limit_s)
            found.append(EvaluatedCandidate(candidate, _steady(directory, num_steps // 5), 0))
            on_progress(len(found))
    return found


def _run(source: Path, settings: dict[str, Any], limit_s: float) -> None:
    overrides = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "inflight", "train", str(source), *overrides]
    what = " ".join(overrides)
    try:
        made = subprocess.run(
            command, timeout=limit_s, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"a run with {what} took longer than --limit {limit_s:g} seconds") from error
    if made.returncode:
        raise ConfigError(f"a run with {what} failed: {made.stderr.strip()[-400:]}")


def _steady(directory: Path, num_skipped: int) -> Steady:
    """Return the averages of a run. ``busy_share`` is NaN, because runs do not record when each endpoint is busy."""
    num_skipped = max(1, num_skipped)
    whole = measurements_of(directory, num_skipped)
    steps = [*read_steps(directory)]
    begin, end = steps[num_skipped - 1]["time_s"], steps[-1]["time_s"]
    trained = sum(
        event["end_s"] - event["start_s"] for event in read_events(directory, ["train"]) if event["start_s"] >= begin
    )
    held = [step["utilisation"] or 0.0 for step in steps[num_skipped:]]
    share = sum(held) / len(held)
    return Steady(
        whole.tokens_per_s, whole.steps_per_s, whole.age, whole.lag, float("nan"), share, trained / (end - begin)
    )
