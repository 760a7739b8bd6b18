"""Predictors of completion lengths, from history or from other completions of the same group.

Predictions are used for ranking and for cost estimates. `TailRecall` measures the ranking by its recall of the longest
fifth, as StreamRL does (arXiv 2504.15930, which reports 87 %).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from inflight.base.unknown_names import unknown_name
from inflight.contracts import LengthPredictor
from inflight.errors import ConfigError
from inflight.rollouts.board import OpenItem
from inflight.rollouts.history import HistoryStore


class HistoryMean(LengthPredictor):
    """The mean length of the prompt's earlier completions (RhymeRL, arXiv 2508.18588); None for a new prompt."""

    def __init__(self, history: HistoryStore) -> None:
        self._history = history

    def predict(self, prompt: str, finished: Sequence[int]) -> float | None:
        record = self._history.of(prompt)
        return None if record is None else record.mean_length


class Siblings(LengthPredictor):
    """The length of the group's longest finished completion, like Seer's probe (arXiv 2511.14617); None without one."""

    def __init__(self, history: HistoryStore) -> None:
        pass

    def predict(self, prompt: str, finished: Sequence[int]) -> float | None:
        return float(max(finished)) if finished else None


class SiblingsThenHistory(LengthPredictor):
    """`Siblings` once a completion of the group has finished, and `HistoryMean` until then."""

    def __init__(self, history: HistoryStore) -> None:
        self._history = HistoryMean(history)
        self._siblings = Siblings(history)

    def predict(self, prompt: str, finished: Sequence[int]) -> float | None:
        of_group = self._siblings.predict(prompt, finished)
        return of_group if of_group is not None else self._history.predict(prompt, finished)


PREDICTORS: dict[str, Callable[[HistoryStore], LengthPredictor]] = {
    "history": HistoryMean,
    "siblings": Siblings,
    "both": SiblingsThenHistory,
}


def make_predictor(name: str, history: HistoryStore) -> LengthPredictor:
    """Return the named predictor. Raises `ConfigError` if it is unknown."""
    if name not in PREDICTORS:
        raise ConfigError(unknown_name("length predictor", name, PREDICTORS))
    return PREDICTORS[name](history)


def predicted_length(predictor: LengthPredictor, item: OpenItem, otherwise: float) -> float:
    """Return the predicted length of an item's completions, or ``otherwise`` if there is no prediction."""
    length = predictor.predict(item.prompt, item.finished_lengths)
    return otherwise if length is None else length


class TailRecall:
    """Measures how many of the longest groups, a fraction ``share`` of the last ``window``, were predicted to be so."""

    def __init__(self, share: float = 0.2, window: int = 256) -> None:
        self._share = share
        self._pairs: deque[tuple[float, float]] = deque(maxlen=window)

    def note(self, predicted: float, actual: float) -> None:
        self._pairs.append((predicted, actual))

    def value(self) -> float | None:
        """Return the recall, from 0 to 1; None until there are ten groups.

        Ties count with the probability that a random order would choose them, so the recall of a constant predictor is
        about ``share``.
        """
        if len(self._pairs) < 10:
            return None
        size = math.ceil(self._share * len(self._pairs))
        longest = sorted(range(len(self._pairs)), key=lambda i: -self._pairs[i][1])[:size]
        smallest_chosen = sorted((said for said, _ in self._pairs), reverse=True)[size - 1]
        surely = sum(self._pairs[i][0] > smallest_chosen for i in longest)
        tied = [i for i, (said, _) in enumerate(self._pairs) if said == smallest_chosen]
        num_above = sum(said > smallest_chosen for said, _ in self._pairs)
        chance = (size - num_above) / len(tied)
        return (surely + chance * sum(i in tied for i in longest)) / size
