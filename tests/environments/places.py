"""Environments of the tests' own, found as ``tests.environments.places:NAME``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time

from inflight.contracts import Environment, Episode
from inflight.types import TaskItem


class ThreeTurns(Environment):
    """Three turns, whose reward is the share of one letter; what goes wrong is chosen by ``fault``.

    ``fault`` strikes one episode in ``every``, counted over all that are played.
    """

    def __init__(self, seed: int, fault: str = "", every: int = 2, letter: str = "e") -> None:
        self._fault = fault
        self._every = every
        self._letter = letter
        self._num_played = 0

    @property
    def name(self) -> str:
        return "three_turns"

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, f"{index:04d}")

    async def play(self, item: TaskItem, episode: Episode) -> float:
        self._num_played += 1
        is_struck = self._num_played % self._every == 0
        conversation = episode.conversation()
        said = ""
        for turn in range(3):
            reply = await conversation.say(f"{item.prompt} {turn}")
            conversation.reward_turn(reply.text.count(self._letter) / max(1, len(reply.text)))
            said += reply.text
            if is_struck and turn == 1:
                match self._fault:
                    case "raises":
                        raise ZeroDivisionError("the environment of the test fails on purpose")
                    case "exits":
                        sys.exit("the environment of the test ends its process on purpose")
                    case "cancels itself":
                        raise asyncio.CancelledError
                    case "exits in a task":
                        await asyncio.gather(_exit())
                    case "hangs":
                        await asyncio.sleep(3600)
                    case "hangs and does not let itself be cancelled":
                        began = time.monotonic()
                        while time.monotonic() - began < 20:
                            with contextlib.suppress(asyncio.CancelledError):
                                await asyncio.sleep(20)
                    case "blocks":
                        time.sleep(20)  # noqa: ASYNC251 - on purpose
                    case "nan":
                        return math.nan
                    case "no number":
                        return "much"  # type: ignore[return-value]
                    case "talks too long":
                        for _ in range(10_000):
                            await conversation.say("and then? " * 20)
        return said.count(self._letter) / max(1, len(said))


async def _exit() -> None:
    sys.exit("the environment of the test ends its process on purpose")


def three_turns(**params: object) -> ThreeTurns:
    return ThreeTurns(**params)  # type: ignore[arg-type]
