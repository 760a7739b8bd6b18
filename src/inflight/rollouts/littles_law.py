"""A check of a run by Little's law: the mean age of groups equals the groups in progress divided by the groups per
step.

Time is measured in optimizer steps. The number of steps that a group has seen, from its first token to the end of the
step that trains on it, is on average the number of groups in progress when a step ends (in flight, queued and in
training), divided by the number that leave per step (Little 1961, L = lambda W). Ages come from the versions that
servers report, and counts from the ledger. The two sides disagree if servers lag behind the trainer or mislabel tokens,
if requests wait in an engine, or if the ledger keeps a group that is never settled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

WINDOW = 32
"""The number of steps over which both sides are averaged."""
TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of Little's law for an average step."""

    in_flight: float
    """Number of groups being sampled or scored when a step ends."""
    queued: float
    training: float
    left: float
    """Number of groups settled per step, by training or otherwise."""
    age: float
    """The mean age of the settled groups, in steps; 1 if a group was sampled and trained on within one step."""

    @property
    def expected_age(self) -> float:
        """The mean age that the law predicts."""
        return (self.in_flight + self.queued + self.training) / self.left

    @property
    def edge(self) -> float:
        """How much the two sides may differ in a window of one step because of the groups that are in progress at its
        end.
        """
        return self.expected_age**2


@dataclass(slots=True)
class LittlesLaw:
    """Records each group that leaves and each step; `terms` returns both sides of the law."""

    version: int = 0
    """Number of steps so far, including those of earlier processes of the run."""
    window: int = WINDOW
    num_alarms: int = 0
    _num_left: int = 0
    _age: int = 0
    _steps: deque[tuple[int, int, int, int, int]] = field(init=False)
    """Rows of numbers: groups in flight, queued, in training, and settled, and the sum of the settled groups' ages."""
    _since: int = 0
    """Number of steps since the law was last checked."""

    def __post_init__(self) -> None:
        self._steps = deque(maxlen=self.window)

    def left(self, first_version: int, *, is_trained: bool) -> None:
        """Record that a group was settled; if ``is_trained``, the step that is now ending has trained on it."""
        self._num_left += 1
        self._age += self.version - first_version + is_trained

    def stepped(self, in_flight: int, queued: int, training: int) -> None:
        """Record the end of a step, with the counts from before its groups were settled."""
        self._steps.append((in_flight, queued, training, self._num_left, self._age))
        self._num_left = self._age = 0
        self.version += 1
        self._since += 1

    def terms(self) -> Terms | None:
        """Return the means over the window; None until a group has been settled."""
        in_flight, queued, training, left, age = map(sum, zip(*self._steps, strict=True)) if self._steps else (0,) * 5
        if not left:
            return None
        num = len(self._steps)
        return Terms(in_flight / num, queued / num, training / num, left / num, age / left)

    def row(self) -> dict[str, Any] | None:
        """Return the terms as JSON values for the record of a step."""
        terms = self.terms()
        return None if terms is None else {**asdict(terms), "expected_age": terms.expected_age}

    def alarm(self) -> Terms | None:
        """Return the terms if a window has just ended in which the law does not hold; each window is checked once."""
        if self._since < self.window:
            return None
        self._since = 0
        terms = self.terms()
        if terms is None:
            return None
        if abs(terms.age - terms.expected_age) <= TOLERANCE * terms.expected_age + terms.edge / self.window:
            return None
        self.num_alarms += 1
        return terms
