"""The console output of a run: a line every few seconds, on a terminal as elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from inflight.base.printable import printable

_LINE_EVERY_S = 5.0
_WAIT_S = 10.0
"""Seconds without output after which the run reports what it is waiting for."""


class _Console(Console):
    """Standard output, as long as it is writable: a closed pipe or a full disk does not end the run."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self._go_silent(error)

    def on_broken_pipe(self) -> None:
        self._go_silent(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))

    def _go_silent(self, error: OSError) -> None:
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):  # what is still buffered would fail again at the end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        with contextlib.suppress(OSError, ValueError):
            print(
                f"inflight: standard output cannot be written ({error.strerror}), so nothing more is shown",
                file=sys.stderr,
                flush=True,
            )


class Progress:
    """Prints rows as they arrive."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._console = _Console()
        self._first: Mapping[str, Any] | None = None
        """The first row since this process started, from which the remaining time is estimated."""
        self._last_line = 0.0
        self._unseen: dict[str, list[float]] = {"reward": [], "completion_length": []}
        """The values of the steps since the last line."""
        self._last_word = self._last_event = time.monotonic()

    def note(self, text: str) -> None:
        """Print one line."""
        self._last_event = time.monotonic()
        self._print(text)

    def _print(self, text: str) -> None:
        self._last_word = time.monotonic()
        self._console.print(f"inflight: {printable(text)}", highlight=False, markup=False, soft_wrap=True)

    def waiting(self, text: str) -> None:
        """Print one line with the time since the last event, unless something was printed recently."""
        now = time.monotonic()
        if now - self._last_word > _WAIT_S:
            self._print(f"{text} ({now - self._last_event:.0f} s)")

    def step(self, row: Mapping[str, Any]) -> None:
        self._first = self._first or row
        self._last_word = self._last_event = time.monotonic()
        for name, values in self._unseen.items():
            values += [] if row[name] is None else [row[name]]
        if time.monotonic() - self._last_line > _LINE_EVERY_S or row["version"] == self._num_steps:
            self._last_line = time.monotonic()
            means = {name: statistics.fmean(values) if values else None for name, values in self._unseen.items()}
            self.note("  ".join(f"{name} {value}" for name, value in self._facts({**row, **means})))
            for values in self._unseen.values():
                values.clear()

    def summary(self, summary: Mapping[str, Any], directory: Path) -> None:
        """Show the results of the steps, if there are any, and where the files are."""
        if summary["version"]:
            self._show_results(summary)
        self.note(f"written to {directory}: summary.json, metrics.jsonl, checkpoints/, plots/")

    def _show_results(self, summary: Mapping[str, Any]) -> None:
        first, last = _number(summary["first_reward"], ".3f"), _number(summary["last_reward"], ".3f")
        num_steps = summary["num_steps_per_reward"]
        window = f"{'step' if num_steps == 1 else f'{num_steps} steps'} with rewards"
        self.note(
            f"mean reward {first} (first {window}) -> {last} (last {window}) in {summary['elapsed_s']:.0f} s, "
            f"{summary['version']} steps, {summary['num_samples']} completions, "
            f"{summary['trained_tokens_per_s']:.0f} trained tokens/s"
        )
        paused = summary["paused_share"]
        self.note(
            f"{100 * summary['share_with_two_or_more_versions']:.0f} % of the completions were sampled from two or "
            "more versions of the weights"
            f"{'' if paused is None else f'; servers were paused {_percent(paused)} of the time'}"
        )
        if dropped := summary["ledger"]["dropped"]:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
            self.note(f"dropped groups: {counts}")

    def _facts(self, row: Mapping[str, Any]) -> list[tuple[str, str]]:
        accepted = row["accepted_per_verification"]
        return [
            ("step", f"{row['version']}/{self._num_steps}"),
            ("reward", _number(row["reward"], ".3f")),
            ("lag", f"{row['lag_mean']:.1f} (max {row['lag_max']})"),
            ("ESS", _number(row.get("effective_sample_size"), ".3f")),
            ("tokens/s", f"{row['completion_tokens_per_s']:.0f} sampled, {row['trained_tokens_per_s']:.0f} trained"),
            ("paused", _percent(row["paused_share"])),
            *([] if accepted is None else [("accepted", f"{accepted:.1f} tokens per draft")]),
            ("length", _number(row["completion_length"], ".0f")),
            ("time", f"{row['time_s']:.0f} s"),
            ("left", self._remaining_time(row)),
        ]

    def _remaining_time(self, row: Mapping[str, Any]) -> str:
        """Return the estimated time for the remaining steps."""
        num_steps = 0 if self._first is None else row["version"] - self._first["version"]
        if self._first is None or num_steps == 0:
            return "-"
        return f"{(row['time_s'] - self._first['time_s']) / num_steps * (self._num_steps - row['version']):.0f} s"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
