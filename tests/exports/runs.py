"""Runs on paper: the events of a run without the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.observe.trace import events
from inflight.observe.trace.files import EventWriter, begin_files, resume_files

A, B = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


class PaperRun:
    """Writes the events that a test wants, and what belongs to each."""

    def __init__(self, directory: Path, began_at: float = 1000.0) -> None:
        self.directory = directory
        (directory / "run_id").write_text("letters-1a2b3c4d\n")
        begin_files(directory)
        self.heard: list[events.Event] = []
        self._begin(began_at, 0)

    def _begin(self, began_at: float, version: int) -> None:
        self._files = EventWriter(self.directory)
        config = {"task": {"name": "letters"}, "run": {"directory": "runs/letters"}}
        self.add(events.RunStarted, began_at=began_at, version=version, inflight="0.1.0", config=config)

    def add(self, of: type[events.Event], start_s: float = 0.0, end_s: float | None = None, **facts: Any) -> None:
        row = {"start_s": start_s, "end_s": start_s if end_s is None else end_s, **facts}
        event = of.model_validate(row)
        self.heard.append(event)
        self._files.write(event)

    def request(
        self,
        item: int,
        start_s: float,
        end_s: float,
        endpoint: str = A,
        error: str | None = None,
        turns: tuple[tuple[float, float, int], ...] = (),
    ) -> None:
        spans = ((0, 20, 4), (20, 30, 5))
        part = {"number": 0, "num_tokens": 30, "spans": spans, "finish_reason": "stop", "turns": turns}
        self.add(
            events.RequestEnded,
            start_s,
            end_s,
            endpoint=endpoint,
            item=item,
            request_id=f"item-{item}",
            numbers=(0,),
            parts=() if error else (part,),
            error=error,
        )

    def group(self, item: int, at_s: float) -> None:
        self.add(
            events.GroupFinished, at_s, endpoint=A, item=item, oldest=4, newest=5, rewards=(0.0, 1.0), lengths=(30, 40)
        )

    def train(self, version: int, start_s: float, end_s: float, items: tuple[int, ...] = ()) -> None:
        ranks = ((start_s, end_s), (start_s + 0.1, end_s))
        self.add(events.StepTrained, start_s, end_s, version=version, ranks=ranks, items=items)

    def publish(self, version: int, start_s: float, end_s: float, **outcomes: str) -> None:
        self.add(
            events.WeightsPublished,
            start_s,
            end_s,
            version=version,
            size_bytes=1000,
            sent_bytes=900,
            gather_s=0.1,
            wire_s=0.2,
            load_s=0.01,
            pause_s=0.05,
            first_token_s=0.02,
            total_s=end_s - start_s,
            paused_s={A: 0.04},
            outcomes=outcomes or {A: "applied"},
        )

    def step(self, version: int, at_s: float, **facts: Any) -> None:
        metrics = {"reward": 0.5, "lag_mean": 1.5, "effective_sample_size": 0.9, "num_step_tokens": 700} | facts
        self.add(events.StepCompleted, at_s, version=version, time_s=at_s, **metrics)

    def kill_and_resume(self, version: int, began_at: float) -> None:
        self._files.close()
        resume_files(self.directory, version)
        self._begin(began_at, version)

    def close(self) -> None:
        self._files.close()


def whole_run(directory: Path) -> PaperRun:
    """A run that samples, trains, publishes, fails, is killed and resumed, and ends."""
    run = PaperRun(directory)
    run.publish(0, 1.0, 1.5)
    run.add(events.RunningGroups, 1.5, num_groups=2)
    run.request(0, 2.0, 5.0)
    run.group(0, 5.0)
    run.request(1, 2.5, 5.5, B)
    run.request(2, 5.0, 5.6, B, error="ConnectionError: refused")
    run.request(3, 3.0, 6.0, turns=((2.8, 4.0, 15), (4.5, 5.0, 15)))
    run.group(1, 6.0)
    run.add(events.ItemDropped, 6.1, reason="failed", item=2, what="three tries")
    run.add(events.EpisodeFailed, 6.1, item=3, reason="TimeoutError", what="too slow")
    run.train(1, 6.0, 8.0, (0, 1))
    run.publish(1, 8.0, 8.6)
    run.step(1, 8.7, groups_waiting=3, ledger={"outstanding": 4}, lag_max=2)
    states = {A: "healthy", B: "dead"}
    run.add(events.FleetChanged, 8.8, version=1, changes=((B, "healthy", "dead"),), states=states, serving=(A,))
    run.add(events.CheckpointSaved, 8.9, version=1)
    run.request(3, 8.5, 9.0)
    run.group(3, 9.0)
    run.train(2, 9.0, 9.5, (3,))
    run.request(4, 9.0, 9.5, B)
    run.step(2, 9.6)
    run.kill_and_resume(1, began_at=1020.0)
    run.request(3, 9.0, 10.0)
    run.group(3, 10.0)
    run.request(4, 9.2, 10.0, B)
    run.train(2, 10.0, 12.0, (3,))
    run.publish(2, 12.0, 12.5)
    run.step(2, 12.6, num_stale_tokens=5)
    run.add(events.ServedVersions, 12.6, trainer=2, servers={A: 2, B: None})
    run.add(events.MemoryMoved, 12.6, 12.8, kind="memory_released", servers=(A,))
    run.add(events.Failure, 13.0, what="a rank was lost")
    run.add(events.RunEnded, 13.0, version=2, is_interrupted=False)
    run.close()
    return run
