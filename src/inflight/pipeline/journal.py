"""What a run writes about itself: one row per step, events for the timeline, completions' facts, and the summary."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.errors import CheckpointError
from inflight.types import Group

_WINDOW = 10
"""Steps over which the first and last mean rewards of the summary are taken."""


class Journal:
    """Files of one run directory: ``metrics.jsonl``, ``events.jsonl``, ``summary.json``; TensorBoard if asked for.

    Counters go on from ``state`` when a run is resumed. A full disk raises `CheckpointError`.
    """

    def __init__(self, directory: Path, state: Mapping[str, Any] | None, *, tensorboard: bool) -> None:
        self._directory = directory
        # Appended always: a run that was replaced and does not know it yet writes between lines, not over them.
        paths = [directory / name for name in ("metrics.jsonl", "events.jsonl")]
        for path in paths if state is None else ():
            path.unlink(missing_ok=True)
        self._metrics, self._events = (path.open("a", buffering=1) for path in paths)
        self._started = time.time() - (state["elapsed_s"] if state else 0.0)
        self.num_samples = state["num_samples"] if state else 0
        self.num_trained_tokens = state["num_trained_tokens"] if state else 0
        self._num_completion_tokens = state["num_completion_tokens"] if state else 0
        self._held_s: Counter[str] = Counter(state["held_s"] if state else {})
        self._lags: Counter[int] = Counter({int(k): v for k, v in state["lags"].items()} if state else {})
        self._versions: Counter[int] = Counter({int(k): v for k, v in state["versions"].items()} if state else {})
        self._lengths: Counter[int] = Counter({int(k): v for k, v in state["lengths"].items()} if state else {})
        self._rewards: list[float] = list(state["rewards"]) if state else []
        self._since: list[Group] = []
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"))

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
        self._since.append(group)
        self.num_samples += len(group.rollouts)
        for rollout in group.rollouts:
            self._versions[len({span.version for span in rollout.version_spans})] += 1
            self._lengths[len(rollout.completion_token_ids)] += 1
            self._num_completion_tokens += len(rollout.completion_token_ids)

    def event(self, kind: str, started: float, ended: float, **facts: Any) -> None:
        """Note something that took time; ``started`` and ``ended`` are wall-clock seconds."""
        self._write(
            self._events, {"kind": kind, "start_s": started - self._started, "end_s": ended - self._started, **facts}
        )

    def held(self, seconds: Mapping[str, float]) -> None:
        """Add the time that each endpoint was held in one publish."""
        self._held_s.update(seconds)

    def held_share(self) -> float:
        """Share of the run's time in which endpoints were held, averaged over them."""
        if not self._held_s:
            return 0.0
        return statistics.fmean(self._held_s.values()) / max(1e-9, self.elapsed_s())

    def step(self, version: int, lags: Sequence[int], num_tokens: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write the row of one optimizer step and return it; rewards are those of groups finished since the last."""
        rewards = [rollout.reward for group in self._since for rollout in group.rollouts]
        lengths = [len(rollout.completion_token_ids) for group in self._since for rollout in group.rollouts]
        self._since = []
        self._lags.update(lags)
        self.num_trained_tokens += num_tokens
        if rewards:
            self._rewards.append(statistics.fmean(rewards))
        elapsed_s = self.elapsed_s()
        row = {
            "version": version,
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
                    self._writer.add_scalar(key, value, version)
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
        """Close the files."""
        self._metrics.close()
        self._events.close()
        if self._writer is not None:
            self._writer.close()

    def _write(self, file: Any, row: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CheckpointError(f"{file.name} cannot be written: {error.strerror}; is the disk full?") from error
