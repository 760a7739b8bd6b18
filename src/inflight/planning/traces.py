"""The events of a recorded run that the planner reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.observe.trace.files import read_events, read_steps


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one run that calibration needs."""

    directory: Path
    config: dict[str, Any]
    requests: list[dict[str, Any]]
    """The requests that were answered. ``num_before`` of each part is the number of its tokens that earlier
    requests sampled."""
    groups: list[dict[str, Any]]
    trained: list[dict[str, Any]]
    publishes: list[dict[str, Any]]
    steps: list[dict[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Trace:
        """Read a run's events. Raises `ConfigError` if the directory does not contain a run with at least 4 steps."""
        kinds: dict[str, list[dict[str, Any]]] = {
            k: [] for k in ("run_started", "request", "group", "train", "publish")
        }
        for event in read_events(directory, kinds):
            kinds[event["kind"]].append(event)
        steps = [*read_steps(directory)]
        if not kinds["run_started"] or len(steps) < 4 or not kinds["request"]:
            raise ConfigError(
                f"{directory} does not contain the events of a run with at least 4 steps: pass a run directory"
            )
        whole = [it for it in kinds["request"] if it["parts"] and it["error"] is None]
        _count_sampled(whole)
        began = kinds["run_started"][0]
        return cls(directory, began["config"], whole, kinds["group"], kinds["train"], kinds["publish"], steps)


def _count_sampled(requests: Iterable[dict[str, Any]]) -> None:
    brought: dict[tuple[int, int], int] = {}
    for request in requests:
        for part in request["parts"]:
            key = request["item"], part["number"]
            before = brought.get(key, 0)
            part["num_before"] = before if before <= part["num_tokens"] else 0  # it was restarted
            brought[key] = part["num_tokens"]


@dataclass(frozen=True, slots=True)
class RunMeasurements:
    """Averages over a run without its first steps."""

    tokens_per_s: float
    steps_per_s: float
    age: float
    """The step's version minus the version of a completion's first token, averaged over trained completions."""
    lag: float
    """The step's version minus the version that sampled a token, averaged over trained tokens."""


def measurements_of(directory: Path, num_skipped: int) -> RunMeasurements:
    """Return the averages of a run after its first ``num_skipped`` steps. Raises `ConfigError` if the run has too few
    steps."""
    steps = [*read_steps(directory)]
    if len(steps) <= num_skipped + 1:
        raise ConfigError(f"{directory} has {len(steps)} steps, but more than {num_skipped + 1} are needed")
    first, rest = steps[num_skipped - 1], steps[num_skipped:]
    seconds = rest[-1]["time_s"] - first["time_s"]
    num_tokens = sum(row["num_step_tokens"] for row in rest)
    ages = [(int(age), num) for row in rest for age, num in row["completions_by_age"].items()]
    return RunMeasurements(
        num_tokens / seconds,
        len(rest) / seconds,
        sum(age * num for age, num in ages) / sum(num for _, num in ages),
        sum(row["lag_mean"] * row["num_step_tokens"] for row in rest) / num_tokens,
    )
