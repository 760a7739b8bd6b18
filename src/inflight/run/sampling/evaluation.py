"""Samples items of a task outside training, to see what a model answers and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.contracts import InferenceEndpoint
from inflight.run.sampling.completions import Completions
from inflight.run.sampling.sampling_endpoint import request_of
from inflight.types import TaskItem
from inflight.wire import Completion


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
