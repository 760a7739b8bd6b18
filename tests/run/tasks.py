"""Tasks of the tests' own, found as ``tests.run.tasks:NAME``."""

from __future__ import annotations

import asyncio
import ctypes
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from inflight.rollouts.staleness import TrajectoryLag
from inflight.types import TaskItem
from tests.gates import Gate


class CountLetters:
    """Rewards the share of one letter in the completion, plus ``bonus``: learnable by any model within a few steps."""

    name = "count_letters"

    def __init__(
        self,
        seed: int,
        fail_from: int | None = None,
        hang_from: int | None = None,
        prompt_tokens: int = 8,
        overlong_every: int = 0,
        gate: str | None = None,
        bonus: float = 0.0,
    ) -> None:
        self._bonus = bonus
        self._fail_from = fail_from
        self._hang_from = hang_from
        self._prompt_tokens = prompt_tokens
        self._overlong_every = overlong_every
        self._gate = gate

    def item(self, index: int) -> TaskItem:
        is_overlong = self._overlong_every and index % self._overlong_every == self._overlong_every - 1
        return TaskItem(index, f"{index:0{1200 if is_overlong else self._prompt_tokens}d}")

    def score(self, item: TaskItem, completion: str) -> float:
        if self._fail_from is not None and item.index >= self._fail_from:
            raise ZeroDivisionError("the reward function of the test fails on purpose")
        if self._hang_from is not None and item.index >= self._hang_from:
            Gate(Path(self._gate)).pass_through(item.index) if self._gate else time.sleep(3600)
        return self._bonus + completion.count("e") / max(1, len(completion))


def count_letters(**params: Any) -> CountLetters:
    return CountLetters(**params)


TEACHING_ITEMS = 24


class StopsTeaching(CountLetters):
    """Like `CountLetters` for the first items; then no completion is better than another, and a run waits for data."""

    def score(self, item: TaskItem, completion: str) -> float:
        return super().score(item, completion) if item.index < TEACHING_ITEMS else 0.0


def stops_teaching(seed: int) -> StopsTeaching:
    return StopsTeaching(seed)


class TeachesHalfTheTime(CountLetters):
    """Like `CountLetters` for half of the items; for the others no completion is better than another."""

    def score(self, item: TaskItem, completion: str) -> float:
        return super().score(item, completion) if random.Random(item.index).random() < 0.5 else 0.0


def teaches_half_the_time(seed: int) -> TeachesHalfTheTime:
    return TeachesHalfTheTime(seed)


class AlwaysZero:
    """No completion is better than another."""

    name = "always_zero"

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, str(index))

    def score(self, item: TaskItem, completion: str) -> float:
        return 0.0


def always_zero(seed: int) -> AlwaysZero:
    return AlwaysZero()


class RepeatedPrompts(CountLetters):
    """Like `CountLetters`, over four prompts that come back again and again."""

    def item(self, index: int) -> TaskItem:
        return TaskItem(index, super().item(index % 4).prompt)


def repeated_prompts(seed: int) -> RepeatedPrompts:
    return RepeatedPrompts(seed)


class OnPolicyWithoutAdmission(TrajectoryLag):
    """Lets any number of groups be under way, so that most of them grow too old."""

    def max_outstanding_groups(self, groups_per_step: float) -> int:
        return 1000


class Hostile(CountLetters):
    """Does one of the things that no task should do, from its third item on."""

    def __init__(self, seed: int, how: str) -> None:
        super().__init__(seed)
        self._how = how
        if how == "a thread that never ends":
            threading.Thread(target=threading.Event().wait, name="left-by-the-task").start()

    def item(self, index: int) -> TaskItem:
        item = super().item(index)
        if index < 2:
            return item
        match self._how:
            case "item holds the lock":
                hold_the_lock()
            case "item blocks":
                time.sleep(3600)
            case "item exits":
                sys.exit(3)
            case "no item":
                return None  # type: ignore[return-value]
            case "another index":
                return TaskItem(index + 1, item.prompt)
            case "a number as prompt":
                return TaskItem(index, 7)  # type: ignore[arg-type]
            case "a lone surrogate" if index % 2:
                return TaskItem(index, f"{item.prompt}\ud800")
        return item

    def score(self, item: TaskItem, completion: str) -> float:
        if item.index >= 2:
            match self._how:
                case "reward holds the lock":
                    hold_the_lock()
                case "reward is cancelled":
                    raise asyncio.CancelledError
                case "reward exits":
                    sys.exit(3)
                case "reward interrupts":
                    raise KeyboardInterrupt
                case "reward stops an iteration":
                    raise StopIteration
                case "reward times out":
                    raise TimeoutError
                case "reward raises 10 MB":
                    raise ValueError("x" * 10_000_000)
        return super().score(item, completion)


def hold_the_lock() -> None:
    """Block without releasing the interpreter's lock, as code in C may."""
    ctypes.PyDLL(None).sleep(3600)


def hostile(seed: int, how: str) -> Hostile:
    return Hostile(seed, how)
