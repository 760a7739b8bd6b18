"""The rule that makes a fleet grow or shrink, based on how long training waits and how many slots are free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Change = Literal["grow", "shrink"]


@dataclass(slots=True)
class ScaleRule:
    """Decides at the end of each window of time whether the fleet should change.

    The fleet should grow if training waited for more than ``wait_share`` of the window while almost no slot was free,
    because requests then queue up. It should shrink if more than ``free_share`` of the slots was free, because
    something else then limits the run, such as the bound on the age of samples.
    """

    window_s: float
    wait_share: float
    free_share: float
    _began: float | None = None
    _noted: float = 0.0
    _waited_s: float = 0.0
    _slots_s: float = 0.0
    _free_s: float = 0.0
    _before: tuple[bool, int, int] = field(default=(False, 0, 0))

    def note(self, time_s: float, *, is_waiting: bool, num_slots: int, num_free: int) -> Change | None:
        """Record whether training waits and how many slots are free from now on.

        At the end of a window, return how the fleet should change; return None otherwise, or if it should not change.
        ``time_s`` must not decrease between calls.
        """
        now = (is_waiting, num_slots, num_free)
        if self._began is None:
            self.begin(time_s)
        elapsed_s, self._noted = time_s - self._noted, time_s
        (was_waiting, slots, free), self._before = self._before, now
        self._waited_s += elapsed_s * was_waiting
        self._slots_s += elapsed_s * slots
        self._free_s += elapsed_s * free
        assert self._began is not None
        if time_s - self._began < self.window_s:
            return None
        waited = self._waited_s / (time_s - self._began)
        free_share = self._free_s / self._slots_s if self._slots_s else 0.0
        self.begin(time_s)
        if free_share > self.free_share:
            return "shrink"
        return "grow" if waited > self.wait_share else None

    def begin(self, time_s: float) -> None:
        """Begin a new window, because earlier measurements do not apply to a fleet that has changed."""
        self._began = self._noted = time_s
        self._waited_s = self._slots_s = self._free_s = 0.0
