"""Samples items of a task outside training, to see what a model answers and what that is worth."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from inflight.base.tasks import run_together
from inflight.contracts import InferenceEndpoint
from inflight.errors import CheckpointError, InflightError
from inflight.run.config import EvaluationSection
from inflight.run.sampling.completions import Completions
from inflight.run.sampling.sampling_endpoint import request_of
from inflight.run.sampling.work import Work
from inflight.types import TaskItem
from inflight.wire import Completion

EVALUATION = "evaluation.jsonl"
"""File in the run's directory: one line per answer."""
_FIRST_ITEM = 1_000_000_000
"""Items of the evaluation begin here, far from those that are trained on."""
_SHOWN_LENGTH = 240


@dataclass(frozen=True, slots=True)
class SampledItem:
    """An item of a task and its sampled completions, in the same order as their texts and rewards."""

    item: TaskItem
    num_prompt_tokens: int
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    rewards: tuple[float, ...]

    @property
    def has_signal(self) -> bool:
        """Whether rewards differ, so that the group has advantages to train on."""
        return len(set(self.rewards)) > 1


async def sample_item(work: Completions, endpoint: InferenceEndpoint, index: int, seed: int) -> SampledItem:
    """Return ``work.sampling.n`` scored completions of an item.

    Raises `TaskError` if the task or its reward fails, `UnusableItem` if the prompt does not form a request, and the
    errors of `InferenceEndpoint.generate`.
    """
    item = work.item(index)
    prompt_token_ids = work.prompt_of(item)
    sampling = work.sampling.model_copy(update={"seed": seed})
    response = await endpoint.generate(request_of(f"evaluate-{index}-{seed}", prompt_token_ids, sampling))
    rewards = await work.rewards(item, response.completions)
    texts = tuple(work.text_of(completion) for completion in response.completions)
    return SampledItem(item, len(prompt_token_ids), tuple(response.completions), texts, tuple(rewards))


class Answer(BaseModel):
    """One evaluated answer; a line of the file."""

    version: int
    """The last version that was published when it was asked for."""
    item: int
    prompt: str
    answer: str
    reward: float


@dataclass
class Evaluation:
    """The greedy answers to the same held-out items, of the weights at the start of a run and at its end.

    ``note`` shows a line. Without items, or for an environment, which `check_task` refuses, nothing is sampled.
    """

    settings: EvaluationSection
    work: Work
    directory: Path
    note: Callable[[str], None]
    _answers: dict[int, list[Answer]] = field(default_factory=dict, init=False)
    """By version at which they were asked for."""

    def __post_init__(self) -> None:
        path = self.directory / EVALUATION
        for answer in _read(path) if path.exists() else ():
            self._answers.setdefault(answer.version, []).append(answer)

    async def sample(self, endpoints: Iterable[InferenceEndpoint], version: int) -> None:
        """Answer the items on the first endpoint, unless this version has answered them.

        A failure of the endpoint or of the task is shown, and the run continues.
        """
        endpoint = next(iter(endpoints), None)
        if not self.settings.num_items or endpoint is None or not isinstance(self.work, Completions):
            return
        if len(self._answers.get(version, ())) == self.settings.num_items:
            return
        greedy = replace(self.work, sampling=self.work.sampling.model_copy(update={"n": 1, "temperature": 0.0}))
        indices = range(_FIRST_ITEM, _FIRST_ITEM + self.settings.num_items)
        try:
            items = await run_together(*(sample_item(greedy, endpoint, index, 0) for index in indices))
        except InflightError as error:
            self.note(f"the evaluation of version {version} failed: {error}")
            return
        self._answers[version] = [
            Answer(version=version, item=it.item.index, prompt=it.item.prompt, answer=it.texts[0], reward=it.rewards[0])
            for it in items
        ]
        self._write()

    def summary(self) -> dict[str, Any]:
        """Return the mean reward of each evaluated version, for ``summary.json``."""
        return {str(version): _mean(answers) for version, answers in sorted(self._answers.items())}

    def show(self) -> None:
        """Show the mean rewards of the first and the last version, and some of their answers side by side."""
        if len(self._answers) < 2:
            return
        first, last = self._answers[min(self._answers)], self._answers[max(self._answers)]
        self.note(
            f"evaluation, greedy answers to {len(last)} held-out problems: mean reward {_mean(first):.3f} "
            f"(version {min(self._answers)}) -> {_mean(last):.3f} (version {max(self._answers)})"
        )
        for before, after in list(zip(first, last, strict=False))[: self.settings.num_shown]:
            self.note(f"  problem: {_line(after.prompt)}")
            self.note(f"    before, reward {before.reward:g}: {_line(before.answer)}")
            self.note(f"    after,  reward {after.reward:g}: {_line(after.answer)}")

    def _write(self) -> None:
        answers = [answer for of_version in self._answers.values() for answer in of_version]
        try:
            (self.directory / EVALUATION).write_text("".join(f"{answer.model_dump_json()}\n" for answer in answers))
        except OSError as error:
            raise CheckpointError(f"{EVALUATION} cannot be written to {self.directory}: {error.strerror}") from error


def _read(path: Path) -> list[Answer]:
    """Return the answers in a file; a line that a killed process left incomplete is left out."""
    answers = []
    for line in path.read_text().splitlines():
        try:
            answers.append(Answer.model_validate(json.loads(line)))
        except (ValidationError, json.JSONDecodeError):
            continue
    return answers


def _mean(answers: Sequence[Answer]) -> float:
    return statistics.fmean(answer.reward for answer in answers)


def _line(text: str) -> str:
    """Return a text on one line, shortened."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_LENGTH else f"{line[: _SHOWN_LENGTH - 3]}..."
