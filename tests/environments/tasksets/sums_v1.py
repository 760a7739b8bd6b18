"""A taskset of verifiers, found by this module's name."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A sum, and what it is."""

    answer: int


class SumConfig(vf.TasksetConfig):
    """How many sums there are."""

    num_sums: int = 3


class SumTask(vf.Task[SumData]):
    """Right or wrong, and a little for brevity."""

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 3)


class Sums(vf.Taskset[SumTask, SumConfig]):
    """Sums of an index with itself."""

    def load(self) -> Iterable[SumTask]:
        for i in range(self.config.num_sums):
            yield SumTask(
                SumData(prompt=f"What is {i} + {i}?", system_prompt="Answer in digits.", answer=2 * i), self.config.task
            )
