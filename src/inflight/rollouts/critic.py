"""A small critic of turns, which estimates the value of a conversation before each turn of the model.

ArCHer (arXiv 2402.19446) learns values of whole utterances and gives all tokens of an utterance the same advantage.
Its critic is a language model. The critic in this module is linear: its features are the tokens and pairs of tokens at
the end of the context, and the number of the turn.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from inflight.errors import CheckpointError
from inflight.types import Rollout, Turn

Target = Literal["monte_carlo", "td"]
"""The target of a value: the discounted rewards until the end, or the next reward plus the next value."""

_NUM_WEIGHTS = 1 << 16
_NUM_TOKENS = 48
"""The number of tokens at the end of the context that the features use."""
_PRIMES = (1_000_003, 998_244_353)


class TurnCritic:
    """Values of turns, learned online by normalized least mean squares (Nagumo and Noda 1967)."""

    def __init__(self, target: Target = "monte_carlo", discount: float = 1.0, rate: float = 0.2) -> None:
        self._target = target
        self._discount = discount
        self._rate = rate
        self._weights = array("f", bytes(4 * _NUM_WEIGHTS))

    def value(self, rollout: Rollout, number: int) -> float:
        """Return the expected sum of the rewards from turn ``number`` on."""
        return sum(self._weights[i] for i in _features(rollout, number))

    def advantages(self, rollout: Rollout) -> list[float]:
        """Return, for each turn, its target minus its value."""
        advantages: list[float] = []
        after = 0.0
        for number, reward in reversed([*enumerate(_rewards(rollout))]):
            target, value = reward + self._discount * after, self.value(rollout, number)
            advantages.append(target - value)
            after = target if self._target == "monte_carlo" else value
        return advantages[::-1]

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Move values towards the targets of these rollouts, turn by turn, last turn first.

        A rate of 1 would make each value equal to its target.
        """
        for rollout in rollouts:
            after = 0.0
            for number, reward in reversed([*enumerate(_rewards(rollout))]):
                target = reward + self._discount * after
                features = _features(rollout, number)
                error = target - sum(self._weights[i] for i in features)
                for i in features:
                    self._weights[i] += self._rate * error / len(features)
                after = target if self._target == "monte_carlo" else sum(self._weights[i] for i in features)

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` needs, as JSON values."""
        return {"weights": base64.b64encode(self._weights.tobytes()).decode()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned. Raises `CheckpointError` if it cannot be read."""
        try:
            weights = array("f", base64.b64decode(state["weights"], validate=True))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the critic in the checkpoint cannot be read: {error}") from error
        if len(weights) != _NUM_WEIGHTS:
            raise CheckpointError(f"the critic in the checkpoint has {len(weights)} weights, not {_NUM_WEIGHTS}")
        self._weights = weights


def turns_of(rollout: Rollout) -> Sequence[Turn]:
    """Return the turns of a rollout; a rollout that lists no turns is one turn."""
    return rollout.turns or (Turn(0, len(rollout.completion_token_ids)),)


def _rewards(rollout: Rollout) -> list[float]:
    """Return the reward of each turn; the episode's reward counts towards the last turn."""
    rewards = [turn.reward or 0.0 for turn in turns_of(rollout)]
    rewards[-1] += rollout.reward
    return rewards


def _features(rollout: Rollout, number: int) -> list[int]:
    """Return the indices of the weights whose sum is the value of a turn.

    They depend on the number of the turn and on the end of its context.
    """
    start = turns_of(rollout)[number].start
    said = rollout.completion_token_ids[max(0, start - _NUM_TOKENS) : start]
    context = [*rollout.prompt_token_ids[-_NUM_TOKENS:], *said][-_NUM_TOKENS:]
    found = {number}
    for before, token_id in zip([-1, *context], context, strict=False):
        found.add(64 + token_id * _PRIMES[0] % (_NUM_WEIGHTS - 64))
        found.add(64 + (before * _PRIMES[0] + token_id) * _PRIMES[1] % (_NUM_WEIGHTS - 64))
    return sorted(found)
