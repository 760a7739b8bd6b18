"""Boards, hints and a game for the runs in examples/textarena.toml and examples/trl_environment.toml."""

from __future__ import annotations

from typing import Any


def board(game: Any, player: int, messages: Any) -> str:
    """Show a player of tic-tac-toe its own marks as x, the other's as o, and nothing else."""
    own = "X" if player == 1 else "O"
    cells = [cell for row in game.state.game_state["board"] for cell in row]
    return "".join("." if not cell else "x" if cell == own else "o" for cell in cells)


def hint(game: Any, player: int, messages: Any) -> str:
    """Show a player who guesses a number the last hint, or the range at the start."""
    history = game.state.game_state["guess_history"]
    return history[-1][1] if history else f"{game.min_number}-{game.max_number}?"


class HigherOrLower:
    """A number to guess, as an environment of TRL: the fewer guesses, the better."""

    def reset(self, number: int, **row: Any) -> None:
        self._number = number
        self._num_guesses = 0
        self._is_found = False

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: What you think it is.
        """
        self._num_guesses += 1
        self._is_found = self._is_found or number == self._number
        return "right" if number == self._number else "higher" if number < self._number else "lower"

    def get_reward(self) -> float:
        return 1.0 / self._num_guesses if self._is_found else 0.0


NUMBERS = [{"prompt": "0-9?", "number": number} for number in (3, 8, 1, 6, 4, 9, 0, 5, 2, 7)]
