"""Samples and scores items of a task outside training."""

from __future__ import annotations

import json
import secrets
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from inflight.base.tasks import run_together
from inflight.base.whole_files import write_whole
from inflight.contracts import InferenceEndpoint
from inflight.errors import CheckpointError, InflightError, TaskError
from inflight.rollouts.curriculum import FIRST_EVALUATION_ITEM
from inflight.run.config import EvaluationSection
from inflight.run.sampling.completions import Completions
from inflight.run.sampling.sampling_endpoint import UnusableItem, request_of
from inflight.run.sampling.work import Work
from inflight.types import TaskItem
from inflight.wire import Completion

EVALUATION = "evaluation.jsonl"
"""File in the run's directory, with one line per answer."""
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


async def sample_item(work: Completions, endpoint: InferenceEndpoint, index: int) -> SampledItem:
    """Return ``work.sampling.n`` scored completions of an item.

    Raises `TaskError` if the task or its reward fails, or if the item cannot be used. Errors raised by
    `InferenceEndpoint.generate` propagate.
    """
    item = await work.item(index)
    try:
        prompt_token_ids = work.prompt_of(item)
        if (reason := work.too_long(prompt_token_ids)) is not None:
            raise UnusableItem(reason)
        request = request_of(f"evaluate-{index}-{secrets.token_hex(4)}", prompt_token_ids, work.sampling)
    except UnusableItem as error:
        raise TaskError(f"item {index} of task {work.name!r} cannot be used: {error}") from error
    response = await endpoint.generate(request)
    rewards = await work.rewards(item, response.completions)
    texts = tuple(work.text_of(completion) for completion in response.completions)
    return SampledItem(item, len(prompt_token_ids), tuple(response.completions), texts, tuple(rewards))


class Answer(BaseModel):
    """One evaluated answer, which is a line of the file."""

    version: int
    """The newest version that sampled one of the tokens of this evaluation."""
    item: int
    prompt: str
    answer: str
    reward: float


@dataclass
class Evaluation:
    """The greedy answers to the same items, from the weights at the start of a run and from those at its end.

    ``note`` shows a line. Without items, or for an environment, which `check_task` refuses, nothing is sampled.
    """

    settings: EvaluationSection
    work: Work
    directory: Path
    note: Callable[[str], None]
    _answers: dict[int, list[Answer]] = field(default_factory=dict, init=False)
    """The answers by version."""

    def __post_init__(self) -> None:
        path = self.directory / EVALUATION
        for answer in _read(path) if path.exists() else ():
            self._answers.setdefault(answer.version, []).append(answer)

    async def sample(self, endpoints: Iterable[InferenceEndpoint], version: int) -> None:
        """Have the first endpoint answer the items, unless this version has already answered them.

        A failure of the endpoint or of the task is shown, and the run continues.
        """
        endpoint = next(iter(endpoints), None)
        if not self.settings.num_items or endpoint is None or not isinstance(self.work, Completions):
            return
        if len(self._answers.get(version, ())) == self.settings.num_items:
            return
        greedy = replace(self.work, sampling=self.work.sampling.model_copy(update={"n": 1, "temperature": 0.0}))
        failures: list[str] = []

        async def sampled(index: int) -> SampledItem | None:
            try:
                return await sample_item(greedy, endpoint, index)
            except InflightError as error:
                failures.append(str(error))
                return None

        indices = range(FIRST_EVALUATION_ITEM, FIRST_EVALUATION_ITEM + self.settings.num_items)
        items = [it for it in await run_together(*map(sampled, indices)) if it is not None]
        if failures:
            num_items = self.settings.num_items
            self.note(f"{len(failures)} of {num_items} problems of the evaluation failed; the first: {failures[0]}")
        if not items:
            return
        served = max((span.version for it in items for span in it.completions[0].version_spans), default=version)
        if served != version:
            self.note(
                f"the evaluation used version {served}, because {endpoint.name} has not received version {version}"
            )
        self._answers[served] = [
            Answer(version=served, item=it.item.index, prompt=it.item.prompt, answer=it.texts[0], reward=it.rewards[0])
            for it in items
        ]
        self._write()
        mean = _mean(self._answers[served])
        self.note(f"evaluated version {served}: mean reward {mean:.3f} of greedy answers to {len(items)} problems")

    def summary(self) -> dict[str, Any]:
        """Return the mean reward of each evaluated version, for ``summary.json``."""
        return {str(version): _mean(answers) for version, answers in sorted(self._answers.items())}

    def show(self) -> None:
        """Show the mean rewards of the first and the last version, and some of their answers side by side.

        Only items that both versions have answered count.
        """
        if len(self._answers) < 2:
            return
        first, last = min(self._answers), max(self._answers)
        before = {answer.item: answer for answer in self._answers[first]}
        pairs = [(before[after.item], after) for after in self._answers[last] if after.item in before]
        if not pairs:
            return
        self.note(
            f"evaluation, greedy answers to {len(pairs)} problems: mean reward {_mean([it for it, _ in pairs]):.3f} "
            f"(version {first}) -> {_mean([it for _, it in pairs]):.3f} (version {last})"
        )
        for earlier, later in pairs[: self.settings.num_shown]:
            self.note(f"  problem: {_line(later.prompt)}")
            self.note(f"    before, reward {earlier.reward:g}: {_line(earlier.answer)}")
            self.note(f"    after,  reward {later.reward:g}: {_line(later.answer)}")

    def _write(self) -> None:
        answers = [answer for of_version in self._answers.values() for answer in of_version]
        try:
            write_whole(self.directory / EVALUATION, "".join(f"{answer.model_dump_json()}\n" for answer in answers))
        except OSError as error:
            raise CheckpointError(f"{EVALUATION} cannot be written to {self.directory}: {error.strerror}") from error


def _read(path: Path) -> list[Answer]:
    """Return the answers in a file, without a line that a killed process left incomplete."""
    answers = []
    for line in path.read_text().split("\n"):  # an answer may contain other line separators
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
