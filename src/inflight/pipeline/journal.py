"""What a run writes about itself: one row per step, events for the timeline, completions' facts, and the summary."""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError
from inflight.types import Group

_WINDOW = 10
"""Steps over which the first and last mean rewards of the summary are taken."""
_PART_BYTES = 32 * 1024 * 1024
_NUM_PARTS = 8
"""``events.jsonl`` is renamed when it has so many bytes; so many files of events are kept, itself included."""


class Journal:
    """Files of one run directory: ``metrics.jsonl``, ``events.jsonl``, ``summary.json``; TensorBoard if asked for.

    When a run is resumed its counters go on from ``state``, as they were at ``version``: rows of later steps, which a
    run that was killed has lost, are removed. Older events are in ``events.1.jsonl``, ``events.2.jsonl`` and so on, the
    highest number the newest. A full disk raises `CheckpointError`.
    """

    def __init__(
        self, directory: Path, state: Mapping[str, Any] | None, version: int = 0, *, tensorboard: bool = False
    ) -> None:
        self._directory = directory
        metrics, events = directory / "metrics.jsonl", directory / "events.jsonl"
        if state is None:
            for path in (metrics, *_event_files(directory)):
                path.unlink(missing_ok=True)
        else:
            _keep_lines(metrics, lambda row: row["version"] <= version)
            _keep_lines(events, lambda _: True)
        self._metrics, self._events = metrics.open("a", buffering=1), events.open("a", buffering=1)
        self.version = version
        """The last one that was trained."""
        self._started = time.time() - (state["elapsed_s"] if state else 0.0)
        self.num_samples = state["num_samples"] if state else 0
        self.num_trained_tokens = state["num_trained_tokens"] if state else 0
        self._num_completion_tokens = state["num_completion_tokens"] if state else 0
        self._held_s: Counter[str] = Counter(state["held_s"] if state else {})
        self._lags: Counter[int] = Counter({int(k): v for k, v in state["lags"].items()} if state else {})
        self._versions: Counter[int] = Counter({int(k): v for k, v in state["versions"].items()} if state else {})
        self._lengths: Counter[int] = Counter({int(k): v for k, v in state["lengths"].items()} if state else {})
        self._rewards: list[float] = list(state["rewards"]) if state else []
        self._rewards_since: list[float] = []
        self._lengths_since: list[int] = []
        """Of the completions that were finished since the last step."""
        self._num_running = -1
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=version + 1)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on counting."""
        return {
            "elapsed_s": self.elapsed_s(),
            "num_samples": self.num_samples,
            "num_trained_tokens": self.num_trained_tokens,
            "num_completion_tokens": self._num_completion_tokens,
            "held_s": dict(self._held_s),
            "lags": dict(self._lags),
            "versions": dict(self._versions),
            "lengths": dict(self._lengths),
            "rewards": self._rewards,
        }

    def elapsed_s(self) -> float:
        """Seconds since the run began, pauses between resumptions left out."""
        return time.time() - self._started

    def group_finished(self, group: Group) -> None:
        """Note a scored group."""
        self.num_samples += len(group.rollouts)
        for rollout in group.rollouts:
            self._rewards_since.append(rollout.reward)
            self._lengths_since.append(len(rollout.completion_token_ids))
            self._versions[len({span.version for span in rollout.version_spans})] += 1
            self._lengths[len(rollout.completion_token_ids)] += 1
            self._num_completion_tokens += len(rollout.completion_token_ids)

    def event(self, kind: str, started: float, ended: float, **facts: Any) -> None:
        """Note something that took time; ``started`` and ``ended`` are wall-clock seconds."""
        self._write(
            self._events, {"kind": kind, "start_s": started - self._started, "end_s": ended - self._started, **facts}
        )
        if self._events.tell() > _PART_BYTES:
            self._rotate()

    def running(self, num_groups: int) -> None:
        """Note for the timeline how many groups are running, if that has changed."""
        if num_groups != self._num_running:
            self._num_running = num_groups
            now = time.time()
            self.event("running", now, now, num_groups=num_groups)

    def _rotate(self) -> None:
        """Begin a new file of events, and remove the oldest one if there are too many."""
        *older, present = _event_files(self._directory)
        self._events.close()
        present.rename(present.with_name(f"events.{_number_of(older[-1]) + 1 if older else 1}.jsonl"))
        self._events = present.open("a", buffering=1)
        for path in older[: -(_NUM_PARTS - 2)]:
            path.unlink()

    def trained(self, version: int, started: float, ended: float) -> None:
        """Note that an optimizer step has made a version."""
        self.version = version
        self.event("train", started, ended)

    def held(self, seconds: Mapping[str, float]) -> None:
        """Add the time that each endpoint was held in one publish."""
        self._held_s.update(seconds)

    def held_share(self) -> float:
        """Share of the run's time in which endpoints were held, averaged over them."""
        if not self._held_s:
            return 0.0
        return statistics.fmean(self._held_s.values()) / max(1e-9, self.elapsed_s())

    def step(self, lags: Sequence[int], num_tokens: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write the row of the step that was trained last and return it.

        Rewards are those of groups finished since the row before.
        """
        rewards, lengths = self._rewards_since, self._lengths_since
        self._rewards_since, self._lengths_since = [], []
        self._lags.update(lags)
        self.num_trained_tokens += num_tokens
        if rewards:
            self._rewards.append(statistics.fmean(rewards))
        elapsed_s = self.elapsed_s()
        row = {
            "version": self.version,
            "time_s": elapsed_s,
            "num_samples": self.num_samples,
            "num_trained_tokens": self.num_trained_tokens,
            "trained_tokens_per_s": self.num_trained_tokens / elapsed_s,
            "completion_tokens_per_s": self._num_completion_tokens / elapsed_s,
            "reward": statistics.fmean(rewards) if rewards else None,
            "completion_length": statistics.fmean(lengths) if lengths else None,
            "lag_mean": statistics.fmean(lags) if lags else 0.0,
            "lag_max": max(lags, default=0),
            "held_share": self.held_share(),
            **facts,
        }
        self._write(self._metrics, row)
        if self._writer is not None:
            for key, value in row.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(key, value, self.version)
        return row

    def recent_reward(self) -> float | None:
        """Mean reward over the last ten steps, None before there are as many."""
        return statistics.fmean(self._rewards[-_WINDOW:]) if len(self._rewards) >= _WINDOW else None

    def summarize(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``summary.json`` and return it."""
        total = sum(self._versions.values())
        summary = {
            **facts,
            "elapsed_s": self.elapsed_s(),
            "num_samples": self.num_samples,
            "num_trained_tokens": self.num_trained_tokens,
            "trained_tokens_per_s": self.num_trained_tokens / max(1e-9, self.elapsed_s()),
            "completion_tokens_per_s": self._num_completion_tokens / max(1e-9, self.elapsed_s()),
            "first_reward": statistics.fmean(self._rewards[:_WINDOW]) if self._rewards else None,
            "last_reward": statistics.fmean(self._rewards[-_WINDOW:]) if self._rewards else None,
            "held_share": self.held_share(),
            "completions_by_num_versions": {str(k): v for k, v in sorted(self._versions.items())},
            "completions_with_three_or_more_versions": sum(v for k, v in self._versions.items() if k >= 3),
            "share_with_three_or_more_versions": sum(v for k, v in self._versions.items() if k >= 3) / max(1, total),
            "tokens_by_lag": {str(k): v for k, v in sorted(self._lags.items())},
            "completions_by_length": {str(k): v for k, v in sorted(self._lengths.items())},
            "machine": {"platform": platform.platform(), "python": platform.python_version()},
        }
        try:
            (self._directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise CheckpointError(f"summary.json cannot be written to {self._directory}: {error.strerror}") from error
        return summary

    def close(self) -> None:
        """Close the files. A full disk loses the end of the last lines."""
        for file in (self._metrics, self._events, self._writer):
            with contextlib.suppress(OSError):  # what could not be written was told when it was
                if file is not None:
                    file.close()

    def _write(self, file: Any, row: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CheckpointError(f"{file.name} cannot be written: {error.strerror}; is the disk full?") from error


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run one by one, oldest first."""
    for path in _event_files(directory):
        yield from read_lines(path)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file one by one; nothing if it is not there, and not the last one if it is torn."""
    if path.exists():
        with path.open() as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


def _event_files(directory: Path) -> list[Path]:
    """Return the files of events that there are, oldest first."""
    present = directory / "events.jsonl"
    older = sorted(directory.glob("events.*.jsonl"), key=_number_of)
    return [*older, present] if present.exists() else older


def _number_of(path: Path) -> int:
    return int(path.name.split(".")[1])


def _keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the rows that are meant, and were written whole."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as kept:
        kept.writelines(json.dumps(row) + "\n" for row in read_lines(path) if is_kept(row))
    partial.replace(path)
