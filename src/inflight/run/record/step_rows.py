"""The reports of a run: a row for each step, what the run is waiting for, and the summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight import __version__
from inflight.losses import Metrics, add_metrics, decode_metrics, metric_values
from inflight.observe.trace import events
from inflight.run.config import RunConfig
from inflight.run.ranks.messages import Trained
from inflight.run.record.checkpoints import latest_checkpoint
from inflight.run.record.console import Progress
from inflight.run.record.journal import Journal
from inflight.run.record.plots import plot_run
from inflight.run.sampling.batches import StepBatch
from inflight.run.sampling.evaluation import Evaluation
from inflight.run.sampling.sampling import Sampling

_SAMPLE_S = 0.05
"""How often the number of running groups is recorded."""


@dataclass(eq=False)
class Notes:
    """Reports on the parts of a run without changing them."""

    config: RunConfig
    directory: Path
    sampling: Sampling
    journal: Journal
    progress: Progress
    evaluation: Evaluation
    doing: str = ""
    """The current activity, shown to the user while the run starts and stops; empty while steps are trained."""

    def step(self, batch: StepBatch, answers: Sequence[Trained], serving: Mapping[str, int | None]) -> dict[str, Any]:
        """Write the row of the last step, show it, and return it."""
        metrics: Metrics = {}
        for answer in answers:
            metrics = add_metrics(metrics, decode_metrics(answer.metrics))
        first = answers[0]
        published = first.published
        dispatcher = self.sampling.dispatcher
        row = self.journal.step(
            batch.token_lags,
            batch.num_tokens,
            {
                **metric_values(metrics),
                "gradient_norm": first.gradient_norm,
                "learning_rate": first.learning_rate,
                "num_step_tokens": batch.num_tokens,
                "num_step_sequences": len(batch.samples),
                "num_stale_tokens": batch.num_stale_tokens,
                "groups_running": self.sampling.num_running,
                "groups_waiting": self.sampling.num_waiting,
                "publish": published.metrics() if published is not None and published.is_published else None,
                **({"serving": serving} if serving else {}),
                **({"level": curriculum.level} if (curriculum := self.sampling.curriculum) is not None else {}),
                "resumed_tokens": dispatcher.num_resumed_tokens,
                "scheduler": dispatcher.scheduler.metrics(),
                "bias": self.sampling.warnings.audit.metrics(),
                "littles_law": dispatcher.steps.law.row(),
                "ledger": self._ledger_counts(),
                "failed_episodes": dict(self.sampling.warnings.num_failed_episodes),
                "rewritten_conversations": self.sampling.num_rewritten,
            },
            batch.ages,
            dispatcher.endpoints.account.take(self.sampling.actor.clock()),
            self.sampling.actor.take_drafted(),
        )
        self.progress.step(row)
        return row

    async def note_what_runs(self) -> None:
        """Until cancelled, record the number of running groups for the timeline."""
        while True:
            self.journal.running(self.sampling.num_running)
            await asyncio.sleep(_SAMPLE_S)

    async def show_what_is_waited_for(self) -> None:
        """Until cancelled, show at intervals what the run is waiting for."""
        while True:
            await asyncio.sleep(1.0)
            what = "training and publishing" if self.sampling.is_training else self.sampling.progress()
            self.progress.waiting(self.doing or f"step {self.journal.version + 1}/{self.config.run.num_steps}: {what}")

    def finish(self, failure: str | None, *, interrupted: bool) -> None:
        """Write the summary and the plots, and print where they are."""
        summary = self.journal.summarize(
            {
                "version": self.journal.version,
                "mode": self.config.run.mode,
                "task": self.sampling.actor.work.name,
                "interrupted": interrupted,
                "failure": failure,
                "evaluation": self.evaluation.summary(),
                "ledger": self._ledger_counts(),
                "failed_episodes": dict(self.sampling.warnings.num_failed_episodes),
                "rewritten_conversations": self.sampling.num_rewritten,
                "inflight": __version__,
                "config": json.loads(self.config.model_dump_json()),
            }
        )
        if failure is not None:
            self.journal.event(events.Failure, what=failure)
        self.journal.event(
            events.RunEnded, version=self.journal.version, is_interrupted=interrupted, ledger=self._ledger_counts()
        )
        self.journal.close()
        plot_run(self.directory)
        self.progress.summary(summary, self.directory)
        self.evaluation.show()
        if failure is not None or interrupted:
            checkpoint, _ = latest_checkpoint(self.directory)
            self.progress.note(
                "no checkpoint was saved: the same command starts the run over"
                if checkpoint is None
                else "to continue, run the same command with --resume"
            )

    def _ledger_counts(self) -> dict[str, Any]:
        ledger = self.sampling.dispatcher.ledger
        return {
            "trained": ledger.num_trained,
            "dropped": dict(ledger.num_dropped),
            "requeued": ledger.num_requeued,
            "outstanding": ledger.num_unsettled,
        }
