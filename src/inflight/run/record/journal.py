"""The journal of a run: one row per step, events for the timeline, and the summary."""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from inflight import __version__
from inflight.base.clock import unix_time
from inflight.base.whole_files import write_whole
from inflight.errors import CheckpointError
from inflight.observe.trace import events
from inflight.observe.trace.files import EventWriter, begin_files, resume_files
from inflight.observe.trace.records import RECORD, remove_steps
from inflight.rollouts.slots import SlotSeconds
from inflight.run.config import RunConfig
from inflight.run.record.run_directory import RunDirectory
from inflight.types import Group
from inflight.wire import DraftCounts

_WINDOW = 10
"""The maximum number of steps over which the first and last rewards in the summary are averaged."""
_SHARE_OF_STEPS = 5
"""Each of the two windows has at most a fifth of the steps, so that their difference shows what was learned."""


class _Counts(BaseModel):
    """The counters that a resumed run continues from."""

    elapsed_s: float = 0.0
    num_samples: int = 0
    num_trained_tokens: int = 0
    num_completion_tokens: int = 0
    paused_s: float | None = None
    """Seconds paused, the sum over publishes of the mean over endpoints; None if no endpoint has reported timings."""
    lags: Counter[int] = Counter()
    """Number of trained tokens by lag."""
    ages: Counter[int] = Counter()
    """Number of trained completions by the lag of their first token."""
    slots: SlotSeconds = SlotSeconds()
    drafted: DraftCounts = DraftCounts()
    versions: Counter[int] = Counter()
    """Number of completions by the number of versions that sampled them."""
    lengths: Counter[int] = Counter()
    rewards: list[float] = []
    """Mean reward of each step."""
    rewards_since: list[float] = []
    lengths_since: list[int] = []
    """Lengths of the completions that finished since the last step; ``rewards_since`` has their rewards."""


def open_journal(
    config: RunConfig, directory: RunDirectory, version: int, listeners: Sequence[Callable[[events.Event], None]]
) -> Journal:
    """Return the journal of a run at ``version``. Rows and recorded steps of later versions are removed."""
    remove_steps(directory.path / RECORD, version)
    return Journal(
        directory.path,
        None if directory.state is None else directory.state["journal"],
        version,
        config=config.model_dump(mode="json"),
        compresses=config.run.compress_events,
        listeners=listeners,
    )


class Journal:
    """Writes the events of a run and ``summary.json``. ``listeners`` are called with each written event.

    The loop, checkpoints and publishes all read the last trained version from ``version``.

    In a resumed run the counters continue from ``state`` as of ``version``, and rows of later steps are removed. A full
    disk raises `CheckpointError`.
    """

    def __init__(
        self,
        directory: Path,
        state: Mapping[str, Any] | None,
        version: int = 0,
        *,
        config: Mapping[str, Any] | None = None,
        compresses: bool = False,
        listeners: Sequence[Callable[[events.Event], None]] = (),
    ) -> None:
        self._directory = directory
        self._config = dict(config or {})
        if state is None:
            begin_files(directory)
        else:
            resume_files(directory, version)
        self._files = EventWriter(directory, compresses=compresses)
        self.version = version
        """The last trained version."""
        self._counts = _Counts.model_validate(state or {})
        self._started = unix_time() - self._counts.elapsed_s
        self._num_running = -1
        self._listeners = listeners
        self._begin_file()

    def state(self) -> dict[str, Any]:
        """Return the counters that a resumed run continues from."""
        return self._counts.model_copy(update={"elapsed_s": self.elapsed_s()}).model_dump()

    def elapsed_s(self) -> float:
        """Return the seconds since the run began, excluding the time between its processes."""
        return unix_time() - self._started

    def group_finished(self, group: Group) -> None:
        counts = self._counts
        counts.num_samples += len(group.rollouts)
        for rollout in group.rollouts:
            counts.rewards_since.append(rollout.reward)
            counts.lengths_since.append(rollout.num_sampled_tokens)
            counts.versions[len({span.version for span in rollout.version_spans})] += 1
            counts.lengths[rollout.num_sampled_tokens] += 1
            counts.num_completion_tokens += rollout.num_sampled_tokens

    def event(self, of: type[events.Event], span: tuple[float, float] | None = None, /, **facts: Any) -> None:
        """Write an event; ``span`` is its start and end in wall-clock seconds, and defaults to now."""
        start_s, end_s = map(self.since, span or (unix_time(),) * 2)
        # Readers ignore unknown facts, so they are rejected here.
        self._write(of.model_validate({"start_s": start_s, "end_s": end_s, **facts}, extra="forbid"))

    def _write(self, event: events.Event) -> None:
        begins_file = self._files.write(event)
        for listener in self._listeners:
            listener(event)
        if begins_file:
            self._begin_file()

    def _begin_file(self) -> None:
        self.event(
            events.RunStarted, version=self.version, began_at=self._started, inflight=__version__, config=self._config
        )

    def since(self, at: float) -> float:
        """Convert a wall-clock time to seconds since the run began."""
        return at - self._started

    def fleet(self, span: tuple[float, float] | None = None, **facts: Any) -> None:
        """Write an event about servers that joined, left or changed state."""
        self.event(events.FleetChanged, span, version=self.version, **facts)

    def running(self, num_groups: int) -> None:
        """Write the number of running groups for the timeline, if it has changed."""
        if num_groups != self._num_running:
            self._num_running = num_groups
            self.event(events.RunningGroups, num_groups=num_groups)

    def trained(self, version: int, ranks: Sequence[tuple[float, float]], items: Sequence[int] = ()) -> None:
        """Write when each rank began and ended the step that produced ``version``, and the items that the step trained
        on.
        """
        self.version = version
        times = tuple((self.since(start), self.since(end)) for start, end in ranks)
        self.event(events.StepTrained, ranks[0], version=version, ranks=times, items=tuple(items))

    def saved(self, version: int) -> None:
        """Write that the checkpoint of a version is complete."""
        self.event(events.CheckpointSaved, version=version)

    def paused(self, seconds: Mapping[str, float]) -> None:
        """Count how long one publish paused each endpoint that reports timings."""
        if seconds:
            self._counts.paused_s = (self._counts.paused_s or 0.0) + statistics.fmean(seconds.values())

    def _totals(self) -> dict[str, Any]:
        """Return the totals so far."""
        counts, elapsed_s = self._counts, max(1e-9, self.elapsed_s())
        return {
            "num_samples": counts.num_samples,
            "num_trained_tokens": counts.num_trained_tokens,
            "trained_tokens_per_s": counts.num_trained_tokens / elapsed_s,
            "completion_tokens_per_s": counts.num_completion_tokens / elapsed_s,
            "paused_share": None if counts.paused_s is None else counts.paused_s / elapsed_s,
        }

    def step(
        self,
        lags: Counter[int],
        num_tokens: int,
        facts: Mapping[str, Any],
        ages: Sequence[int],
        slots: SlotSeconds,
        drafted: DraftCounts,
    ) -> dict[str, Any]:
        """Write the row of the last trained step and return it.

        Rewards, ``slots`` and ``drafted`` cover the time since the previous row. ``lags`` counts trained tokens by
        lag; ``ages`` has the lag of the first token of each trained completion.
        """
        rewards, lengths = self._counts.rewards_since, self._counts.lengths_since
        self._counts.rewards_since, self._counts.lengths_since = [], []
        self._counts.lags.update(lags)
        self._counts.ages.update(ages)
        self._counts.slots.add(slots)
        self._counts.drafted += drafted
        self._counts.num_trained_tokens += num_tokens
        if rewards:
            self._counts.rewards.append(statistics.fmean(rewards))
        now = self.elapsed_s()
        row = {
            "version": self.version,
            "time_s": now,
            **self._totals(),
            "reward": statistics.fmean(rewards) if rewards else None,
            "completion_length": statistics.fmean(lengths) if lengths else None,
            "lag_mean": sum(lag * num for lag, num in lags.items()) / lags.total() if lags else 0.0,
            "lag_max": max(lags, default=0),
            "completions_by_age": _sorted(Counter(ages)),
            "utilisation": slots.utilisation,
            "bubble_share": slots.bubble_share,
            "num_verifications": drafted.num_verifications,
            "accepted_per_verification": drafted.accepted_per_verification,
            **facts,
        }
        self._write(events.StepCompleted.model_validate({"start_s": now, "end_s": now, **row}))
        return row

    def recent_reward(self) -> float | None:
        """Return the mean reward over the last ten steps; None before the tenth step."""
        rewards = self._counts.rewards
        return statistics.fmean(rewards[-_WINDOW:]) if len(rewards) >= _WINDOW else None

    def summarize(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``summary.json`` and return it."""
        counts = self._counts
        num_of_two = sum(number for num_versions, number in counts.versions.items() if num_versions >= 2)
        window = min(_WINDOW, max(1, len(counts.rewards) // _SHARE_OF_STEPS))
        summary = {
            **facts,
            "elapsed_s": self.elapsed_s(),
            **self._totals(),
            "first_reward": statistics.fmean(counts.rewards[:window]) if counts.rewards else None,
            "last_reward": statistics.fmean(counts.rewards[-window:]) if counts.rewards else None,
            "num_steps_per_reward": window,
            "completions_by_num_versions": _sorted(counts.versions),
            "share_with_two_or_more_versions": num_of_two / max(1, counts.versions.total()),
            "tokens_by_lag": _sorted(counts.lags),
            "completions_by_age": _sorted(counts.ages),
            "utilisation": counts.slots.utilisation,
            "bubble_share": counts.slots.bubble_share,
            "accepted_per_verification": counts.drafted.accepted_per_verification,
            "completions_by_length": _sorted(counts.lengths),
            "machine": {"platform": platform.platform(), "python": platform.python_version()},
        }
        try:
            write_whole(self._directory / "summary.json", json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise CheckpointError(f"summary.json cannot be written to {self._directory}: {error.strerror}") from error
        return summary

    def close(self) -> None:
        """Close the files. On a full disk, the end of the last lines is lost."""
        with contextlib.suppress(OSError):  # a failed write was reported when it happened
            self._files.close()


def _sorted(counts: Counter[int]) -> dict[str, int]:
    return {str(key): number for key, number in sorted(counts.items())}
