"""The servers of a run as its page lists them, with the history of their states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

_NUM_STATES = 1000


class ServerStates:
    """One dict of facts for each server, in the order in which the servers appeared."""

    def __init__(self) -> None:
        self._servers: dict[str, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._servers.values())

    def at(self, name: str) -> dict[str, Any]:
        """Return the facts of a server, which is added if it is new."""
        return self._servers.setdefault(
            name,
            {
                "name": name,
                "state": "healthy",
                "version": None,
                "num_requests": 0,
                "num_errors": 0,
                "num_tokens": 0,
                "paused_s": None,
                "last_s": None,
                "outcome": None,
                "history": deque(maxlen=_NUM_STATES),
            },
        )

    def working(self, name: str, time_s: float) -> dict[str, Any]:
        """Return the facts of a working server.

        If it was recorded as having left because a process of the run ended, it is marked as healthy again.
        """
        server = self.at(name)
        if server["state"] == "left":
            self.change(name, time_s, "healthy")
        return server

    def change(self, name: str, time_s: float, state: str, before: str | None = None) -> None:
        """Record a new state of a server, and also ``before`` if no earlier state is known."""
        server = self.at(name)
        if not server["history"]:
            server["history"].append((0.0, before or "healthy"))
        server["history"].append((time_s, state))
        server["state"] = state

    def leave_all(self, time_s: float) -> None:
        """Record that the process of the run has ended.

        Servers that the next process finds will be marked as healthy again.
        """
        for name in self._servers:
            self.change(name, time_s, "left")
