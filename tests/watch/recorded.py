"""Events of small runs, written as a run writes them, and the browser that looks at their page."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.observe.trace import events
from inflight.observe.trace.files import EventWriter

SERVER, OTHER = "http://127.0.0.1:8001", "http://127.0.0.1:8002"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class WrittenRun:
    """Writes the events of a run with one item per step, which a completion of two versions makes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory

    def write(self, of: type[events.Event], start_s: float, end_s: float | None = None, /, **facts: Any) -> None:
        files = EventWriter(self.directory)
        files.write(of(start_s=start_s, end_s=start_s if end_s is None else end_s, **facts))
        files.close()

    def began(self, at_s: float = 0.0, version: int = 0, began_at: float = 1.7e9) -> None:
        config = {"run": {"num_steps": 10}, "model": {"path": "models/tiny"}}
        self.write(events.RunStarted, at_s, began_at=began_at, version=version, inflight="0", config=config)

    def request(self, item: int, at_s: float, *, endpoint: str = SERVER, error: str | None = None, **part: Any) -> None:
        facts = {"number": 0, "num_tokens": 30, "spans": ((0, 10, 0), (10, 30, 1)), "finish_reason": "stop", **part}
        parts = () if error else (events.SampledPart(**facts),)
        self.write(
            events.RequestEnded,
            at_s,
            at_s + 0.8,
            endpoint=endpoint,
            item=item,
            request_id=f"item-{item}",
            numbers=(0,),
            parts=parts,
            error=error,
        )

    def step(self, version: int, *, items: tuple[int, ...] | None = None, **metrics: Any) -> None:
        """Write what makes a version: a request, its group, the train step, the publish and the row."""
        at_s = float(version)
        item = version - 1
        self.request(item, at_s - 1)
        rewards, lengths = (1.0, 0.0), (30, 20)
        self.write(
            events.GroupFinished,
            at_s - 0.2,
            endpoint=SERVER,
            item=item,
            oldest=0,
            newest=1,
            rewards=rewards,
            lengths=lengths,
        )
        span = (at_s - 0.2, at_s - 0.1)
        self.write(
            events.StepTrained, *span, version=version, ranks=(span, span), items=(item,) if items is None else items
        )
        self.publish(version)
        ledger = {"trained": version, "dropped": {"stale": 1}, "requeued": 0, "outstanding": 2}
        facts = {"reward": 0.1 * version, "lag_mean": 1.0, "ledger": ledger, "completions_by_age": {"1": 2}}
        self.write(events.StepCompleted, at_s, version=version, time_s=at_s, **{**facts, **metrics})

    def publish(self, version: int, outcome: str = "applied", paused_s: float | None = 0.004) -> None:
        self.write(
            events.WeightsPublished,
            version - 0.1,
            float(version),
            version=version,
            size_bytes=1000,
            sent_bytes=1000,
            gather_s=0.01,
            wire_s=0.02,
            load_s=0.003,
            pause_s=0.005,
            first_token_s=0.001,
            total_s=0.1,
            paused_s={} if paused_s is None else {SERVER: paused_s},
            outcomes={SERVER: outcome},
        )

    def ended(self, at_s: float, version: int, **facts: Any) -> None:
        self.write(events.RunEnded, at_s, version=version, is_interrupted=False, **facts)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Yield a real browser without a window, and end it."""
    from playwright.sync_api import sync_playwright

    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.fail("no chromium was found: make test installs it, or apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, headless=True, args=list(FLAGS))
        try:
            yield chromium
        finally:
            chromium.close()
