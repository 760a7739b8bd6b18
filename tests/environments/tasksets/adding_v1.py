"""A taskset of verifiers with a tool."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Adding"]


class Adder(vf.Toolset[vf.ToolsetConfig]):
    """A tool that adds."""

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class AddingTask(vf.Task[vf.TaskData]):
    """Right or wrong."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "2")


class Adding(vf.Taskset[AddingTask]):
    """One sum."""

    def load(self) -> Iterable[AddingTask]:
        yield AddingTask(vf.TaskData(prompt="What is 1 + 1?"), self.config.task)


if __name__ == "__main__":
    Adder.run()
