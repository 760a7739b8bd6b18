"""Groups of completions of a task: items, tokenized prompts, requests and rewards. Tasks are user code."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.contracts import Task
from inflight.environments.transcripts import ChatTemplate
from inflight.rollouts import continuation, joined
from inflight.rollouts.curriculum import Curriculum
from inflight.rollouts.driver_commands import ScoredGroup
from inflight.run.sampling.sampling_endpoint import SamplingEndpoint, UnusableItem, request_of
from inflight.run.sampling.scoring import ScoringPool
from inflight.run.sampling.user_code import in_thread, item_of, rewards_of
from inflight.run.sampling.work import Order, Sampled, Work
from inflight.types import Message, Rollout, TaskItem
from inflight.wire import Completion, SamplingParams


def opening_messages(system_prompt: str | None, prompt: str) -> tuple[Message, ...]:
    """Return the messages that a completion of a task answers."""
    system: tuple[Message, ...] = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    return (*system, {"role": "user", "content": prompt})


@dataclass(frozen=True)
class Completions(Work):
    """Groups of ``sampling.n`` completions.

    ``tokenizer`` renders prompts, with its chat template if any, and decodes completions.
    """

    task: Task
    tokenizer: Any
    sampling: SamplingParams
    max_sequence_tokens: int
    """An item whose prompt and completion together may exceed this length is not used."""
    timeout_s: float
    """How long the task may take to make an item, or to compute the rewards of one group."""
    pool: ScoringPool | None = None
    """Processes that make items and compute rewards. If None, each item and each group has its own thread."""
    routed_experts: bool = False
    """Whether requests ask for the experts that computed each token."""
    system_prompt: str | None = None

    is_one_request = True

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def size(self) -> int:
        return self.sampling.n

    async def item(self, index: int) -> TaskItem:
        level = self.task.begin_item(index) if isinstance(self.task, Curriculum) else 0
        what = f"making item {index} of task {self.task.name!r}"
        if self.pool is not None:
            return await self.pool.item(index, level, self.timeout_s, what)
        return await in_thread(what, lambda: item_of(self.task, index, level), self.timeout_s)

    def prompt_of(self, item: TaskItem) -> tuple[int, ...]:
        try:
            item.prompt.encode()
        except UnicodeEncodeError as error:
            raise UnusableItem(
                f"its prompt has a lone surrogate at character {error.start}, which cannot be encoded"
            ) from error
        return self._template.opening(opening_messages(self.system_prompt, item.prompt)).token_ids

    def too_long(self, prompt_token_ids: Sequence[int]) -> str | None:
        max_tokens = self.sampling.max_tokens or 1
        if len(prompt_token_ids) + max_tokens <= self.max_sequence_tokens:
            return None
        return (
            f"its prompt of {len(prompt_token_ids)} tokens and a completion of {max_tokens} may "
            f"exceed {self.max_sequence_tokens} tokens, the capacity of a micro-batch: raise "
            "train.max_tokens_per_micro_batch, or lower sampling.max_tokens"
        )

    async def sample(self, endpoint: SamplingEndpoint, order: Order) -> list[Sampled]:
        sampling = self.sampling.model_copy(update={"n": len(order.numbers), "seed": order.seed})
        request = request_of(order.request_id, order.prompt_token_ids, sampling, routed_experts=self.routed_experts)
        if order.partial is None:
            sampled = await endpoint.sample(request)
        else:
            (rest,) = await endpoint.sample(continuation(request, order.partial, order.request_id))
            sampled = (joined(order.partial, rest),)
        return [new.model_copy(update={"index": i}) for i, new in zip(order.numbers, sampled, strict=False)]

    def is_enough(self, sampled: Sequence[Sampled | None]) -> bool:
        return all(one is not None and one.is_whole for one in sampled)

    async def score(self, item: TaskItem, prompt_token_ids: Sequence[int], sampled: Sequence[Sampled]) -> ScoredGroup:
        completions = [one for one in sampled if isinstance(one, Completion)]
        rewards = await self.rewards(item, completions)
        token_ids = [completion.token_ids for completion in completions]
        rollouts = [
            Rollout(
                prompt_token_ids=prompt_token_ids,
                completion_token_ids=completion.token_ids,
                behaviour_logprobs=completion.logprobs,
                version_spans=completion.version_spans,
                finish_reason=completion.finish_reason,
                reward=reward,
                temperature=self.sampling.temperature,
                routed_experts=completion.routed_experts,
            )
            for completion, reward in zip(completions, rewards, strict=True)
        ]
        return ScoredGroup(rollouts, tuple(map(len, token_ids)), tuple(rewards), token_ids)

    def parse(self, saved: Any) -> Completion:
        return Completion.model_validate(saved)

    async def rewards(self, item: TaskItem, completions: Sequence[Completion]) -> list[float]:
        """Compute rewards outside the event loop, which a slow function would block. Raises `TaskError` if the function
        fails or takes too long.
        """
        what = f"the reward of task {self.task.name!r}, item {item.index},"
        if self.pool is not None:
            token_ids = [completion.token_ids for completion in completions]
            return await self.pool.rewards(item, token_ids, self.timeout_s, what)
        return await in_thread(what, lambda: self._compute_rewards(item, completions), self.timeout_s)

    def _compute_rewards(self, item: TaskItem, completions: Sequence[Completion]) -> list[float]:
        return rewards_of(self.task, item, [self.text_of(completion) for completion in completions])

    def text_of(self, completion: Completion) -> str:
        """Return the text that is scored, without special tokens."""
        return str(self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))

    async def open(self) -> None:
        if self.pool is not None:
            await self.pool.open()

    async def aclose(self) -> None:
        if self.pool is not None:
            await self.pool.aclose()
