"""Parts of runs of the tests' own, found as ``tests.replay.parts:NAME``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.contracts import BatchComposer, Environment, Episode
from inflight.rollouts.composers import TokenBudget
from inflight.types import Group, Sample, TaskItem
from tests.pictures import BLUE, RED, picture


class Pictures(Environment):
    """Asks twice about a picture, another one each time; the more letters in an answer, the better."""

    def __init__(self, seed: int) -> None:
        pass

    @property
    def name(self) -> str:
        return "pictures"

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, f"{index:03d}")

    async def play(self, item: TaskItem, episode: Episode) -> float:
        conversation, said = episode.conversation(), ""
        for colour in (RED, BLUE):
            shown = {"type": "image_url", "image_url": {"url": picture(colour)}}
            content = [shown, {"type": "text", "text": item.prompt}]
            said += (await conversation.say({"role": "user", "content": content})).text
        return sum(letter.isalpha() for letter in said) / max(1, len(said))


@dataclass(frozen=True)
class Remade(BatchComposer):
    """Trains on every second completion in a form of its own: another rollout, with other masks and advantages."""

    tokens_per_step: int

    def compose(self, groups: Sequence[Group], num_tokens: Sequence[int]) -> Sequence[int]:
        return TokenBudget(self.tokens_per_step).compose(groups, num_tokens)

    def shaped(self, samples: Sequence[Sample], version: int) -> Sequence[Sample]:
        return [_remade(sample) if i % 2 else sample for i, sample in enumerate(samples)]


def _remade(sample: Sample) -> Sample:
    """Return a sample of a rollout of its own: sampled at another temperature, with half of its tokens masked."""
    rollout = dataclasses.replace(sample.rollout, temperature=1.1)
    mask = [is_target and i % 2 == 0 for i, is_target in enumerate(sample.loss_mask)]
    mask[0] = True
    return dataclasses.replace(
        sample, rollout=rollout, loss_mask=mask, advantages=[value / 3 for value in sample.advantages]
    )
