"""Environments as TRL takes them, written as its documentation shows."""

from __future__ import annotations

from typing import Any


class Guessing:
    """A number to guess, with a tool that says more."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, *, number: int, **row: Any) -> str:
        self._number = number
        self._num_guesses = 0
        self._is_found = False
        return f" It is between 0 and {row.get('most', 9)}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: What you think it is.
        """
        self._num_guesses += 1
        if number < 0:
            raise ValueError("numbers are not negative")
        self._is_found = self._is_found or number == self._number
        return "right" if number == self._number else "higher" if number < self._number else "lower"

    async def hint(self, words: list[str], loud: bool = False) -> dict[str, Any]:
        """
        Ask for a hint.

        Args:
            words: What it may contain.
            loud: Whether it is shouted.

        Returns:
            The hint.
        """
        return {"even": self._number % 2 == 0, "words": words, "loud": loud}

    def get_reward(self) -> float:
        return 1.0 / self._num_guesses if self._is_found else 0.0


class AsyncReward(Guessing):
    """Its reward is awaited."""

    async def get_reward(self) -> float:  # type: ignore[override]
        return 0.5


class NoReward:
    """Owns the data, and lets reward functions judge."""

    def reset(self) -> str:
        return "Say something."


class NoReset:
    """Is not an environment."""


ROWS = [
    {
        "prompt": [{"role": "system", "content": "You guess."}, {"role": "user", "content": "Which number?"}],
        "number": 4,
    },
    {"prompt": "Which one?", "number": 7, "most": 7},
]
WRONG_ROWS = [3]


def length_reward(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
) -> list[float]:
    assert len(prompts) == len(completions) == len(completion_ids) == 1
    assert all(len(column) == 1 for column in columns.values())
    assert completion_ids[0]
    return [float(sum(len(message["content"]) for message in completions[0]))]


async def column_reward(completions: list[Any], number: list[int], **columns: Any) -> list[float | None]:
    return [float(number[0]) if number[0] == 4 else None]
