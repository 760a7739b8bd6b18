"""Exponential backoff, which determines when to retry after a failure. The caller supplies the clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Pauses that start at ``first_s`` seconds and double after each failure, up to ``most_s`` seconds."""

    first_s: float
    most_s: float
    pause_s: float = 0.0
    """The pause after the last failure; 0 before the first one."""
    due_at: float = 0.0
    """When to try again, by the caller's clock."""

    def next(self, now: float) -> float:
        """Record a failure, and return how many seconds to pause."""
        self.pause_s = min(2 * self.pause_s or self.first_s, self.most_s)
        self.due_at = now + self.pause_s
        return self.pause_s

    def is_due(self, now: float) -> bool:
        return now >= self.due_at

    def reset(self) -> None:
        """Record a success: the next pause is ``first_s`` again."""
        self.pause_s = self.due_at = 0.0
