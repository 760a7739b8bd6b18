"""Samples tasks with a model, to find one that the model can learn because only some of its answers are correct."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.base.tasks import run_together
from inflight.contracts import Environment, InferenceEndpoint
from inflight.errors import InflightError, TaskError
from inflight.rollouts.tasks import AnswerFormat, load_task
from inflight.run.sampling.completions import Completions
from inflight.run.sampling.evaluation import SampledItem, sample_item
from inflight.wire import SamplingParams

_REWARD_S = 60.0
HEAD = ("task", "reward", "signal", "prompt", "answer", "cut", "s/step")


@dataclass(frozen=True, slots=True)
class TaskSampling:
    """How every task is sampled: those settings of a run that determine what can be learned."""

    num_items: int
    group_size: int
    max_tokens: int
    temperature: float
    seed: int
    groups_per_step: int
    system_prompt: str | None
    answer_format: AnswerFormat


@dataclass(frozen=True, slots=True)
class SampledTask:
    """The figures of one task, or why it could not be sampled."""

    name: str
    problem: str | None = None
    reward: float = 0.0
    """Mean reward over all completions."""
    signal_share: float = 0.0
    """Share of the groups in which the rewards differ. A run does not train on the other groups."""
    num_prompt_tokens: float = 0.0
    num_answer_tokens: float = 0.0
    """Median lengths of the prompts and of the answers, in tokens."""
    cut_share: float = 0.0
    """Share of the completions that reached the token limit."""
    step_s: float | None = None
    """Seconds to sample the groups of a step, including those without a signal; None if no group has a signal."""
    example: tuple[str, str] | None = None
    """A prompt and the best completion."""

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table row under `HEAD`."""
        if self.problem is not None:
            return (self.name, self.problem, "", "", "", "", "")
        return (
            self.name,
            f"{self.reward:.2f}",
            f"{100 * self.signal_share:.0f} %",
            f"{self.num_prompt_tokens:.0f}",
            f"{self.num_answer_tokens:.0f}",
            f"{100 * self.cut_share:.0f} %",
            "-" if self.step_s is None else f"{self.step_s:.1f}",
        )


async def sample_tasks(
    endpoint: InferenceEndpoint, tokenizer: Any, names: Sequence[str], params: dict[str, Any], how: TaskSampling
) -> AsyncIterator[SampledTask]:
    """Yield the figures of one task after another or, if a task fails, its problem."""
    max_model_len = (await endpoint.capabilities()).max_model_len
    for name in names:
        try:
            task = load_task(name, params, how.seed, how.answer_format)
            if isinstance(task, Environment):
                raise TaskError("this task is an environment; only inflight train can run it")
            sampling = SamplingParams(
                n=how.group_size, max_tokens=how.max_tokens, temperature=how.temperature, seed=how.seed
            )
            work = Completions(task, tokenizer, sampling, max_model_len, _REWARD_S, system_prompt=how.system_prompt)
            started = time.perf_counter()
            items = await run_together(*(sample_item(work, endpoint, i) for i in range(how.num_items)))
            yield dataclasses.replace(_figures(items, time.perf_counter() - started, how), name=name)
        except InflightError as error:
            yield SampledTask(name, problem=str(error))


def _figures(items: Sequence[SampledItem], elapsed_s: float, how: TaskSampling) -> SampledTask:
    completions = [completion for item in items for completion in item.completions]
    signal_share = statistics.fmean(item.has_signal for item in items)
    best = max(items, key=lambda item: max(item.rewards))
    text = best.texts[best.rewards.index(max(best.rewards))]
    return SampledTask(
        name="",
        reward=statistics.fmean(reward for item in items for reward in item.rewards),
        signal_share=signal_share,
        num_prompt_tokens=statistics.median(item.num_prompt_tokens for item in items),
        num_answer_tokens=statistics.median(len(completion.token_ids) for completion in completions),
        cut_share=statistics.fmean(completion.finish_reason == "length" for completion in completions),
        step_s=elapsed_s / len(items) * how.groups_per_step / signal_share if signal_share else None,
        example=(best.item.prompt, text),
    )
